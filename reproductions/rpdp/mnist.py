"""MNIST over ten silos, IID and five digits each, against all baselines.

The sound protocol: who takes part is drawn as it is accounted. Figure 8's own numbers come from
other settings: ``rpdp/published`` has them side by side.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.data.sets import read_idx
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation import personal_budgets as laws
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.personal import RatePolicy
from dpfl_jax.models import SmallCNN
from reproductions._plots import band, panel
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, Source, Tried
from reproductions.rpdp._cells import Cell, always, train
from reproductions.rpdp._noise import noise_for_cap
from reproductions.rpdp._tables import UNTUNED, above, orders, stops
from reproductions.rpdp._training import Bench

TITLE = "MNIST over ten silos: personal rates against all baselines"
SOURCE = "Liu et al. 2024, section 7.2, figure 8 (MNIST, IID and non-IID)"

OPTIONS = ("seeds", "minutes")
SPLITS = ("IID", "non-IID")
SILOS, DELTA, CAP, PARTICIPATION = 10, 1e-4, 10.0, 0.8
POLICIES: dict[str, RatePolicy] = {
    "certified": "certified",
    "curve fit (paper)": "curve_fit",
    "dropout": "dropout",
    "minimum": "minimum",
}
# The authors' budgets are those of their code, not of the paper's text.
LAWS: dict[str, laws.BudgetDistribution] = {
    "ThreeLevels": laws.ThreeLevels(),
    "MixGauss (code)": laws.BoundedMixGauss(stds=(0.05, 0.1, 0.5)),
    "Pareto (code)": laws.BoundedPareto(4.0, "lomax"),
}


def silos(
    folder: pathlib.Path, split: str, seed: int
) -> tuple[FederatedData, dict[str, np.ndarray]]:
    """6,000 training images a silo, two thirds to train on and the rest to test on.

    Args:
      folder: of MNIST's idx files.
      split: ``IID``, or ``non-IID`` (1,200 images of each of five digits).
      seed: of the split.
    """
    x = read_idx(folder / "train-images-idx3-ubyte.gz").astype(np.float32) / np.float32(255)
    label = read_idx(folder / "train-labels-idx1-ubyte.gz").astype(np.int32)
    rng = np.random.default_rng(seed)
    if split == "IID":
        mine = np.split(rng.permutation(len(x)), SILOS)
    else:
        # Digit d is cut into five parts, for the silos whose five digits include it.
        parts: list[list[np.ndarray]] = [[] for _ in range(SILOS)]
        for digit in range(10):
            pieces = np.array_split(rng.permutation(np.flatnonzero(label == digit)), 5)
            for k, piece in enumerate(pieces):
                parts[(digit - k) % SILOS].append(piece[:1200])
        mine = [rng.permutation(np.concatenate(part)) for part in parts]
    cuts = [int(0.66 * len(part)) for part in mine]
    train = np.concatenate([part[:cut] for part, cut in zip(mine, cuts, strict=True)])
    test = np.concatenate([part[cut:] for part, cut in zip(mine, cuts, strict=True)])
    records = ArrayRecords({"x": x[train], "label": label[train]})
    holders = np.repeat(np.arange(SILOS), cuts)
    data = FederatedData.from_assignment(records, np.arange(len(train)), holders, SILOS)
    return data, {"x": x[test], "label": label[test]}


def run(settings: Settings) -> Outcome:
    """Trains every policy on both splits."""
    if settings.data_dir is None or not (settings.data_dir / "mnist").is_dir():
        raise BadInputError(
            "this figure needs MNIST: put its idx files into a folder `mnist`, and name the folder "
            "above it in DPFL_DATA_DIR"
        )
    quick = settings.quick
    tau, rounds, seeds = (10, 4, 3) if quick else (50, 15, 5)
    seeds = settings.seeds or seeds
    sigma = noise_for_cap(CAP, tau, rounds, PARTICIPATION, DELTA)
    setting = TwoStage(sigma, tau, rounds, PARTICIPATION, DELTA)
    benches = {}
    for split in SPLITS:
        data, test = silos(settings.data_dir / "mnist", split, of(0))
        benches[split] = Bench(
            SmallCNN(), data, test, ("adam", 0.01), tau, rounds, PARTICIPATION,
            [float(silo.num_records) for silo in data.silos],
        )  # fmt: skip
    rows, finished = train(
        "rpdp-mnist", _cells(benches, setting, ("ThreeLevels",) if quick else LAWS), seeds, settings
    )
    figures = []
    if rows:
        figures.append(settings.out / "rpdp-mnist.png")
        _draw(rows, rounds, figures[0])
    notes = [
        f"{seeds} seeds; tau = {tau}, T = {rounds}, lambda = {PARTICIPATION}, sigma = {sigma:.6g} "
        f"(public cap {CAP:g}, delta {DELTA:g}); test images are a third of each silo's",
        finished,
        stops(rows, "split", next(iter(benches.values())).data.num_records),
    ]
    if quick:
        notes.append("reduced: fewer rounds and steps, fewer seeds; only the order is compared")
    tried = Tried(
        f"ten silos of 3,960 images, {rounds} rounds of {tau} steps, lambda {PARTICIPATION} (the "
        f"authors' first scripts'), {seeds} seeds (paper and present scripts: 15 rounds of 50 "
        "steps, lambda 0.5, 5 seeds)",
        fixed=f"nothing: {UNTUNED.format(rate=0.01)}",
    )
    return Outcome(_claims(rows), figures, rows, notes, tried)


def _cells(benches: dict[str, Bench], setting: TwoStage, names: Iterable[str]) -> list[Cell]:
    """In the order of their use, should time be short: the fitted curve tells least."""
    fitted = "curve fit (paper)"
    cells: list[Cell] = []

    def add(labels: Iterable[str], name: str) -> None:
        for split, bench in benches.items():
            for label in labels:
                make = functools.partial(bench.personal, setting, LAWS[name], POLICIES[label])
                cells.append(Cell(bench, label, name, make, {"split": split}))

    for k, name in enumerate(names):
        add([label for label in POLICIES if label != fitted], name)
        if k == 0:
            for split, bench in benches.items():
                free = always(bench.non_private(64))
                cells.append(Cell(bench, "non-private", "all", free, {"split": split}))
        add([fitted], name)
    return cells


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Of the lines that are there: an interrupted reproduction has fewer."""
    at = {(r["split"], r["budgets"], r["run"]): r for r in rows}
    over = sum(r["over_budget"] for r in rows)
    claims = []
    if rows:
        claims.append(
            Claim("nobody exceeds a budget, in any run", over, 0, over == 0, source="arithmetic")
        )
    for split in SPLITS:
        for law in LAWS:
            found = {n: at[split, law, n] for n in POLICIES if (split, law, n) in at}
            claims += orders(f"{split}, {law}", found, "curve fit (paper)", ("dropout", "minimum"))
    for label in POLICIES:
        source: Source = "ours" if label == "certified" else "paper"
        both = [at.get((split, "ThreeLevels", label)) for split in SPLITS]
        if both[0] is not None and both[1] is not None:
            what = f"{label}: non-IID silos lower accuracy"
            claims.append(above(what, both[0], both[1], source=source))
    return claims


def _draw(rows: list[dict[str, Any]], rounds: int, file: pathlib.Path) -> None:
    names = [n for n in LAWS if any(r["budgets"] == n for r in rows)] or ["ThreeLevels"]
    with panel(file, 2, len(names), size=(4.2 * len(names), 6), squeeze=False) as axes:
        for line, split in zip(axes, SPLITS, strict=True):
            for ax, law in zip(line, names, strict=True):
                for r in rows:
                    if r["split"] == split and r["budgets"] in (law, "all"):
                        x = range(1, rounds + 1)
                        band(ax, x, list(zip(*r["curves"])), label=r["run"], marker="")
                ax.set(title=f"{split}, {law}", xlabel="round", ylabel="test accuracy", ylim=(0, 1))
