"""The law of loss: found again where it is known, its band, its file, its refusals; questions."""

import json
import math

import numpy as np
import pytest

from dpfl_jax.errors import BadInputError
from dpfl_jax.planning import Planner, Sensitivities, UserStatistics
from dpfl_jax.planning.questions import Scenario, ask
from dpfl_jax.planning.scaling_law import ScalingLaw, fit_scaling_law, join_scaling_laws

NORMS = Sensitivities.assumed(0.5, [1, 2, 4, 8])


def true_loss(cell):
    """A world in which loss falls with steps and rises with all noise on the gradient."""
    norm = NORMS.norm(cell["kind"], cell["group_size"])
    rho = norm * math.sqrt(cell["ratio"] ** 2 + 1e-3 / cell["size"])
    best = (math.log(cell["rate"]) - 0.2) ** 2
    return 2.0 + 3.0 * cell["steps"] ** -0.3 + 20.0 * rho**0.8 + 0.3 * best


def world(n, seed, rates=(1.0,), noise=0.005):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        kind = ("uls", "els")[rng.integers(2)]
        row = {
            "kind": kind, "group_size": int(2 ** rng.integers(4)), "rate": float(rng.choice(rates)),
            "size": int(2 ** rng.uniform(4, 8)), "steps": int(10 ** rng.uniform(0.8, 2)),
            "ratio": float(10 ** rng.uniform(-3, -1)),
        }  # fmt: skip
        rows.append({**row, "loss": true_loss(row) * math.exp(noise * rng.standard_normal())})
    return rows


@pytest.fixture(scope="module")
def law():
    return fit_scaling_law(world(40, 0), NORMS, {"initial": 6.0})


def test_runs_that_were_not_fitted_are_predicted_within_their_band(law):
    others = world(200, 1)
    told = law.predict(others)
    losses = np.array([row["loss"] for row in others])
    errors = np.abs(np.array([one["loss"] for one in told]) / losses - 1)
    assert np.median(errors) < 0.015
    within = np.mean([t["low"] <= x <= t["high"] for t, x in zip(told, losses)])
    assert within > 0.75  # 90 % are meant; of 200 runs with fixed seeds
    assert all(t["low"] < t["loss"] < t["high"] for t in told)


def test_bands_widen_and_say_so_beyond_what_was_tried(law):
    cell = {"kind": "uls", "group_size": 1, "size": 64, "ratio": 0.01}
    near, far = law.predict([{**cell, "steps": 30}, {**cell, "steps": 3000}])
    assert math.log(far["high"] / far["low"]) > 3 * math.log(near["high"] / near["low"])
    assert near["outside"] == 1.0
    assert far["outside"] > 20


def test_the_best_of_the_rates_is_taken():
    law = fit_scaling_law(world(60, 2, rates=(0.25, 1.0, 4.0)), NORMS)
    cell = {"kind": "uls", "group_size": 1, "size": 64, "ratio": 0.01, "steps": 30}
    assert law.predict([cell])[0]["rate"] == 1.0
    assert law.predict([{**cell, "rate": 4.0}])[0]["loss"] > law.predict([cell])[0]["loss"]


def test_noise_for_a_loss_is_the_inverse_of_loss_for_noise(law):
    cell = {"kind": "els", "group_size": 2, "size": 64, "steps": 40}
    ratio = law.ratio_for(4.0, cell)
    assert law.predict([{**cell, "ratio": ratio}])[0]["loss"] == pytest.approx(4.0, rel=1e-3)
    assert law.ratio_for(0.5, cell) == 0.0


def test_a_fit_is_read_as_it_was_written(law, tmp_path):
    file = tmp_path / "fit.json"
    law.save(file)
    cell = {"kind": "uls", "group_size": 2, "size": 64, "steps": 40, "ratio": 0.02}
    assert ScalingLaw.load(file).predict([cell]) == law.predict([cell])
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 0}))
    with pytest.raises(BadInputError, match="another version"):
        ScalingLaw.load(file)
    file.write_text("[]")
    with pytest.raises(BadInputError, match="is not a fit"):
        ScalingLaw.load(file)


def test_too_few_runs_are_refused():
    with pytest.raises(BadInputError, match="too few"):
        fit_scaling_law(world(5, 0), NORMS)
    diverged = [{**row, "loss": None} for row in world(20, 0)]
    with pytest.raises(BadInputError, match="0 runs"):
        fit_scaling_law(diverged, NORMS)


@pytest.fixture(scope="module")
def scenario(law):
    users = UserStatistics(4000, limited={1: 4000, 4: 16000})
    return Scenario(Planner(users, NORMS, epsilon=4.0, delta=1e-5, steps=32), 128 * 32.0, law)


def test_the_best_split_is_never_worse_than_the_configurations_own_steps(scenario):
    best = scenario.best(0.0, epsilon=4.0)
    fixed = [c for c in scenario.cells(4.0) if c[1] == 32]
    assert len({steps for _, steps in scenario.cells(4.0)}) > 1
    told = scenario.law.predict([
        {"kind": o.kind, "group_size": o.group_size, "size": o.size, "steps": s,
         "ratio": o.noise_multiplier / o.size} for o, s in fixed
    ])  # fmt: skip
    assert best.score <= min(one["loss"] for one in told)
    assert best.cell["size"] * best.cell["steps"] <= 128 * 32


def test_the_least_epsilon_reaches_the_loss_that_was_asked_for(scenario):
    at_four = scenario.best(0.0, epsilon=4.0).score
    epsilon, cell = scenario.least_epsilon(at_four)
    assert 3.5 < epsilon <= 4.01
    assert scenario.least_epsilon(0.1) == (math.inf, None)
    assert cell["kind"] in ("uls", "els")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "question", ["algorithm", "epsilon", "users", "overtake", "feasible", "variants", "pareto"]
)
def test_every_question_has_an_answer_and_points_in_order(scenario, question):
    found = ask(question, {"flat": scenario})
    json.dumps(found, allow_nan=False)
    assert found["answer"]
    if question in ("epsilon", "feasible"):
        scores = [p["score"] for p in found["series"]["flat"]]
        assert scores == sorted(scores, reverse=True)  # less privacy never costs loss
        assert found["lines"]["without privacy"] <= scores[-1]
    if question == "users":
        (points,) = found["series"].values()
        assert [p["x"] for p in points] == sorted(p["x"] for p in points)
        assert points[-1]["score"] < points[0]["score"]


def test_questions_about_loss_need_a_fit():
    users = UserStatistics(4000, limited={4: 16000})
    planner = Planner(users, NORMS, epsilon=4.0, delta=1e-5, steps=32)
    with pytest.raises(BadInputError, match="give a fit"):
        ask("feasible", {"noise": Scenario(planner, 4096.0)})


def of_size(parameters, seed, n=24):
    """A world in which larger models learn more, and suffer more from noise."""
    scale = math.log(parameters / 1e5)
    rows = [
        {**row, "loss": row["loss"] * math.exp(-0.1 * scale + 0.2 * scale * row["ratio"])}
        for row in world(n, seed)
    ]
    # Gradients of larger models are longer: that alone says nothing about the loss.
    longer = parameters / 1e5
    norms = Sensitivities(longer, {g: longer * v for g, v in NORMS.user.items()}, {}, "")
    about = {"initial": 6.0, "parameters": parameters, "flops_per_gradient": 100.0 * parameters}
    return fit_scaling_law(rows, norms, about)


@pytest.fixture(scope="module")
def two_sizes():
    return [of_size(1e5, 3), of_size(1.6e6, 4)]


def test_a_size_that_was_not_tried_is_predicted_from_two_that_were(two_sizes):
    law = join_scaling_laws(two_sizes)
    middle = of_size(4e5, 5, n=60).rows
    told = law.predict([{**row, "parameters": 4e5} for row in middle])
    losses = np.array([row["loss"] for row in middle])
    assert np.median(np.abs(np.array([one["loss"] for one in told]) / losses - 1)) < 0.02
    within = [t["low"] <= x <= t["high"] for t, x in zip(told, losses)]
    assert np.mean(within) > 0.75
    cell = {"kind": "uls", "group_size": 1, "size": 64, "steps": 30, "ratio": 0.001}
    small, large = law.predict([{**cell, "parameters": n} for n in (1e5, 1.6e6)])
    assert small["loss"] > 1.2 * large["loss"]


@pytest.mark.nightly
def test_the_best_size_grows_with_compute(two_sizes, scenario):
    planner = scenario.planner
    found = ask("size", {str(i): Scenario(planner, 4096.0, law) for i, law in enumerate(two_sizes)})
    json.dumps(found, allow_nan=False)
    assert list(found["series"]) == ["100,000 parameters", "1,600,000 parameters"]
    small, large = found["series"].values()
    # The middle is the first fit's own compute: 4,096 gradients of 1e7 FLOPs.
    assert small[2]["x"] == pytest.approx(4096e7)
    assert large[-1]["score"] < small[-1]["score"]
    assert large[0]["cell"] is None or large[0]["score"] > small[0]["score"]


def test_one_size_is_no_law_of_sizes(two_sizes):
    with pytest.raises(BadInputError, match="different sizes"):
        join_scaling_laws([two_sizes[0], two_sizes[0]])
