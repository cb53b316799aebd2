"""The algorithms: without noise they are the classical ones; the closed form is the argmin."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from isrl_zoo import logistic, quadratic, silos
from scipy import optimize, stats

from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl import (
    Budget,
    MessageSpec,
    Problem,
    Stage,
    accelerated,
    iterate,
    make_oracle,
    make_schedule,
    minibatch_sgd,
    multi_stage,
    stages,
    step_weights,
    theory,
)
from dpfl_jax.federation.isrl.algorithms import (
    ball,
    closed_form,
    last_weights,
    middle_point,
    strongly_convex_weights,
    uniform_weights,
)
from dpfl_jax.federation.isrl.losses import exact, smoothed
from dpfl_jax.randomness import RootKey
from reproductions.isrl._local_sgd import make_local_oracle

KEY = RootKey.from_seed(11)


def risk_bound(rounds, smoothness, variance, distance):
    """What ``step_weights`` promises."""
    u = max(
        2 * smoothness,
        np.sqrt(2 * variance * rounds * (rounds + 1) * (rounds + 2) / (3 * distance**2)),
    )
    first = 2 * u * distance**2 / (rounds * (rounds + 1))
    return first + 4 * variance * (rounds + 2) / (3 * u)


def full_oracle(loss, data, stddev=0.0):
    n = data.num_silos
    return make_oracle(
        loss,
        MessageSpec("full"),
        data,
        batch=data.sizes.astype(jnp.float32),
        clip_norm=1e6,
        stddev=jnp.full(n, stddev),
    )


@pytest.mark.nightly
def test_minibatch_sgd_without_noise_is_gradient_descent():
    data = silos([5, 8])
    rounds, eta = 12, 0.3
    rows = make_schedule(KEY, rounds, np.array([5, 8])).rows()
    w = np.zeros(3)
    iterates = [w]
    parts = [jax.tree.map(lambda x, i=i, n=n: x[i, :n], data.examples) for i, n in ((0, 5), (1, 8))]
    gradient = jax.vmap(jax.grad(logistic), in_axes=(None, 0))
    for _ in range(rounds):
        g = np.mean([np.asarray(gradient(jnp.asarray(w), p)).mean(0) for p in parts], axis=0)
        w = w - eta * g
        w = w * min(1.0, 0.4 / np.linalg.norm(w))
        iterates.append(w)

    def run(weights):
        sgd = minibatch_sgd(jnp.full(rounds, eta), weights, ball(0.4))
        return iterate(sgd, full_oracle(logistic, data), rows, jnp.zeros(3))

    np.testing.assert_allclose(run(last_weights(rounds)), iterates[-1], rtol=2e-4, atol=1e-6)
    started = minibatch_sgd(jnp.ones(5), last_weights(5, 2), ball(None))
    assert started.output(started.start(jnp.full(1, 7.0)), 0) == 7.0  # none of the last two yet
    np.testing.assert_allclose(
        run(uniform_weights(rounds)), np.mean(iterates[:-1], axis=0), rtol=2e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        run(last_weights(rounds, 4)), np.mean(iterates[-4:], axis=0), rtol=2e-4, atol=1e-6
    )


@pytest.mark.nightly
def test_growing_weights_are_averaged_in_logs():
    """gamma_r = (1 - mu eta)^-(r+1) overflows float32 after 2,000 rounds; the mean does not."""
    rounds = 3000
    weights = strongly_convex_weights(rounds, 0.5, 0.2)
    rows = make_schedule(KEY, rounds, np.array([2])).rows()
    data = silos([2])
    sgd = minibatch_sgd(jnp.full(rounds, 0.01), weights, ball(None))
    found = iterate(sgd, full_oracle(quadratic, data), rows, jnp.zeros(3))
    np.testing.assert_allclose(found, data.examples["x"][0].mean(0), rtol=1e-3, atol=1e-4)
    short = np.asarray(strongly_convex_weights(3, 0.5, 0.2))
    np.testing.assert_allclose(np.exp(short[:3]), 0.9 ** -np.arange(1.0, 4.0), rtol=1e-5)


@pytest.mark.parametrize(("alpha", "prox", "mu"), [(1.0, 3.0, 0.0), (0.4, 2.0, 0.7), (0.1, 0.5, 2)])
def test_closed_form_is_the_argmin(alpha, prox, mu):
    rng = np.random.default_rng(0)
    g, w_md, w = rng.normal(size=(3, 4))

    def objective(v):
        inner = alpha * (g @ v + mu / 2 * np.sum((w_md - v) ** 2))
        return inner + ((1 - alpha) * mu / 2 + prox / 2) * np.sum((w - v) ** 2)

    best = optimize.minimize(objective, np.zeros(4), tol=1e-12).x
    found = closed_form(jnp.asarray(g), jnp.asarray(w_md), jnp.asarray(w), alpha, prox, mu)
    np.testing.assert_allclose(found, best, atol=1e-5)


@pytest.mark.parametrize(("mu", "radius"), [(0.0, 0.9), (0.3, 0.7)])
def test_accelerated_rounds_solve_the_constrained_problem_of_algorithm_1(mu, radius):
    """Without noise, against the printed recursion with each argmin over W found numerically."""
    rng = np.random.default_rng(3)
    curvature, target = np.array([1.0, 0.4, 0.1]), rng.normal(size=3) * 2
    alphas, prox = step_weights(4, 1.0, 0.0, 1.0)
    rows = {"r": jnp.zeros(4)}

    def gradient(w):
        return curvature * (w - target)

    w = w_ag = np.zeros(3)
    for a, e in zip(np.asarray(alphas, float), np.asarray(prox, float)):
        whole = e + (1 - a * a) * mu
        w_md = (1 - a) * (mu + e) / whole * w_ag + a * ((1 - a) * mu + e) / whole * w
        g = gradient(w_md)

        def objective(v, a=a, e=e, g=g, w_md=w_md, w=w):
            inner = a * (g @ v + mu / 2 * np.sum((w_md - v) ** 2))
            return inner + ((1 - a) * mu / 2 + e / 2) * np.sum((w - v) ** 2)

        inside = {"type": "ineq", "fun": lambda v: radius**2 - v @ v}
        w = optimize.minimize(
            objective, np.zeros(3), constraints=inside, method="SLSQP", options={"ftol": 1e-14}
        ).x
        w_ag = a * w + (1 - a) * w_ag
    found = iterate(
        accelerated(alphas, prox, mu, ball(radius)),
        lambda w, _: jnp.asarray(curvature) * (w - jnp.asarray(target)),
        rows,
        jnp.zeros(3),
    )
    assert np.linalg.norm(w) == pytest.approx(radius, rel=1e-4)  # the constraint is active
    np.testing.assert_allclose(found, w_ag, atol=2e-5)


def test_no_round_serves_two_stages():
    """One pass over the records stays one pass: the stages' rounds are disjoint and in order."""
    seen = []

    def oracle(w, row):
        jax.debug.callback(lambda r: seen.append(int(r)), row["r"], ordered=True)
        return w

    plan = [Stage(3, 2.0), Stage(2, 2.0), Stage(4, 2.0)]
    rows = {"r": jnp.arange(9)}
    found = iterate(multi_stage(plan, 0.1, ball(None)), oracle, rows, jnp.ones(2))
    jax.effects_barrier()
    assert seen == list(range(9))
    # Each stage is a run of its own, from where the one before it ended.
    w = jnp.ones(2)
    for stage in plan:
        r = np.arange(1, stage.rounds + 1)
        one = accelerated(2 / (r + 1), 4 * stage.scale / (r * (r + 1)), 0.1, ball(None))
        w = iterate(one, lambda w, row: w, jnp.zeros(stage.rounds), w)
    np.testing.assert_allclose(found, w, rtol=1e-5)


def test_middle_point_is_a_convex_combination():
    one, zero = jnp.ones(2), jnp.zeros(2)
    for alpha, prox, mu in ((1.0, 2.0, 0.3), (0.5, 1.0, 0.0), (0.2, 4.0, 1.0)):
        np.testing.assert_allclose(middle_point(one, one, alpha, prox, mu), one, rtol=1e-6)
        share = middle_point(one, zero, alpha, prox, mu)[0]
        assert 0 <= share <= 1
    np.testing.assert_allclose(middle_point(one, zero, 1.0, 2.0, 0.3), one)  # r = 1: w_0


def test_acceleration_without_noise_is_fast():
    """On a badly conditioned quadratic the error falls like beta D^2 / R^2."""
    curvatures = jnp.geomspace(1.0, 1e-4, 10)
    start = jnp.ones(10)
    rows = {"r": jnp.zeros(400)}

    def risk(rounds):
        alphas, prox = step_weights(rounds, 1.0, 0.0, float(jnp.linalg.norm(start)))
        part = jax.tree.map(lambda x: x[:rounds], rows)
        method = accelerated(alphas, prox, 0.0, ball(None))
        w = iterate(method, lambda w, _: curvatures * w, part, start)
        return float(0.5 * curvatures @ w**2)

    for rounds in (25, 100, 400):
        assert risk(rounds) <= risk_bound(rounds, 1.0, 0.0, 10**0.5)
    assert risk(400) < risk(100) / 6


@pytest.mark.nightly
@pytest.mark.parametrize(("rounds", "variance"), [(10, 0.01), (50, 0.3), (200, 2.0)])
def test_risk_stays_below_the_bound_of_the_step_weights(rounds, variance):
    start, dim = jnp.ones(6), 6
    alphas, prox = step_weights(rounds, 1.0, variance, 6**0.5)

    def oracle(w, row):
        key = jax.random.wrap_key_data(row["keys"][0, 1, :2], impl="threefry2x32")
        return w + jnp.sqrt(variance / dim) * jax.random.normal(key, (dim,))

    risks = []
    for trial in range(20):
        rows = make_schedule(RootKey.from_seed(trial), rounds, np.array([1])).rows()
        w = iterate(accelerated(alphas, prox, 0.0, ball(None)), oracle, rows, start)
        risks.append(float(0.5 * jnp.sum(w**2)))
    assert np.mean(risks) <= risk_bound(rounds, 1.0, variance, 6**0.5)


def test_multi_stage_meets_its_targets():
    mu, beta, variance, gap = 0.05, 1.0, 1e-3, 0.5
    plan = stages(3000, beta, mu, variance, gap)
    for rounds in (5, 30, 263, 300, 3000):  # what a silo pays for, whatever fits
        assert sum(s.rounds for s in stages(rounds, beta, mu, variance, gap)) == rounds
    assert len(plan) >= 3
    assert any(s.scale > 2 * beta for s in stages(3000, beta, mu, 1.0, 50.0, stage_constant=1e-2))
    dim = 5
    curvature = jnp.linspace(mu, beta, dim)
    start = jnp.full(dim, float(np.sqrt(2 * gap / curvature.sum())))

    def oracle(w, row):
        key = jax.random.wrap_key_data(row["keys"][0, 1, :2], impl="threefry2x32")
        return curvature * w + jnp.sqrt(variance / dim) * jax.random.normal(key, (dim,))

    rows = make_schedule(KEY, 3000, np.array([1])).rows()
    w = iterate(multi_stage(plan, mu, ball(None)), oracle, rows, start)
    assert float(0.5 * curvature @ w**2) <= gap * 2.0 ** -len(plan)
    assert len(stages(5, beta, mu, variance, gap)) == 1  # too few rounds for one whole stage
    with pytest.raises(BadInputError, match="strongly convex"):
        stages(10, 1.0, 0.0, 1.0, 1.0)


@pytest.mark.nightly
def test_local_sgd_without_noise_is_fedavg():
    data = silos([1, 1], dim=2)  # one record: every local step takes it
    rows = make_schedule(KEY, 3, np.array([1, 1])).rows()
    oracle = make_local_oracle(
        quadratic, data, local_steps=4, step_size=0.1, clip_norm=1e6, stddev=jnp.zeros(2)
    )
    sgd = minibatch_sgd(jnp.full(3, 0.1), last_weights(3), ball(None))
    found = iterate(sgd, oracle, rows, jnp.zeros(2))
    x = np.asarray(data.examples["x"][:, 0])
    w = np.zeros(2)
    for _ in range(3):
        ends = [x[i] + (w - x[i]) * 0.9**4 for i in range(2)]
        w = np.mean(ends, axis=0)
    np.testing.assert_allclose(found, w, rtol=1e-5)


@pytest.mark.slow
def test_each_local_step_and_each_use_has_noise_of_its_own():
    """Chi-square test of 4,000 normals, false-alarm rate 1e-3."""
    data = silos([2, 2], dim=2000)
    row = {k: v[0] for k, v in make_schedule(KEY, 1, np.array([2, 2])).rows().items()}
    given = {"local_steps": 5, "step_size": 0.1, "clip_norm": 1e-5, "stddev": jnp.full(2, 3.0)}

    def sent(**changes):
        oracle = make_local_oracle(quadratic, data, **given | changes)
        each = [oracle(jnp.zeros(2000), row | {"present": jnp.eye(2)[i] > 0}) for i in (0, 1)]
        return np.concatenate(each)

    found = sent()
    square = np.sum(found**2) / (5 * 3.0**2)
    assert 5e-4 < stats.chi2.cdf(square, 4000) < 1 - 5e-4
    np.testing.assert_array_equal(found, sent())
    for changes in ({"step_size": 0.2}, {"local_steps": 4}, {"stddev": jnp.full(2, 2.0)}):
        assert abs(np.corrcoef(found, sent(**changes))[0, 1]) < 4 / np.sqrt(4000)
    assert abs(np.corrcoef(found[:2000], found[2000:])[0, 1]) < 4 / np.sqrt(2000)


@pytest.mark.parametrize("kind", ["hinge", "absolute"])
def test_smoothing_is_the_moreau_envelope(kind):
    """Against a numerical minimum; gap at most L^2/(2 beta); gradients within L; beta-smooth."""
    rng = np.random.default_rng(2)
    for _ in range(6):
        beta = float(10.0 ** rng.uniform(-1, 2))
        x, y = rng.normal(size=3), rng.choice([-1.0, 1.0])
        w = rng.normal(size=3) * 2
        example = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
        loss, envelope = exact(kind), smoothed(kind, beta)
        # The best v lies on the line w + t x: any other part of v - w only adds to the square.
        t = np.linspace(-20, 20, 400_001)
        points = w @ x + t * (x @ x)
        values = np.maximum(0, 1 - y * points) if kind == "hinge" else np.abs(points - y)
        found = np.min(values + beta / 2 * t**2 * (x @ x))
        value = float(envelope(jnp.asarray(w), example))
        assert value == pytest.approx(found, rel=2e-4, abs=2e-5)
        lipschitz, here = np.linalg.norm(x), float(loss(jnp.asarray(w), example))
        assert value <= here + 1e-6
        assert here - value <= lipschitz**2 / (2 * beta) + 1e-6
        gradient = jax.grad(envelope)(jnp.asarray(w), example)
        assert float(jnp.linalg.norm(gradient)) <= lipschitz * (1 + 1e-5)
        other = jnp.asarray(w + rng.normal(size=3) * 0.1)
        change = jnp.linalg.norm(jax.grad(envelope)(other, example) - gradient)
        assert float(change) <= beta * float(jnp.linalg.norm(other - w)) * (1 + 1e-4) + 1e-6
    with pytest.raises(BadInputError, match="prox has no closed form"):
        smoothed("quantile", 1.0)


def test_variance_of_the_aggregate_is_lemma_e3():
    """Monte Carlo over cohorts, batches and noise, within 10 %."""
    rng = np.random.default_rng(4)
    silos_, n, dim, batch, cohort, sigma = 6, 400, 4, 20, 2, 0.05
    x = rng.normal(size=(silos_, n, dim)) * 0.5 + rng.normal(size=(silos_, 1, dim))
    means = x.mean(1)
    phi = np.sqrt(np.mean(np.sum((x - means[:, None]) ** 2, axis=2)))
    upsilon = np.sqrt(np.mean(np.sum((means - means.mean(0)) ** 2, axis=1)))
    problem = Problem(
        lipschitz=9.0,
        diameter=1.0,
        dim=dim,
        silos=silos_,
        silo_size=n,
        budget=Budget(1.0, 1e-6),
        cohort=cohort,
        phi=phi,
        upsilon=upsilon,
    )
    want = theory.variance_sco(problem, batch, sigma)
    draws = []
    for _ in range(4000):
        who = rng.permutation(silos_)[:cohort]
        sent = [x[i, rng.integers(0, n, batch)].mean(0) + sigma * rng.normal(size=dim) for i in who]
        draws.append(np.mean(sent, axis=0) - means.mean(0))
    assert np.mean(np.sum(np.square(draws), axis=1)) == pytest.approx(want, rel=0.1)


def test_theory_at_the_sizes_of_the_experiment():
    small = Problem(
        lipschitz=10.85,
        diameter=2.0,
        dim=50,
        silos=25,
        silo_size=1238,
        budget=Budget(1.0, 1 / 1238**2),
        cohort=25,
        smoothness=10.85**2 / 4,
    )
    large = dataclasses.replace(small, diameter=10.0)
    rounds = [theory.minibatch_rounds(p) for p in (small, large)]
    assert 30_000 < rounds[0] < rounds[1] < 38_000
    assert 30 < theory.one_pass_batch(small) < 80
    assert 0 < theory.minibatch_step(small, rounds[0], 0.0) <= 1 / small.smoothness
    assert theory.accelerated_rounds(large, batch=1238) <= 100
    with pytest.raises(BadInputError, match="rounds is 0"):
        theory.minibatch_step(small, 0, 0.0)
    with pytest.raises(BadInputError, match="dim is 0"):
        dataclasses.replace(small, dim=0)
