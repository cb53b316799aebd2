"""One silo: personal sampling rates against the Renyi filter (table 2, figure 7)."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.federation import personal_budgets as laws
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.models import LogisticRegression
from reproductions._plots import panel
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, Tried
from reproductions.rpdp._noise import noise_for_cap
from reproductions.rpdp._renyi_filter import (
    epsilon_of_norms,
    filtered_descent,
    norms_of_epsilon,
)
from reproductions.rpdp._tables import above, row
from reproductions.rpdp._training import Bench, torch_init
from reproductions.rpdp.budgets import patients
from reproductions.rpdp.heart import hospitals

TITLE = "one silo: personal rates against the Renyi filter"
SOURCE = "Liu et al. 2024, section 7.1, table 2 and figure 7"

OPTIONS = ("seeds",)
DELTA, SIGMA_FILTER, RATE = 1e-3, 10.0, 1.0
TAU, ROUNDS = 10, 15
PAPERS_RATE, MOST_STEPS = 0.1, 2000
LAW = laws.ThreeLevels((2.0, 4.7, 11.8), (0.7, 0.2, 0.1))


def run(settings: Settings) -> Outcome:
    """Trains both on embedded patients, and on the pooled hospitals where their files are."""
    seeds = settings.seeds or 20
    sets = {"patients": patients()}
    if settings.data_dir is not None and (settings.data_dir / "heart_disease").is_dir():
        sets["hospitals, pooled"] = hospitals(settings.data_dir / "heart_disease", "published")
    rows: list[dict[str, Any]] = []
    active: dict[str, np.ndarray] = {}
    for name, (data, test) in sets.items():
        settings.console.print(f"[dim]{name}[/dim]")
        rows += _compare(name, data, test, seeds, active)
    claims = []
    at = {(r["budgets"], r["run"]): r for r in rows}
    for name, (data, _) in sets.items():
        mine, other = at[name, "bisection"], at[name, "filter"]
        claims += [
            above(f"{name}: personal rates are ahead of the filter", mine, other,
                  f"{TAU * ROUNDS} steps each, after which the filter has stopped only "
                  f"{1 - other['active_at_end']:.0%} of the records; rates by bisection, not the "
                  "fitted curve's", source="ours"),
            Claim(f"{name}: nobody exceeds a budget", other["over_budget"] + mine["over_budget"], 0,
                  other["over_budget"] + mine["over_budget"] == 0, source="arithmetic"),
            _in_turn(name, data),
        ]  # fmt: skip
    figure = settings.out / "rpdp-centralised.png"
    _draw(rows, active, figure)
    notes = [
        f"{seeds} seeds, {TAU * ROUNDS} steps of plain descent with rate {RATE:g}; budgets 2.0 "
        "(70 %), 4.7 (20 %), 11.8 (10 %); the filter has sigma = 10, personal rates the noise of a "
        "public cap of 11.8; both by Renyi accounting, with the same conversion",
        "the filter's steps are a constant here; the authors' stop when fewer than ten are active, "
        "and their budgets (B = 5, 20 and 100 in their notebook) stop most records within five",
    ]
    tried = Tried(
        f"{' and '.join(sets)}: {TAU * ROUNDS} steps, {seeds} seeds",
        fixed=f"learning rate {RATE:g} for both arms",
    )
    return Outcome(claims, [figure], rows, notes, tried)


def _in_turn(name: str, data: FederatedData) -> Claim:
    """When the filter first stops a record of each level, in one run."""
    records = data.read(np.arange(data.num_records))
    records = {"x": records["x"], "label": records["label"]}
    model = LogisticRegression(records["x"].shape[1])
    budgets = LAW.quantiles(np.random.default_rng(of(0)).uniform(size=data.num_records))
    allowed = norms_of_epsilon(budgets, SIGMA_FILTER, DELTA)
    params, spent = model.init(jax.random.key(of(0))), np.zeros(len(budgets))
    first: dict[float, int] = {}
    for k in range(MOST_STEPS // TAU):
        params, more = filtered_descent(
            model.loss, params, records, allowed - spent, sigma=SIGMA_FILTER, clip_norm=1.0,
            learning_rate=PAPERS_RATE, steps=TAU, divisor=float(len(budgets)),
            key=jax.random.fold_in(jax.random.key(of(0)), k),
        )  # fmt: skip
        spent = spent + np.asarray(more, np.float64)
        for level in set(budgets[spent >= allowed * (1 - 1e-3)].tolist()) - set(first):
            first[level] = TAU * (k + 1)
        if len(first) == len(LAW.levels):
            break
    steps = [first.get(level, math.inf) for level in LAW.levels]
    least = norms_of_epsilon(np.array(LAW.levels), SIGMA_FILTER, DELTA)
    return Claim(
        f"{name}: the filter stops the first of a level when steps of the clip norm use its budget",
        f"first of each level at steps {', '.join(f'{s:g}' for s in steps)}",
        f"{', '.join(f'{b:.1f}' for b in least)}, rounded up to {TAU}s",
        all(0 <= step - b * (1 - 1e-3) < TAU for step, b in zip(steps, least, strict=True)),
        f"one run at rate {PAPERS_RATE:g}",
        source="ours",
    )


def _compare(
    name: str,
    data: FederatedData,
    test: dict[str, np.ndarray],
    seeds: int,
    active: dict[str, np.ndarray],
) -> list[dict[str, Any]]:
    count = data.num_records
    records = data.read(np.arange(count))
    records = {"x": records["x"], "label": records["label"]}
    one = FederatedData.from_assignment(
        ArrayRecords(records), np.arange(count), np.zeros(count, np.int64), 1
    )
    model = LogisticRegression(records["x"].shape[1])
    bench = Bench(model, one, test, ("sgd", RATE), TAU, ROUNDS, 1.0, (1.0,))
    cap = 11.8
    sigma = noise_for_cap(cap, TAU, ROUNDS, 1.0, DELTA)
    setting = TwoStage(sigma, TAU, ROUNDS, 1.0, DELTA)
    start = model.init(jax.random.key(0))
    held = jax.tree.map(jnp.asarray, test)
    accuracy = jax.jit(
        lambda p: (jax.vmap(model.predict, (None, 0))(p, held["x"]) == held["label"]).mean()
    )
    mine, other, over, left = [], [], 0, []
    for seed in map(of, range(seeds)):
        made = bench.personal(setting, LAW, "bisection", seed)
        assert made.personal is not None
        over += made.personal.summary(ROUNDS)["over_budget"]
        mine.append(bench.run(made, torch_init(start, seed), seed))
        budgets = made.personal.budgets
        allowed = norms_of_epsilon(budgets, SIGMA_FILTER, DELTA)
        params, key = torch_init(start, seed), jax.random.key(seed)
        curve, spent = [], np.zeros(count)
        for k in range(ROUNDS):  # ten steps at a time, to look at the model on the way
            params, more = filtered_descent(
                model.loss, params, records, allowed - spent, sigma=SIGMA_FILTER, clip_norm=1.0,
                learning_rate=RATE, steps=TAU, divisor=float(count),
                key=jax.random.fold_in(key, k),
            )  # fmt: skip
            spent = spent + np.asarray(more, np.float64)
            curve.append(float(accuracy(params)))
            left.append(float(np.mean(spent < allowed * (1 - 1e-3))))
        over += int((epsilon_of_norms(spent, SIGMA_FILTER, DELTA) > budgets).sum())
        other.append(np.array(curve))
    active[name] = np.array(left).reshape(seeds, ROUNDS).mean(0)
    return [
        row("bisection", name, mine, noise_multiplier=sigma, over_budget=over),
        row("filter", name, other, noise_multiplier=SIGMA_FILTER, over_budget=0,
            active_at_end=float(active[name][-1])),
    ]  # fmt: skip


def _draw(rows: list[dict[str, Any]], active: dict[str, np.ndarray], file: pathlib.Path) -> None:
    with panel(file, 1, 2, size=(11, 4)) as (left, right):
        x = TAU * np.arange(1, ROUNDS + 1)
        for r in rows:
            style = "-" if r["run"] == "bisection" else "--"
            left.plot(x, r["curve"], style, label=f"{r['budgets']}, {r['run']}")
        for name, share in active.items():
            right.plot(x, share, label=name)
        left.set(xlabel="step", ylabel="test accuracy")
        right.set(
            xlabel="step", ylabel="share of records with budget left (filter)", ylim=(0, 1.05)
        )
