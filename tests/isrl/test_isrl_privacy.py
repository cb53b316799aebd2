"""Noise and guarantees of the three arms; the vector protocol; other notions of privacy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isrl_zoo import quadratic, silos
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, events
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl import Budget, MessageSpec, bounds, make_schedule
from dpfl_jax.federation.isrl.arms import (
    federation_noise,
    relations,
    silo_guarantee,
    silo_noise,
)
from dpfl_jax.federation.isrl.shuffled import shuffled_guarantee, shuffled_noise
from dpfl_jax.federation.isrl.vector_protocol import (
    VectorProtocol,
    calibrate_protocol,
    make_vector_oracle,
    protocol_epsilon,
)
from dpfl_jax.randomness import RootKey

pytestmark = pytest.mark.privacy
N, R, K = 1238, 35, 443
DELTA = 1 / N**2


def test_arms_golden():
    """Section 4.6 of the notes: tight noise, theorem noise, published noise, what each spends."""
    sound = silo_noise(Budget(0.75, DELTA), N, K, R)
    assert sound.noise_multiplier == pytest.approx(23.90, rel=2e-3)
    assert sound.epsilon <= 0.75
    closed = silo_noise(Budget(3, DELTA), N, K, R, arm="paper_closed_form")
    assert closed.noise_multiplier == pytest.approx(0.4261 * K, rel=1e-3)
    assert closed.epsilon < 3 / 30
    published = silo_noise(Budget(18, DELTA), N, K, R, arm="as_published")
    assert published.noise_multiplier == pytest.approx(1.255, rel=1e-3)
    assert published.epsilon == pytest.approx(20.27, rel=2e-3)
    assert silo_guarantee(published).epsilon == math.inf
    assert "NO GUARANTEE" in str(silo_guarantee(published))
    one_pass = silo_noise(Budget(3, DELTA), N, K, 2, sampling="disjoint")
    assert one_pass.noise_multiplier == pytest.approx(3.142, rel=1e-3)
    full = silo_noise(Budget(3, DELTA), N, K, R, sampling="full")
    assert full.batch == N
    assert full.noise_multiplier / N == pytest.approx(sound_noise(3) / K, rel=0.05)


def sound_noise(epsilon):
    return silo_noise(Budget(epsilon, DELTA), N, K, R).noise_multiplier


@settings(derandomize=True, deadline=None, max_examples=10)
@given(
    st.floats(0.3, 12.0),
    st.integers(20, 2000),
    st.floats(0.02, 1.0),
    st.integers(1, 80),
    st.sampled_from(["poisson", "full", "disjoint"]),
)
def test_sound_arm_never_spends_more_than_granted(epsilon, n, share, rounds, sampling):
    budget = Budget(epsilon, 1 / n**2)
    noise = silo_noise(budget, n, max(1, int(share * n)), rounds, sampling=sampling)
    assert noise.epsilon <= epsilon * (1 + 1e-9)
    spec = MessageSpec(sampling)
    assert silo_guarantee(noise, spec).epsilon == noise.epsilon


def test_clipping_the_mean_has_no_guarantee():
    noise = silo_noise(Budget(3, DELTA), N, K, R)
    spec = MessageSpec("poisson", clip="batch_mean")
    assert silo_guarantee(noise, spec).epsilon == math.inf


def test_bad_settings_are_refused():
    budget = Budget(1.0, 1e-5)
    for bad in (
        lambda: silo_noise(budget, 10, 11, 5),
        lambda: silo_noise(budget, 10, 5, 5, sampling="with_replacement"),
        lambda: silo_noise(budget, 10, 5, 5, arm="as_published", sampling="poisson"),
        lambda: silo_noise(Budget(100.0, 1e-5), 10, 5, 5, arm="paper_closed_form"),
        lambda: Budget(0.0, 1e-5),
        lambda: Budget(1.0, 1.0),
    ):
        with pytest.raises(BadInputError):
            bad()


def test_budgets_differ_between_silos():
    budgets = [Budget(1.0, 1e-5), Budget(4.0, 1e-5), Budget(1.0, 1e-5)]
    found = federation_noise(budgets, [100, 100, 50], [20, 20, 10], 10)
    assert found[0].noise_multiplier > found[1].noise_multiplier
    assert [f.epsilon <= b.epsilon for f, b in zip(found, budgets)] == [True] * 3


def test_relations_to_other_notions():
    noise = silo_noise(Budget(0.01, 1e-6), 100, 100, 5, sampling="full")
    rows = {row["notion"]: row for row in relations(noise, 5000)}
    assert rows["user-level DP"]["epsilon"] == pytest.approx(100 * noise.epsilon)
    assert rows["central DP"]["epsilon"] == rows["ISRL-DP"]["epsilon"] == noise.epsilon
    assert rows["local DP"]["epsilon"] == math.inf
    assert rows["shuffle DP"]["epsilon"] < noise.epsilon
    few = {row["notion"]: row for row in relations(noise, 25)}
    assert few["shuffle DP"]["epsilon"] == noise.epsilon
    assert "outside" in few["shuffle DP"]["note"]


def test_shuffled_noise_meets_its_target_and_helps_with_many_silos():
    many = {"rounds": 10, "cohort": 20_000, "silos": 20_000, "silo_size": 1}
    noise = shuffled_noise(0.5, 1e-6, **many)
    guarantee = shuffled_guarantee(noise, delta=1e-6, **many)
    assert guarantee.epsilon <= 0.5
    assert guarantee.trust == "shuffle"
    own = accounting.epsilon(events.isrl_dp(noise, 1.0, 10), 1e-6, relation=REPLACE)
    assert own > 1.3 * guarantee.epsilon  # a silo's own message is far less private
    few = {"rounds": 50, "cohort": 25, "silos": 25, "silo_size": 50}
    alone = shuffled_guarantee(shuffled_noise(0.5, 1e-6, **few), delta=1e-6, **few)
    assert alone.epsilon <= 0.5
    assert any("shuffling adds nothing" in c for c in alone.caveats)


def test_vector_protocol_is_unbiased_with_the_stated_variance():
    """z-test of the mean over 400 runs (false-alarm 1e-4 a coordinate); variance within 20 %."""
    rng = np.random.default_rng(0)
    reports, dim, bound = 30, 4, 2.0
    protocol = VectorProtocol(levels=8, noise_bits=20, bit_probability=0.3, bound=bound)
    x = rng.normal(size=(reports + 5, dim))
    x = bound * x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), bound)
    mask = np.arange(reports + 5) < reports
    run = jax.jit(
        jax.vmap(lambda k: protocol.sum(jnp.asarray(x, jnp.float32), jnp.asarray(mask), reports, k))
    )
    out = np.asarray(run(jax.random.split(jax.random.key(0), 400)))
    error = out.mean(0) - x[:reports].sum(0)
    scale = np.sqrt(protocol.variance(reports) / 400)
    assert np.all(np.abs(error) < 3.9 * scale)
    assert out.var(axis=0).mean() == pytest.approx(protocol.variance(reports), rel=0.2)
    assert protocol.messages(dim) == 4 * 28


def test_vector_protocol_epsilon_bounds_the_exact_divergence():
    """One coordinate: the hockey-stick divergence of a binomial and its shift, summed exactly."""
    protocol = VectorProtocol(levels=3, noise_bits=40, bit_probability=0.5, bound=1.0)
    reports, delta = 25, 1e-5
    claimed = protocol_epsilon(protocol, reports, 1, delta)
    assert 0 < claimed < 10
    support = np.arange(0, reports * 40 + 1)
    law = stats.binom(reports * 40, 0.5).pmf(support)
    for k in (1, 2, 3):
        shifted = np.concatenate([np.zeros(k), law[:-k]])
        for p, q in ((law, shifted), (shifted, law)):
            spent = np.maximum(p - math.exp(claimed) * q, 0).sum()
            assert spent <= delta
    # And it is not wasteful: a little less epsilon would be wrong for the worst shift, within 2x.
    shifted = np.concatenate([np.zeros(3), law[:-3]])
    assert np.maximum(shifted - math.exp(claimed / 2.5) * law, 0).sum() > delta


def test_vector_protocol_is_calibrated_and_runs():
    protocol = calibrate_protocol(2.0, 1e-6, reports=200, dim=5, bound=1.0)
    assert protocol_epsilon(protocol, 200, 5, 1e-6) <= 2.0
    data = silos([40] * 10, dim=5)
    schedule = make_schedule(
        RootKey.from_seed(1), 2, np.full(10, 40), one_pass_batch=np.full(10, 20)
    )
    oracle = make_vector_oracle(quadratic, data, schedule.rank, protocol, batch=20, cohort=10)
    row = {k: v[0] for k, v in schedule.rows().items()}
    w = jnp.zeros(5)
    found = jax.vmap(lambda s: oracle(w, {**row, "keys": row["keys"] + s}))(
        jnp.arange(200, dtype=jnp.uint32)
    )
    taken = np.asarray(schedule.rank) < 20
    x = np.asarray(data.examples["x"])
    g = -x / np.maximum(1.0, np.linalg.norm(x, axis=2, keepdims=True))
    want = g[taken].mean(axis=0)
    scale = math.sqrt(protocol.variance(200)) / 200
    assert np.all(np.abs(np.asarray(found).mean(0) - want) < 4.5 * scale / math.sqrt(200) + 1e-3)
    with pytest.raises(BadInputError):
        calibrate_protocol(1e-4, 1e-9, reports=1, dim=100, bound=1.0)


def test_bounds_say_when_privacy_is_free():
    common = {"lipschitz": 1.0, "diameter": 2.0, "n": 1000, "silos": 20, "dim": 10}
    few = bounds.iid_convex(epsilon=0.1, delta=1e-6, **common)
    many = bounds.iid_convex(epsilon=10.0, delta=1e-6, **common)
    assert few.private > few.statistical
    assert many.private < many.statistical
    assert bounds.privacy_for_free(1000, 10, 1.0)
    assert not bounds.privacy_for_free(1000, 10, 0.05)
    lower = bounds.lower_convex(1.0, 1.0, 2.0, 1000, 20, 10, 0.1)
    central = bounds.central_convex(1.0, 1.0, 2.0, 1000, 20, 10, 0.1)
    assert central.private == pytest.approx(lower.private / math.sqrt(20))
    assert lower.private <= few.private
    half = bounds.unbalanced_convex(1.0, 2.0, 10, [1000] * 20, [0.1] * 20, [1e-6] * 20, 100)
    worse = bounds.unbalanced_convex(
        1.0, 2.0, 10, [1000] * 20, [0.1] * 19 + [0.05], [1e-6] * 20, 100
    )
    assert half.private < worse.private < 1.2 * half.private  # the average counts, not the worst
