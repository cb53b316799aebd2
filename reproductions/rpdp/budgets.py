"""What the distribution of budgets does to accuracy, on embedded data (sections 7.1, 7.3, A)."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np

from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.data import DataConfig
from dpfl_jax.federation import personal_budgets as laws
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.partition import load_subjects
from dpfl_jax.federation.personal import RatePolicy
from dpfl_jax.models import MLP, LogisticRegression
from reproductions._plots import band, panel
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, Tried, Tuning, between
from reproductions.rpdp._cells import Cell, always, train
from reproductions.rpdp._noise import noise_for_cap
from reproductions.rpdp._tables import STOPS, above, orders
from reproductions.rpdp._training import Bench

TITLE = "distributions of budgets: what each does to accuracy"
SOURCE = "Liu et al. 2024, sections 7.1.2 and 7.2, appendix A; on scikit-learn's bundled sets"

OPTIONS = ("seeds", "minutes")
DELTA, CAP, TAU, ROUNDS = 1e-3, 10.0, 10, 15
LAWS: dict[str, laws.BudgetDistribution] = {
    "ThreeLevels": laws.ThreeLevels(),
    "MixGauss": laws.BoundedMixGauss(),
    "MixGauss (code)": laws.BoundedMixGauss(stds=(0.05, 0.1, 0.5)),
    "Pareto": laws.BoundedPareto(),
    "Pareto (code)": laws.BoundedPareto(4.0, "lomax"),
}
POLICIES: tuple[RatePolicy, ...] = ("certified", "curve_fit", "uniform", "dropout", "minimum")
# Appendix A: budgets by class (Boenisch et al. 2023), digits 0 to 9.
BY_CLASS = (0.5, 0.75, 2.0, 2.6, 4.1, 2.1, 2.05, 3.0, 3.1, 6.1)
ARMS = ("by class", "0.5 for all", "3 for all")
RATES = (0.5, 1.0, 2.0, 4.0)  # of plain descent, of which each arm has the best


def run(settings: Settings) -> Outcome:
    """Trains all policies under all distributions, then with budgets by class."""
    seeds = settings.seeds or 20
    sigma = noise_for_cap(CAP, TAU, ROUNDS, 1.0, DELTA)
    cells = _by_law(sigma, settings.quick) + _by_class()
    rows, finished = train("rpdp-budgets", cells, seeds, settings)
    if len(rows) < len(cells):
        return Outcome([], [], rows, [f"{finished}; claims need one seed of each at least"])
    figure = settings.out / "rpdp-budgets.png"
    _draw(rows, figure)
    return Outcome(
        _claims(rows),
        [figure],
        rows,
        [
            finished,
            f"{seeds} seeds; 569 real patients over 4 silos, two thirds of them in training; tau = "
            f"{TAU}, T = {ROUNDS}, sigma = {sigma:.4g} (public cap {CAP:g}), delta = {DELTA:g}",
            STOPS,
            "by class: a small dense network on 1,797 digits instead of Table 4's CNN on MNIST, "
            "and overall accuracy (the table's last column) instead of that of each class; budgets "
            "that follow the label are themselves information, which no guarantee here covers: the "
            "batch size is declared",
        ],
        _tuned(rows)[1],
    )


def patients() -> tuple[FederatedData, dict[str, np.ndarray]]:
    """The bundled patients over four silos in turn, two thirds of them to train on."""
    found = load_subjects(
        DataConfig(source="breast_cancer", validation_fraction=0.34, split_seed=of(1))
    )
    train = found.train.read(np.arange(found.train.num_examples))
    test = found.held_out.read(np.arange(found.held_out.num_examples))
    silos = np.arange(len(train["x"])) % 4
    data = FederatedData.from_assignment(ArrayRecords(train), np.arange(len(silos)), silos, 4)
    return data, test


def _by_law(sigma: float, quick: bool) -> list[Cell]:
    """All policies under all distributions, on the patients."""
    setting = TwoStage(sigma, TAU, ROUNDS, 1.0, DELTA)
    data, test = patients()
    weights = (1.0,) * data.num_silos
    bench = Bench(LogisticRegression(30), data, test, ("adam", 0.02), TAU, ROUNDS, 1.0, weights)

    def cell(at: TwoStage, name: str, law: laws.BudgetDistribution, policy: RatePolicy) -> Cell:
        make = functools.partial(bench.personal, at, law, policy)
        return Cell(bench, policy, name, make, {"mean_budget": float(laws.mean_over(law).mean())})

    cells = [cell(setting, name, law, p) for name, law in LAWS.items() for p in POLICIES]
    three = LAWS["ThreeLevels"]
    cells.append(cell(setting, "ThreeLevels", three, "bisection"))
    for cap in () if quick else (5.0, 20.0):  # a smaller and a larger public cap
        noise = noise_for_cap(cap, TAU, ROUNDS, 1.0, DELTA)
        other = TwoStage(noise, TAU, ROUNDS, 1.0, DELTA)
        cells.append(cell(other, f"ThreeLevels, cap {cap:g}", three, "certified"))
    return [*cells, Cell(bench, "non-private", "all", always(bench.non_private(16)))]


def _by_class() -> list[Cell]:
    """Appendix A in one silo: budgets that follow the digit against one budget for all."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, label = (found.images / 16.0).astype(np.float32), found.target.astype(np.int32)
    order = np.random.default_rng(of(0)).permutation(len(x))
    cut = int(0.66 * len(x))
    train, test = order[:cut], order[cut:]
    records = ArrayRecords({"x": x[train], "label": label[train]})
    data = FederatedData.from_assignment(records, np.arange(cut), np.zeros(cut, np.int64), 1)
    model = MLP((8, 8), 10, (32,))
    held = {"x": x[test], "label": label[test]}
    setting = TwoStage(noise_for_cap(CAP, 1, 100, 1.0, DELTA), 10, 10, 1.0, DELTA)
    mine = data.read(np.arange(cut))["label"]
    public = np.asarray(BY_CLASS)
    budgets = (public[mine], np.full(cut, 0.5), np.full(cut, 3.0))
    cells = []
    for rate in RATES:
        bench = Bench(model, data, held, ("sgd", rate), 10, 10, 1.0, (1.0,))
        for name, own in zip(ARMS, budgets, strict=True):
            by_class = name == "by class"
            policy: RatePolicy = "curve_fit" if by_class else "bisection"  # both by Renyi
            made = bench.with_budgets(setting, own, public if by_class else own[:1], policy)
            cells.append(Cell(bench, policy, f"digits, {name}, rate {rate:g}", always(made)))
    return cells


def _tuned(rows: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], Tried]:
    """Each arm at its best rate: the first fifth of the seeds chooses, and the others are left."""
    lines = {r["budgets"]: r for r in rows}
    best, tuning = {}, {}
    for name in ARMS:
        at = {rate: lines[f"digits, {name}, rate {rate:g}"] for rate in RATES}
        choosing = max(1, len(at[RATES[0]]["by_seed"]) // 5)
        rate = max(RATES, key=lambda r: np.mean(at[r]["by_seed"][:choosing]))
        best[name] = at[rate] | {"by_seed": at[rate]["by_seed"][choosing:]}
        tuning[name] = Tuning({"learning rate": RATES}, {"learning rate": rate}, range(choosing))
    seeds = len(at[rate]["by_seed"])
    tried = Tried(
        f"569 patients in 4 silos; 1,797 digits in one silo, 100 steps; {seeds} seeds",
        tuning=tuning,
        fixed=f"digits only: of {seeds} seeds those after the first {choosing} count; patients "
        "have Adam's rate 0.02 in all arms",
        reported=range(choosing, seeds),
    )
    return best, tried


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    lines = {(r["budgets"], r["run"]): r for r in rows}
    claims = []
    for name in LAWS:
        at: dict[str, Any] = {policy: lines[name, policy] for policy in POLICIES}
        claims += orders(name, at, "curve_fit", ("dropout", "minimum"))
    tie = [lines["ThreeLevels", p] for p in ("curve_fit", "bisection")]
    claims.append(
        between(
            "table 3: bisection and the fitted curve tie",
            np.subtract(*(line["by_seed"] for line in tie)),
            -0.005,
            0.005,
            "difference of accuracies (the paper's: 0.0034 at most, of other budgets); both by "
            "Renyi's epsilon, of which the fitted curve misses some budgets: what that leaves "
            "unused, and its early stops, are in the difference",
            source="paper",
        )
    )
    over = sum(r.get("over_budget", 0) for r in rows)
    claims.append(
        Claim("nobody exceeds a budget, in any run", over, 0, over == 0, source="arithmetic")
    )
    own, strict, loose = (_tuned(rows)[0][name] for name in ARMS)
    note = "each at its own learning rate; the noise is that of a public cap of 10 in all arms"
    claims += [
        above("table 4, overall accuracy: budgets by class beat 0.5 for all", own, strict, note,
              source="paper"),
        above("table 4, overall accuracy: budgets by class beat 3 for all", own, loose,
              f"{note}, and 3 for all samples more than the mean budget does", source="paper"),
    ]  # fmt: skip
    return claims


def _draw(rows: list[dict[str, Any]], file: pathlib.Path) -> None:
    with panel(file, 1, 2, size=(11, 4)) as (left, right):
        width = 0.8 / len(POLICIES)
        at = {(r["budgets"], r["run"]): r for r in rows}
        for k, policy in enumerate(POLICIES):
            for place, name in enumerate(LAWS):  # one by one: laws are no scale to join
                label = policy.replace("_", " ") if place == 0 else None
                values = [at[name, policy]["by_seed"]]
                band(left, [place + k * width], values, color=f"C{k}", linestyle="", label=label)
        left.axhline(at["all", "non-private"]["accuracy"], color="black", lw=0.8, ls=":")
        left.set_xticks(np.arange(len(LAWS)) + 0.32, list(LAWS), fontsize=7)
        left.set(ylabel="test accuracy", title="patients (dotted: non-private)")
        for name, r in _tuned(rows)[0].items():
            rounds = range(1, len(r["curve"]) + 1)
            band(right, rounds, list(zip(*r["curves"])), label=name, marker="")
        right.set(xlabel="round of 10 steps", ylabel="test accuracy", title="budgets by class")
