"""``dpfl audit``: attacks a mechanism or a run, and compares the result with its epsilon."""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from typing import Annotated, Any

from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.files import save_figure
from dpfl_jax.run.console import Console

DESCRIPTION = """\
Attack a mechanism, and compare what that proves with what is claimed.

With --simulate the mechanism of a configuration releases designed gradients alone: its own sampler,
clipping, noise and divisor, no training. Each canary is in or out by a fair coin, and has a
direction of its own; the attacker sees every release and decides by the likelihood ratio. The rates
of right and false alarms refute all trade-off curves below them: what is printed is the largest
epsilon of the claimed mechanism with less noise that is refuted, at the confidence asked for.

Of a run that was trained with canaries (a section `audit` in its configuration) the directory is
given: what it released is held against its own guarantee.json. With --train a central configuration
is trained with canaries for the attack alone, and no model is kept (a ledger is charged).

With --user-inference half of the people of a configuration, by fair coins, train it, with privacy
and without: can somebody who has the model, and other records of theirs, tell who took part? With
--membership the attacker holds the very records, and the coins prove an epsilon by the final model
alone. Both are for all systems (for ISRL-DP --membership alone, as its unit is a record), and keep
no model; a ledger is not charged.

The claim is refuted if its own curve is: a bug, but for bad luck. With --repeat the whole is done
so many times; a sound mechanism is refuted in at most a share 1 - confidence of them.

examples:
  dpfl audit --simulate configs/quickstart.yaml
  dpfl audit --simulate configs/subject/quickstart.yaml federation.rounds=5 --trials 5000
  dpfl audit --simulate configs/rpdp/quickstart.yaml --picture audit.png
  dpfl audit --simulate configs/isrl/quickstart.yaml --confidence 0.999 --json
  dpfl train configs/quickstart.yaml audit.canaries=300 --run-dir runs/audited
  dpfl audit runs/audited --picture audit.png
  dpfl audit --train configs/quickstart.yaml audit.canaries=300
  dpfl audit --user-inference configs/audit/user_inference.yaml
  dpfl audit --membership configs/isrl/quickstart.yaml

exit status: 0 the claim stands; 3 it is refuted; 2 bad input; 1 anything else.
"""


class Options(options.MayRunCode):
    """An audit.

    Attributes:
      simulate: attack only the mechanism of a configuration.
      train: train a configuration with canaries (central runs).
      user_inference: rank the people of a configuration by other records.
      membership: rank the people of a configuration by their records.
      overrides: directory of a finished run; or, for a configuration, keys to override.
      trials: number of trials of --simulate.
      confidence: confidence of the proof (default 0.95, or the run's).
      repeat: number of independent audits.
      seed: seed of coins, sampling and noise (default: drawn).
      picture: draw the result (PNG).
    """

    simulate: Annotated[str | None, Flag("CONFIG", group="what")] = None
    train: Annotated[str | None, Flag("CONFIG", group="what")] = None
    user_inference: Annotated[str | None, Flag("CONFIG", group="what")] = None
    membership: Annotated[str | None, Flag("CONFIG", group="what")] = None
    overrides: Annotated[tuple[str, ...], Flag("RUN | key=value", is_positional=True)] = ()
    trials: Annotated[int, Flag("N")] = 20_000
    confidence: Annotated[float | None, Flag("C")] = None
    repeat: Annotated[int, Flag("N")] = 1
    seed: Annotated[int | None, Flag("N")] = None
    picture: Annotated[pathlib.Path | None, Flag("FILE")] = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Audits; ``holds`` in the result is the verdict."""
    from dpfl_jax.config import load_config
    from dpfl_jax.randomness import RootKey

    console = Console(stderr=args.json)
    ranked = args.user_inference or args.membership
    path = args.simulate or args.train or ranked
    if path is None:
        if len(args.overrides) != 1:
            raise BadInputError(
                "say what to audit: the directory of a run, or a configuration after --simulate, "
                "--train, --user-inference or --membership"
            )
        return _report(console, *_of_run(pathlib.Path(args.overrides[0]), args.confidence), args)
    config = load_config(path, args.overrides, args.allow_code)
    key = RootKey.generate() if args.seed is None else RootKey.from_seed(args.seed)
    if ranked is not None:
        return _ranked(config, key, console, args)
    audits: list[Any] = []
    cost: dict[str, Any] | None = None
    for number in range(max(1, args.repeat)):
        if args.train is not None:
            seed = None if args.seed is None else args.seed + number
            round_audits, cost = _trained(config, seed, args.confidence, console)
        else:
            from dpfl_jax.audit import audit
            from dpfl_jax.audit.attacks.simulate import trials_of

            trials = trials_of(config, key.child("audit", number), console, args.trials)
            round_audits = [
                audit(some, 0.95 if args.confidence is None else args.confidence) for some in trials
            ]
        audits += round_audits
    return _report(console, audits, cost, args)


def _of_run(directory: pathlib.Path, confidence: float | None) -> tuple[list[Any], dict[str, Any]]:
    from dpfl_jax.accounting import statement
    from dpfl_jax.audit import proof

    if not (directory / "config.yaml").exists():
        raise BadInputError(
            f"{directory} is not the directory of a run: give a configuration after --simulate, "
            "--train, --user-inference or --membership"
        )
    seen = proof.read_run_audit(directory)
    return seen.audits(statement.read(directory / statement.NAME), confidence), seen.cost


def _trained(
    config: Any, seed: int | None, confidence: float | None, console: Console
) -> tuple[list[Any], dict[str, Any]]:
    from dpfl_jax.config.schema import AuditConfig
    from dpfl_jax.run.pipeline import run_experiment

    if config.variant != "central":
        raise BadInputError("--train is for central configurations: audit others with --simulate")
    changed = {
        "audit": config.audit or AuditConfig(),
        "eval": config.eval.model_copy(update={"baseline": False}),
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder, config.name)
        report = run_experiment(config.model_copy(update=changed), directory, console)
        if report["status"] != "finished":
            raise StoppedError("the audit was stopped, and keeps nothing")
        return _of_run(directory, confidence)


def _ranked(config: Any, key: Any, console: Console, args: argparse.Namespace) -> dict[str, Any]:
    from dpfl_jax.audit.attacks.participation import participation

    by_records = args.membership is not None
    confidence = 0.95 if args.confidence is None else args.confidence
    result, audits = participation(
        config, key, console, membership=by_records, confidence=confidence
    )
    for name, area in result["auc"].items():
        console.print(f"{name.replace('_', ' ')}: AUC {area:.3f}", highlight=False)
    console.print(
        f"{result['users_in']} took part and {result['users_out']} did not; a guess has AUC 0.500, "
        f"give or take {result['chance_deviation']:.3f}",
        highlight=False,
    )
    return result | _report(console, audits, None, args) if audits else result


def _report(
    console: Console, audits: list[Any], cost: dict[str, Any] | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Prints, draws and returns what the audits prove."""
    from dpfl_jax.audit import proof
    from dpfl_jax.audit.proof import plot_audits

    for line in (cost or {}).get("sentences", ()):
        console.print(line, highlight=False)
    for one in audits:
        console.print(str(one), highlight=False, soft_wrap=True)
        console.print(f"  {one.how}; attack: {one.attack}", highlight=False)
    summary = proof.summary(audits)
    if len(audits) > 1:
        console.print(f"{summary['refuted']} of {len(audits)} audits refute their claim")
    if args.picture is not None:
        save_figure(plot_audits(audits[:4]), args.picture, dpi=130)
        console.print(f"picture: {args.picture}")
    return summary | {"cost": cost}
