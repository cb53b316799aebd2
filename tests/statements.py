"""Statements of every mechanism, for tests of what is stated and what is verified."""

import dataclasses
import json
import math

import numpy as np

from dpfl_jax.accounting.rates import TwoStage, solver
from dpfl_jax.clipping import Adaptive
from dpfl_jax.experimental import individual, individual_els
from dpfl_jax.federation.client import restate
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.guarantee import federated_guarantee, federated_statement
from dpfl_jax.federation.isrl.privacy import Budget, SiloNoise, isrl_statement, worst_guarantee
from dpfl_jax.federation.mechanisms import (
    fed_avg,
    hi_grad_avg,
    local_group,
    local_item,
    rpdp,
    subject_uls,
    user_ldp,
)
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.federation.personal import PublicBudgets, personal_guarantee, personal_statement
from dpfl_jax.mechanisms import (
    Calibrated,
    Population,
    allocation,
    banded_inverse,
    bandmf,
    blt,
    els,
    non_private,
    owner_sets,
    truncated,
    uls,
)
from dpfl_jax.planning.selection import RunCount, Selection
from dpfl_jax.run.report import render_markdown
from dpfl_jax.synthesis.histogram import with_histogram

EXTRA = ("a caveat of the run alone",)


def central(mechanism, sigma=0.0, steps=30, delta=1e-5, shared=False):
    found = mechanism.participation.population(
        np.arange(0, 2001, 5)
    )  # 400 users of five examples each
    population = dataclasses.replace(found, shared=shared)
    made = Calibrated(mechanism, sigma, population, steps, delta)
    return made.statement(made.guarantee(caveats=EXTRA))


def selection():
    population = Population(num_users=400, num_examples=2000, num_units=400)
    kinds = [uls(group_size=3, cohort_size=c) for c in (20, 40)]
    cells = tuple(Calibrated(mechanism, 2.0, population, 30, 1e-5) for mechanism in kinds)
    return Selection(cells, RunCount(10.0), 3.0, 50, 1e-5, score_noise=2.0)


def federated(mechanism, sigmas, silos_per_subject=2, delta=1e-5, rounds=5):
    plans = []
    for i, sigma in enumerate(sigmas):
        records = 100 + 7 * i
        subjects = max(40 + i, math.ceil(records / mechanism.participation.max_records_per_subject))
        plans.append(SiloPlan(mechanism, SiloFacts(records, subjects), 3, noise_multiplier=sigma))
    federation = Federation(tuple(plans), rounds, silos_per_subject)
    people = sum(plan.facts.num_subjects for plan in plans)
    guarantee = federated_guarantee(federation, delta, rounds, EXTRA, num_subjects=people)
    return federated_statement(federation, rounds, people, guarantee)


def personal():
    setting = TwoStage(2.0, 3, 6, 0.7, 1e-4)
    budgets = [0.2, 1.0]
    rates = [solver(setting).grid[solver(setting).index_above(r)] for r in (0.01, 0.06)]
    mechanism = rpdp()
    groups = tuple((b, float(q), 6) for b, q in zip(budgets, rates))
    public = PublicBudgets(setting, "certified", 500, groups)
    return personal_statement(mechanism, public, 5, personal_guarantee(public, 5, EXTRA))


def isrl(sampling="poisson"):
    noise = [
        SiloNoise(2.0 + i, 10.0, 40 + i, 12, sampling, Budget(8.0, 1e-4 * (1 + i)))
        for i in range(3)
    ]
    return isrl_statement(noise * 2, worst_guarantee(noise * 2, EXTRA))


def client():
    basis = {"unit": "silo", "epsilon": 8.0, "delta": 1e-5, "rounds": 20, "clip_norm": 0.5}
    made = restate({**basis, "noise_multiplier": 5.4})
    caveats = (*made.privacy.caveats, *EXTRA)
    return made.about(dataclasses.replace(made.privacy, caveats=caveats))


SOUND = {
    "histogram": lambda: with_histogram(SOUND["uls"](), 8.0, 3),
    "els": lambda: central(els(group_size=4, batch_size=30), 2.0),
    "uls": lambda: central(uls(group_size=3, cohort_size=20), 1.0),
    "adaptive": lambda: central(uls(group_size=3, cohort_size=20, clip=Adaptive()), 1.0),
    "uls, declared": lambda: central(uls(group_size=3, cohort_size=20, sampling_prob=0.1), 1.0),
    "bandmf": lambda: central(
        bandmf(group_size=3, cohort_size=20, bands=2, column=(0.8, 0.6)),
        1.0,
        steps=31,
    ),
    "allocation": lambda: central(allocation(group_size=3, cohort_size=20), 1.0, steps=31),
    "blt": lambda: central(
        blt(
            group_size=3,
            cohort_size=20,
            decays=(0.75, 0.25),
            scales=(0.5, 0.125),
            horizon=40,
        ),
        5.0,
        steps=31,
    ),
    "banded_inverse": lambda: central(
        banded_inverse(group_size=3, cohort_size=20, fractions=(0.5, 0.25), horizon=40),
        5.0,
        steps=31,
    ),
    "uls, local steps": lambda: central(
        uls(
            group_size=3,
            cohort_size=20,
            user_learning_rate=0.1,
            user_epochs=2,
        ),
        1.0,
    ),
    "truncated": lambda: central(truncated(group_size=3, cohort_size=20, cap=36), 1.0),
    "individual": lambda: central(
        individual(group_size=3, cohort_size=20, refresh=4, least_steps=9, renyi_order=4.0), 1.0
    ),
    "individual_els": lambda: central(
        individual_els(group_size=3, batch_size=20, refresh=4, least_steps=9, renyi_order=4.0), 3.0
    ),
    "selection": lambda: selection().statement(EXTRA),
    "els, several owners": lambda: central(els(group_size=4, batch_size=30), 2.0, shared=True),
    "owner_sets": lambda: central(
        owner_sets(group_size=3, cohort_size=20, sets_per_user=4), 2.0, shared=True
    ),
    "none": lambda: central(non_private(batch_size=8)),
    "hi_grad_avg": lambda: federated(
        hi_grad_avg(batch_size=20, max_records_per_subject=4), [3.0 + i for i in range(4)]
    ),
    "local_group": lambda: federated(
        local_group(batch_size=20, max_records_per_subject=3, batch_cap=2),
        [4.0 + i for i in range(3)],
        silos_per_subject=1,
    ),
    "user_ldp": lambda: federated(user_ldp(sampling_prob=0.2), [9.0] * 3),
    "subject_uls": lambda: federated(subject_uls(batch_size=20, group_size=2), [2.0] * 3),
    "local_item": lambda: federated(local_item(batch_size=20), [2.0] * 3),
    "fed_avg": lambda: federated(fed_avg(batch_size=20), [None] * 2),
    "personal": personal,
    "isrl": isrl,
    "isrl, one pass": lambda: isrl("disjoint"),
    "client": client,
}


def finished(folder, made, **more):
    """Writes what a finished run leaves beside its configuration; returns its report."""
    report = {
        "name": "run",
        "status": "finished",
        "steps": 2,
        "planned_steps": 2,
        "best_step": None,
        "summary": made.privacy.summary(),
        "privacy": made.privacy.to_json(),
        "guarantee": made.text,
        "eval": {},
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "guarantee.json").write_text(made.dumps())
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "report.md").write_text(render_markdown(report))
    return report
