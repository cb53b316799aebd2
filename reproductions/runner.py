"""``dpfl reproduce all``: every experiment in a process of its own, kept as it finishes.

The folder of the figures also gets ``manifest.json`` (what was run, with what, how long, and every
claim with its verdict), ``reproduce.log``, and a log of each experiment in ``logs/``. The same
command goes on after an interruption: an experiment is known by its code, versions, data, settings.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.run.directory import write_atomically
from reproductions import registry

ROOT = pathlib.Path(__file__).parents[1]
ARCHIVE = ROOT / "reproductions" / "manifest.json"
PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "scipy", "dp-accounting", "scikit-learn")
# Of the package, what decides no number; of the reproductions, what only draws.
_SILENT = ("dpfl_jax/cli/", "reproductions/_plots.py", "reproductions/runner.py")


@dataclasses.dataclass(frozen=True)
class Job:
    """One experiment with its settings.

    Attributes:
      figure: its name.
      quick: at reduced size.
      seeds: per training; None: its own number.
      minutes: after which no training is started; None: no limit.
      replication: 0, or other seeds throughout.
    """

    figure: str
    quick: bool
    seeds: int | None = None
    minutes: float | None = None
    replication: int = 0

    @property
    def command(self) -> list[str]:
        """That runs it alone; its last line of stdout is the result."""
        made = [sys.executable, "-m", "dpfl_jax", "reproduce", self.figure, "--json"]
        made += ["--quick"] if self.quick else []
        made += ["--replication", str(self.replication)]
        for name in ("seeds", "minutes"):
            value = getattr(self, name)
            made += [] if value is None else [f"--{name}", str(value)]
        return made

    @property
    def form(self) -> str:
        """``quick`` or ``full``."""
        return "quick" if self.quick else "full"


def run_all(
    jobs: Sequence[Job],
    out: pathlib.Path,
    console: Console,
    at_once: int = 1,
    command: Callable[[Job], list[str]] = lambda job: job.command,
) -> dict[str, Any]:
    """Runs what is not finished yet, and returns the manifest (of earlier calls there, too).

    Args:
      jobs: what to run.
      out: folder of figures and manifest; it exists.
      console: for people.
      at_once: processes.
      command: what is run for a job (``--out`` is added).

    Raises:
      BadInputError: another version wrote the manifest that is there.
      StoppedError: interrupted; the same call goes on.
    """
    if at_once < 1:
        raise BadInputError(f"--jobs is {at_once}, but it must be at least 1")
    file = out / "manifest.json"
    known = {entry["key"]: entry for entry in _read(file)["experiments"]}
    keys = {job: key_of(job) for job in jobs}
    done = {job: known[keys[job]] for job in jobs if known.get(keys[job], {}).get("claims")}
    expected = _expected([*_read(ARCHIVE)["experiments"], *known.values()])
    (out / "logs").mkdir(exist_ok=True)
    log = (out / "reproduce.log").open("a", buffering=1)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)
        stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        log.write(f"{stamp} {text}\n")

    def write() -> dict[str, Any]:
        mine = {_place(entry) for entry in done.values()}
        others = [entry for entry in known.values() if _place(entry) not in mine]
        made = manifest([*others, *(done[job] for job in jobs if job in done)])
        write_atomically(file, json.dumps(made, indent=1) + "\n")
        return made

    waiting = [job for job in jobs if job not in done]
    _announce(jobs, done, expected, at_once, say)
    running: dict[int, tuple[Job, subprocess.Popen[str], float, str]] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                child = _start(job, [*command(job), "--out", str(out)], out)
                running[child.pid] = (job, child, time.monotonic(), _now())
                say(f"started {job.figure} ({job.form}; expected {_told(expected.get(_id(job)))})")
            pid, status, usage = os.wait4(-1, 0)
            if pid not in running:
                continue
            job, child, begun, started = running.pop(pid)
            child.returncode = os.waitstatus_to_exitcode(status)
            entry = {
                "figure": job.figure,
                "key": keys[job],
                **_settings(job),
                "started": started,
                "wall_seconds": round(time.monotonic() - begun, 2),
                "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
                **provenance(),
            }
            found = _result(job, child.returncode, out)
            done[job] = entry | found
            write()
            left = sum(expected.get(_id(j), 0.0) for j in waiting) / at_once
            say(
                f"[{len(done)} of {len(jobs)}] {job.figure}: {_verdicts(found)}; "
                f"{_told(entry['wall_seconds'])}, of a processor {_told(entry['cpu_seconds'])}"
                + (f"; about {_told(left)} to go" if waiting else "")
            )
    except KeyboardInterrupt:
        for _, child, *_ in running.values():
            child.terminate()
        raise StoppedError(
            f"interrupted with {len(done)} of {len(jobs)} experiments finished: the same command "
            "goes on"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        log.close()
    return write()


def manifest(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Entries, with the tally of their claims by source; the last has the same for people."""
    claims = [claim for entry in entries for claim in entry.get("claims", [])]
    return {
        "format": 1,
        "experiments": list(entries),
        "tally": registry.tally(claims),
        "failed": [entry["figure"] for entry in entries if "error" in entry],
        "holds": not any(map(registry.broken, claims)),
    }


def key_of(job: Job) -> str:
    """Of all that decides an experiment's numbers: code, versions, data, settings."""
    digest = hashlib.sha256(code_of(registry.figures()[job.figure]).encode())
    data = os.environ.get("DPFL_DATA_DIR")
    there = sorted(p.name for p in pathlib.Path(data).iterdir()) if data else []
    more = [_versions(), _settings(job), job.minutes, there]
    digest.update(json.dumps(more, sort_keys=True).encode())
    return digest.hexdigest()[:24]


@functools.cache
def modules_of(module: str) -> frozenset[pathlib.Path]:
    """Files of a reproduction: its own, and those of the others' that it imports."""
    needed, ahead = {ROOT / "reproductions" / "registry.py"}, [module]
    while ahead:
        name = ahead.pop()
        file = ROOT / (name.replace(".", "/") + ".py")
        if not file.is_file() or (file in needed and name != module):
            continue
        needed.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reproductions"):
                ahead += [str(node.module), *(f"{node.module}.{a.name}" for a in node.names)]
    return frozenset(needed)


def is_random(figure: str) -> bool:
    """Whether a figure depends on seeds, so that it can be run again with others."""
    return ROOT / "reproductions" / "_seeds.py" in modules_of(registry.figures()[figure])


@functools.cache
def code_of(module: str) -> str:
    """Digest of the package and of the reproduction's modules that ``module`` imports."""
    digest = hashlib.sha256(_package().encode())
    for file in sorted(modules_of(module)):
        if not str(file.relative_to(ROOT)).startswith(_SILENT):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _package() -> str:
    digest = hashlib.sha256()
    for file in [*sorted((ROOT / "dpfl_jax").rglob("*.py")), *sorted(ROOT.glob("configs/*.yaml"))]:
        if not str(file.relative_to(ROOT)).startswith(_SILENT):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def provenance() -> dict[str, Any]:
    """Commit, versions and hardware, without anything that identifies the machine."""

    def git(*args: str) -> str:
        found = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return found.stdout.strip()

    processor = platform.processor() or platform.machine()
    about = pathlib.Path("/proc/cpuinfo")
    if about.exists():
        lines = about.read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "commit": git("rev-parse", "HEAD") or None,
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": _versions(),
        "hardware": {"processor": processor, "cores": os.cpu_count()},
    }


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("dpfl_jax", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _settings(job: Job) -> dict[str, Any]:
    return {
        "form": job.form,
        "seeds": job.seeds,
        "replication": job.replication,
        "real_data": bool(os.environ.get("DPFL_DATA_DIR")),
    }


def _read(file: pathlib.Path) -> dict[str, Any]:
    if not file.exists():
        return {"experiments": []}
    try:
        found = json.loads(file.read_text())
        if found["format"] == 1:
            return dict(found)
    except (ValueError, KeyError, TypeError):
        pass
    raise BadInputError(f"{file} is no manifest of this version: move it away, or choose --out")


def _start(job: Job, command: list[str], out: pathlib.Path) -> subprocess.Popen[str]:
    # One cache of compiled programs for all, and for the next time.
    known = {"JAX_COMPILATION_CACHE_DIR": str((out / "compiled").absolute())}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    stem = _stem(job)
    logs = out / "logs"
    with (logs / f"{stem}.json").open("w") as result, (logs / f"{stem}.log").open("w") as log:
        environment = {**known, **os.environ, "PYTHONPATH": path}
        return subprocess.Popen(command, stdout=result, stderr=log, text=True, env=environment)


def _result(job: Job, code: int, out: pathlib.Path) -> dict[str, Any]:
    stem = _stem(job)
    lines = (out / "logs" / f"{stem}.json").read_text().strip().splitlines()
    if code in (0, 3) and lines:
        found = json.loads(lines[-1])
        kept = ("claims", "rows", "notes", "tried")
        files = [pathlib.Path(file).name for file in found["files"]]
        return {**{name: found[name] for name in kept}, "files": files}
    said = (out / "logs" / f"{stem}.log").read_text().strip().splitlines()
    return {"error": said[-1] if said else f"exit status {code}", "claims": []}


def _stem(job: Job) -> str:
    return job.figure.replace("/", "-") + (f"-{job.replication}" if job.replication else "")


def _place(entry: Mapping[str, Any]) -> tuple[str, str, int]:
    return entry["figure"], entry["form"], entry["replication"]


def _id(job: Job) -> tuple[str, str]:
    return job.figure, job.form


def _expected(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Wall seconds by figure and form, of the archived manifest and of earlier runs here."""
    return {(e["figure"], e["form"]): e["wall_seconds"] for e in entries if "error" not in e}


def _announce(
    jobs: Sequence[Job],
    done: Mapping[Job, Any],
    expected: Mapping[tuple[str, str], float],
    at_once: int,
    say: Callable[[str], None],
) -> None:
    """What is finished, and how long each of the others is expected to take."""
    for job in jobs:
        took = "finished" if job in done else f"expected {_told(expected.get(_id(job)))}"
        say(f"{job.figure} ({job.form}): {took}")
    left = [job for job in jobs if job not in done]
    total = _told(sum(expected.get(_id(job), 0.0) for job in left) / at_once)
    unknown = sum(_id(job) not in expected for job in left)
    more = f", and {unknown} an unknown time" if unknown else ""
    say(f"{len(done)} of {len(jobs)} are finished; the others take about {total}{more}")


def _told(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _verdicts(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"FAILED: {found['error']}"
    counts = dict.fromkeys(registry.VERDICTS.values(), 0)
    for claim in found["claims"]:
        counts[claim["verdict"]] += 1
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n) or "no claims"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
