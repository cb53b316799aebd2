"""``dpfl silo``: silos on other machines, and the server that they train with."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import shlex
from typing import Annotated, Any

from rich.table import Table

from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, extra
from dpfl_jax.run.console import Console

DESCRIPTION = """\
Train with silos in separate processes, on Flower (pip install 'dpfl_jax[flower]').

A silo's folder holds its root key, its policy (silo.yaml), its ledger and its log. Its records stay
where they are: what leaves the silo is what it has sampled, clipped and noised. docs/guides/
hospitals.md says what each party must trust.

  init   makes the folder: a secret key, and silo.yaml to review and sign off
  check  reads data, study, policy, log and ledger, and says what would be sent and allowed
  run    answers the server; a silo that was killed resumes by the same command
  serve  the server: it holds no data; one that was killed resumes by the same command

examples:
  dpfl silo init silos/bern --name bern --config study.yaml --data bern.csv
  dpfl silo check silos/bern
  dpfl silo run silos/bern
  dpfl silo serve study.yaml --run-dir runs/study --host 0.0.0.0 --port 8000 \\
    --certificate server.pem --key server.key
"""

_SILO = """\
# One silo. `dpfl silo check` with this folder says what this allows.
name: {name}  # the order of names is the order of silos
config: {config}  # the study, the same file at all parties
data: {{path: {data}}}  # what of the study's section data is this silo's own
server: {server}
root_certificates: {certificates}
certificate: {certificate}
certificate_key: {key}

# Signed off by whoever answers for these people. The silo itself computes what a plan costs them,
# and refuses what goes beyond any of this.
policy:
  epsilon: {epsilon}            # largest of one run, for one person
  delta: {delta}
  unit: {unit}              # subject: a person with all records; record: one of them
  total_epsilon: {epsilon}      # largest of all runs together; null: as many runs as a server likes
  least_noise_multiplier: 0.3
  most_rounds: {rounds}
  mechanisms: [{mechanism}]
"""


class Init(options.Options):
    """A folder of a silo.

    Attributes:
      folder: folder to make.
      name: name of the silo.
      config: the study's configuration.
      data: the silo's data.
      server: address of the server.
      root_certificates: certificates that sign the server's.
      certificate: the silo's certificate, if the server asks for one.
      key: key of --certificate.
    """

    folder: Annotated[str, Flag("FOLDER", is_positional=True)]
    name: str
    config: str
    data: Annotated[str, Flag("PATH")]
    server: Annotated[str, Flag("HOST:PORT")] = "127.0.0.1:8000"
    root_certificates: Annotated[str | None, Flag("FILE")] = None
    certificate: Annotated[str | None, Flag("FILE")] = None
    key: Annotated[str | None, Flag("FILE")] = None


class Check(options.Options):
    """A check of a silo.

    Attributes:
      folder: folder of the silo.
    """

    folder: Annotated[str, Flag("FOLDER", is_positional=True)]


class Run(Check):
    """A silo that answers the server.

    Attributes:
      finish: end once a run is finished.
      insecure: no TLS: for tests on one machine.
    """

    finish: bool = False
    insecure: bool = False


class Serve(options.Options):
    """A server.

    Attributes:
      config: the study's configuration.
      run_dir: directory of the run.
      host: address to listen on.
      port: port to listen on.
      certificate: the server's certificate.
      key: key of --certificate.
      silo_certificates: certificates that sign the silos': a silo without one is refused.
      wait: seconds until a silo is left out.
      insecure: no TLS: for tests on one machine.
    """

    config: Annotated[str, Flag("CONFIG", is_positional=True)]
    run_dir: Annotated[str, Flag("DIR")]
    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Annotated[str | None, Flag("FILE")] = None
    key: Annotated[str | None, Flag("FILE")] = None
    silo_certificates: Annotated[str | None, Flag("FILE")] = None
    wait: float = 600.0
    insecure: bool = False


VERBS = {
    "init": (Init, "make the folder of a silo"),
    "check": (Check, "read everything, and send nothing"),
    "run": (Run, "answer the server"),
    "serve": (Serve, "be the server"),
}


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Runs the chosen verb."""
    return {"init": _init, "check": _check, "run": _run, "serve": _serve}[args.verb](args)


def _init(args: argparse.Namespace) -> dict[str, Any]:
    import os

    from dpfl_jax.flower.silo_folder import CONFIG, KEY, make_key
    from dpfl_jax.flower.study import read_study, study_of
    from dpfl_jax.run.directory import write_atomically

    folder = pathlib.Path(args.folder)
    if (folder / CONFIG).exists() or (folder / KEY).exists():
        raise BadInputError(f"{folder} already holds a silo, with its key and log: name another")
    config: Any = read_study(pathlib.Path(args.config))
    study_of(config)
    isrl = config.variant == "isrl"
    privacy = config.privacy
    folder.mkdir(parents=True, exist_ok=True)

    def from_there(path: str | None) -> str | None:
        return path and os.path.relpath(path, folder)

    epsilon = max(privacy.epsilon) if isinstance(privacy.epsilon, tuple) else privacy.epsilon
    delta = privacy.delta if isinstance(privacy.delta, float) else 1e-5
    values = {
        "name": args.name,
        "config": from_there(args.config),
        "data": from_there(args.data),
        "server": args.server,
        "certificates": from_there(args.root_certificates),
        "certificate": from_there(args.certificate),
        "key": from_there(args.key),
        "epsilon": epsilon if epsilon is not None else 1.0,
        "delta": delta,
        "unit": "record" if isrl else "subject",
        "rounds": config.federation.rounds or 1000,
        "mechanism": config.mechanism.kind,
    }
    # JSON is YAML: a path with a comma or a colon in it stays one string.
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    text = _SILO.format(**quoted)
    write_atomically(folder / CONFIG, text)
    make_key(folder)
    console = Console(stderr=args.json)
    check = shlex.join(["dpfl", "silo", "check", str(folder)])
    console.print(f"made {folder}: review {folder / CONFIG}, then `{check}`")
    return {"folder": str(folder), "name": args.name}


def _check(args: argparse.Namespace) -> dict[str, Any]:
    from dpfl_jax.accounting.guarantee import rounded_up
    from dpfl_jax.flower.silo import SiloClient
    from dpfl_jax.flower.study import digest_of

    console = Console(stderr=args.json)
    silo = SiloClient(args.folder, console)
    runs = {row["run"]: row for row in silo.log.rows if row["kind"] == "accepted"}
    result = {
        "name": silo.name,
        "study": digest_of(silo.held.config),
        "sent": silo.held.facts,
        "policy": silo.policy.model_dump(mode="json"),
        "runs": {
            name: {
                "rounds": len([r for r in silo.log.rows
                               if r["kind"] == "answered" and r["run"] == name]),
                "epsilon": row["guarantee"]["epsilon"],
                "ledger": row["ledger"]["after"],
            }
            for name, row in runs.items()
        },
        "refused": [r["why"] for r in silo.log.rows if r["kind"] == "refused"],
    }  # fmt: skip
    silo.close()
    table = Table(title=f"silo {silo.name}", title_justify="left", show_header=False)
    table.add_row("data", silo.held.description)
    table.add_row("sent to the server", ", ".join(f"{k} {v}" for k, v in silo.held.facts.items()))
    table.add_row("study", f"{result['study']} (the same at all parties)")
    table.add_row("policy", ", ".join(f"{k} {v}" for k, v in result["policy"].items()))
    for name, row in result["runs"].items():
        of_run, every = (rounded_up(row[name], 4) for name in ("epsilon", "ledger"))
        spent = f"epsilon {of_run} of this run, {every} of all by then"
        table.add_row(f"run {name}", f"{row['rounds']} rounds answered, {spent}")
    for sentence in result["refused"]:
        table.add_row("refused", sentence)
    console.print(table)
    return result


def _flower() -> None:
    import os

    with extra("flower", "`dpfl silo`"):
        importlib.import_module("flwr")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")


def _run(args: argparse.Namespace) -> dict[str, Any]:
    _flower()
    from dpfl_jax.flower.node import run_node
    from dpfl_jax.flower.silo import SiloClient

    silo = SiloClient(args.folder, Console(stderr=args.json))
    run_node(silo, args.insecure, args.finish)
    return {"name": silo.name, "finished": silo.log.find("finished")}


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    from dpfl_jax.cli.train import print_report

    _flower()
    from dpfl_jax.flower.serve import serve

    given = (args.certificate, args.key)
    if args.insecure == all(given) or (any(given) and not all(given)):
        raise BadInputError(
            "give --certificate and --key (docs/guides/hospitals.md makes them), or --insecure for "
            "a test on one machine"
        )
    tls, silos = None, args.silo_certificates
    if args.insecure and silos:
        raise BadInputError("--silo-certificates need TLS: give --certificate and --key")
    if not args.insecure:
        files = [*given, *([silos] if silos else [])]
        missing = [path for path in files if not pathlib.Path(path).is_file()]
        if missing:
            raise BadInputError(f"there is no file {missing[0]}")
        tls = (str(pathlib.Path(given[0]).absolute()), str(pathlib.Path(given[1]).absolute()))
    console = Console(stderr=args.json)
    report = serve(
        args.config,
        args.run_dir,
        console,
        host=args.host,
        port=args.port,
        tls=tls,
        silos=silos,
        wait=args.wait,
    )
    print_report(console, report)
    return report
