"""The trainings of a figure: seed after seed, and none lost once it is finished.

Each finished training is a line of ``FIGURE.runs.jsonl`` beside the figure, under a fingerprint of
everything that determines it, the code included: an interrupted reproduction goes on where it was,
a larger number of seeds adds to what is there, and tables can be printed of what is finished.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich.progress import Progress

import dpfl_jax
from reproductions._seeds import of
from reproductions.registry import Settings
from reproductions.rpdp import _training
from reproductions.rpdp._tables import row
from reproductions.rpdp._training import Bench, Made, torch_init


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """A line of a table, trained once for every seed.

    Attributes:
      bench: model, data and training.
      run: name of the policy.
      budgets: name of the distribution of budgets.
      make: the federation of a seed.
      more: what else the line says.
    """

    bench: Bench
    run: str
    budgets: str
    make: Callable[[int], Made]
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join([self.run, self.budgets, *(f"{k} {v}" for k, v in self.more.items())])


def always(made: Made) -> Callable[[int], Made]:
    """The same federation for every seed."""
    return lambda seed: made


class Kept:
    """Finished trainings in a file: fingerprint -> accuracy after every round."""

    def __init__(self, file: pathlib.Path) -> None:
        """Reads what is there; a line that an interruption tore is as if it were not there."""
        self._file = file
        self._curves: dict[str, np.ndarray] = {}
        self._torn = False
        if not file.exists():
            return
        text = file.read_text()
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                found = json.loads(line)
                self._curves[found["fingerprint"]] = np.asarray(found["curve"], np.float64)
            except (ValueError, KeyError, TypeError):
                continue

    def get(self, fingerprint: str) -> np.ndarray | None:
        """The curve of a finished training."""
        return self._curves.get(fingerprint)

    def add(self, fingerprint: str, curve: np.ndarray, **about: Any) -> None:
        """Appends a finished training; it is on disk when this returns."""
        line = json.dumps({"fingerprint": fingerprint, **about, "curve": curve.tolist()})
        with self._file.open("a") as file:
            file.write(("\n" if self._torn else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self._curves[fingerprint] = curve


@functools.cache
def code() -> str:
    """Identifies the code that trains: another one may find other accuracies."""
    root = pathlib.Path(dpfl_jax.__file__).parent
    digest = hashlib.sha256(repr((jax.__version__, np.__version__, optax.__version__)).encode())
    for part in ("clipping", "federation", "mechanisms", "models", "noise", "sampling"):
        for file in sorted((root / part).rglob("*.py")):
            digest.update(file.read_bytes())
    for file in (root / "randomness.py", pathlib.Path(_training.__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def fingerprint(bench: Bench, made: Made, seed: int) -> str:
    """Of what a training depends on: code, data, model, optimiser, noise, rates, stays, seed."""
    digest = hashlib.sha256(f"{code()} {bench.fingerprint} {bench.microbatch_size}".encode())
    for plan in made.federation.silos:
        public = {"weight": plan.weight, "steps": plan.local_steps} | plan.mechanism.to_json()
        digest.update(json.dumps(public, sort_keys=True, default=str).encode())
    for name in () if made.assignment is None else ("rates", "stay"):
        digest.update(np.ascontiguousarray(getattr(made.assignment, name)).tobytes())
    about = (made.federation.rounds, repr(made.federation.cohort), made.realized_batch, seed)
    digest.update(repr(about).encode())
    return digest.hexdigest()[:32]


def train(
    figure: str, cells: Sequence[Cell], seeds: int, settings: Settings
) -> tuple[list[dict[str, Any]], str]:
    """Trains all cells with seed 0, then with seed 1, and so on.

    Args:
      figure: name of the file of finished trainings.
      cells: in the order in which they are trained.
      seeds: for each cell.
      settings: ``settings.minutes`` after which no training is started any more.

    Returns:
      A line for every cell of which a training is finished, and a note.
    """
    kept = Kept(settings.out / f"{figure}.runs.jsonl")
    start, trained, missing = time.monotonic(), 0, 0
    curves: list[list[np.ndarray]] = [[] for _ in cells]
    facts: list[list[dict[str, Any]]] = [[] for _ in cells]
    params = {id(c.bench): c.bench.model.init(jax.random.key(0)) for c in cells}
    with Progress(console=settings.console) as progress:
        bar = progress.add_task(figure, total=seeds * len(cells))
        for seed in map(of, range(seeds)):
            for k, cell in enumerate(cells):
                progress.update(bar, description=f"{cell.name}, seed {seed}")
                made = cell.make(seed)
                key = fingerprint(cell.bench, made, seed)
                curve = kept.get(key)
                if curve is None or curve.shape != (cell.bench.rounds,):
                    minutes = (time.monotonic() - start) / 60
                    if settings.minutes is not None and minutes >= settings.minutes:
                        missing += 1
                        continue
                    begun = time.perf_counter()
                    initial = torch_init(params[id(cell.bench)], seed)
                    curve = cell.bench.run(made, initial, seed)
                    seconds = round(time.perf_counter() - begun, 1)
                    kept.add(key, curve, training=cell.name, seed=seed, seconds=seconds)
                    trained += 1
                curves[k].append(curve)
                facts[k].append(_facts(made))
                progress.advance(bar)
    rows = [
        row(cell.run, cell.budgets, found, **cell.more, **_mean(known))
        for cell, found, known in zip(cells, curves, facts, strict=True)
        if found
    ]
    note = f"{seeds * len(cells) - missing} of {seeds * len(cells)} trainings are finished"
    if seeds * len(cells) - missing > trained:
        note += f", {seeds * len(cells) - missing - trained} of them in earlier runs"
    return rows, f"{note}; they are kept in {figure}.runs.jsonl"


def _facts(made: Made) -> dict[str, Any]:
    facts: dict[str, Any] = {"noise_multiplier": made.federation.silos[0].sigma}
    if made.personal is None:
        return facts
    summary = made.personal.summary(made.federation.rounds)
    batches = [plan.mechanism.participation.divisor(plan.facts) for plan in made.federation.silos]
    return facts | {
        "expected_batch": float(np.mean(batches)),
        "mean_rate": summary["rate"]["mean"],
        "left_early": summary["left_early"],
        "never_sampled": summary["never_sampled"],
        "over_budget": summary["over_budget"],
    }


def _mean(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; records over budget are counted over all seeds."""
    found: dict[str, Any] = {
        name: float(np.mean([f[name] for f in facts])) for name in facts[0] if name != "over_budget"
    }
    found["over_budget"] = sum(f.get("over_budget", 0) for f in facts)
    return found
