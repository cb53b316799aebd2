"""Noise and guarantees of the three arms; the vector protocol; other notions of privacy."""

import dataclasses
import itertools
import math
import types

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
from dpfl_jax.config.schema import FederationConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl import (
    Budget,
    MessageSpec,
    Problem,
    accelerated,
    iterate,
    make_oracle,
    make_schedule,
    minibatch_sgd,
    step_weights,
    theory,
)
from dpfl_jax.federation.isrl import message as message_module
from dpfl_jax.federation.isrl.algorithms import ball, last_weights
from dpfl_jax.federation.isrl.isrl_run import IsrlRun, _relations
from dpfl_jax.federation.isrl.privacy import (
    SiloNoise,
    federation_noise,
    relations,
    shuffled_view,
    silo_guarantee,
    silo_noise,
)
from dpfl_jax.randomness import RootKey
from reproductions.isrl._baselines import (
    alone,
    central_noise,
    make_central_oracle,
)
from reproductions.isrl._shuffle_protocol import (
    VectorProtocol,
    calibrate_protocol,
    make_vector_oracle,
    protocol_epsilon,
    protocol_guarantee,
)

N, R, K = 1238, 35, 443
DELTA = 1 / N**2


def run_of(noise):
    """A run of silos with this noise."""
    mechanism = types.SimpleNamespace(sampling="full", arithmetic="exact")
    config = types.SimpleNamespace(mechanism=mechanism)
    train = types.SimpleNamespace(sizes=[1] * len(noise))
    records = types.SimpleNamespace(learned=None, train=train)
    return IsrlRun(config, records, None, types.SimpleNamespace(noise=noise))


def test_a_ledger_is_charged_no_less_than_any_silo_spends():
    """Also where one draws most, one has least noise, and one answers most often."""
    budget = Budget(8.0, 1e-5)
    noise = [
        SiloNoise(sigma, batch, 100, rounds, "poisson", budget)
        for sigma, batch, rounds in ((4.0, 50.0, 8), (1.5, 40.0, 8), (4.0, 40.0, 90))
    ]
    for some in itertools.permutations(noise, 2):
        charge = run_of(some).charge()
        spent = accounting.epsilon(charge.event, charge.delta, relation=REPLACE)
        assert spent >= max(silo.epsilon for silo in some)


def test_noise_golden():
    sound = silo_noise(Budget(0.75, DELTA), N, K, R)
    assert sound.noise_multiplier == pytest.approx(23.90, rel=2e-3)
    assert sound.epsilon <= 0.75
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
    assert silo_guarantee(noise).epsilon == noise.epsilon


def test_bad_settings_are_refused():
    budget = Budget(1.0, 1e-5)
    for bad in (
        lambda: silo_noise(budget, 10, 11, 5),
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


def test_noise_of_many_unequal_silos_is_that_of_each_alone(monkeypatch):
    monkeypatch.setenv("DPFL_CACHE_DIR", "off")
    sizes = [3000 - 100 * (7 * i % 13) for i in range(13)] + [3000, 2000]
    budgets = [Budget(2.0 + (i % 2), 1 / n**2) for i, n in enumerate(sizes)]
    found = federation_noise(budgets, sizes, [0.1 * n for n in sizes], 5)
    for i, one in enumerate(found):
        assert (one.budget, one.silo_size) == (budgets[i], sizes[i])
        assert one.epsilon <= budgets[i].epsilon
        alone = silo_noise(budgets[i], sizes[i], 0.1 * sizes[i], 5).noise_multiplier
        assert one.noise_multiplier == pytest.approx(alone, rel=2e-5)


def test_relations_to_other_notions():
    noise = silo_noise(Budget(0.01, 1e-6), 100, 100, 5, sampling="full")
    rows = {row["notion"]: row for row in relations(noise, 25)}
    assert rows["user-level DP"]["epsilon"] == pytest.approx(100 * noise.epsilon)
    assert rows["central DP"]["epsilon"] == rows["ISRL-DP"]["epsilon"] == noise.epsilon
    assert rows["local DP"]["epsilon"] == math.inf
    assert rows["shuffle DP"]["epsilon"] == noise.epsilon
    assert "adds nothing" in rows["shuffle DP"]["note"]


def test_shuffling_a_run_pays_for_its_delta():
    """Theorem D.5 by hand for one round; it helps with very many silos, at the same delta."""
    noise = silo_noise(Budget(0.5, 1e-6), 1, 1, 1, sampling="full")
    silos_ = 100_000
    found = shuffled_view(noise, silos_)
    assert found < 0.2 * noise.epsilon
    shuffle_delta = 1e-6 / 4
    limit = silos_ / (16 * math.log(2 / shuffle_delta))
    silo_delta = shuffle_delta / (2 * silos_ * limit)
    own = accounting.epsilon(noise.event, silo_delta, relation=REPLACE)
    assert own > noise.epsilon  # a smaller delta costs epsilon
    grown = math.exp(own)
    inner = 8 * math.sqrt(grown * math.log(4 / shuffle_delta) / silos_) + 8 * grown / silos_
    assert found == pytest.approx(math.log1p((grown - 1) / (grown + 1) * inner), rel=1e-6)
    assert shuffle_delta + 2 * silos_ * silo_delta <= 1e-6
    # Rounds compose: more than one, less than their sum.
    many = silo_noise(Budget(0.5, 1e-6), 1, 1, 4, sampling="full")
    each = shuffled_view(dataclasses.replace(many, rounds=1), silos_)
    assert each < shuffled_view(many, silos_) < 4.5 * each
    assert shuffled_view(noise, 25) == math.inf


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.floats(0.001, 1.0), st.integers(1, 10_000))
def test_poisson_draws_no_more_often_than_accounted(share, n):
    """What float32 makes of K and K/n, on the grid of jax.random.uniform."""
    batch = max(share * n, 1e-3)
    drawn = np.float32(batch) / np.float32(n)
    probability = math.ceil(float(drawn) * 2**23) / 2**23  # of a uniform multiple of 2^-23 below
    noise = SiloNoise(1.0, batch, n, 1, "poisson", "sound", Budget(1.0, 1e-5))
    assert noise.rate >= min(probability, 1.0)
    assert noise.rate <= batch / n + 3 / 2**23


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["full", "poisson"])
def test_a_trusted_server_adds_noise_once_and_enough(sampling, monkeypatch):
    """Brute force: a record moves the mean of N silos by at most 2 C / (N K_min)."""
    # Neighbours are compared in one draw; other data would have draws of their own.
    monkeypatch.setattr(message_module, "derived_keys", lambda keys, words: keys)
    sizes, batches, clip = [6, 4], [3.0, 2.0], 0.7
    data = silos(sizes, dim=2)
    if sampling == "full":
        batches = [6.0, 4.0]
    spec, rng = MessageSpec(sampling), np.random.default_rng(0)
    schedule = make_schedule(RootKey.from_seed(4), 6, np.array(sizes))
    options = {"batch": jnp.asarray(batches), "clip_norm": clip}
    rows, w, worst = schedule.rows(), jnp.asarray([0.2, -0.1]), 0.0

    @jax.jit
    def clean(x, row):
        changed = type(data)({**data.examples, "x": x}, data.sizes)
        return make_central_oracle(quadratic, spec, changed, noise_multiplier=0.0, **options)(
            w, row
        )

    for trial in range(24):
        i = trial % 2
        j = int(rng.integers(sizes[i]))
        row = {k: v[trial % 6] for k, v in rows.items()}
        far = [data.examples["x"].at[i, j].set(s * 1e3 * rng.random(2)) for s in (-1.0, 1.0)]
        sent = [clean(x, row) for x in far]
        worst = max(worst, float(jnp.linalg.norm(sent[0] - sent[1])))
    bound = 2 * clip / (2 * min(batches))
    assert 0.8 * bound < worst <= bound * (1 + 1e-4)
    # The noise: of one coordinate over many rounds, against z C / (N K_min); false alarms 1e-3.
    noise = central_noise(Budget(1.0, 1e-5), sizes, batches, 3, sampling=sampling)
    row = {k: v[0] for k, v in rows.items()}
    oracle = make_central_oracle(
        quadratic, MessageSpec("full"), data, noise_multiplier=noise.noise_multiplier, **options
    )
    keys = rng.integers(0, 2**32, (1000, 2, 2, 8), dtype=np.uint32)
    out = np.asarray(jax.vmap(lambda k: oracle(w, {**row, "keys": k}))(jnp.asarray(keys)))
    square = ((out - out.mean(0)) ** 2).sum() / (noise.noise_multiplier * bound / 2) ** 2
    assert 5e-4 < stats.chi2.cdf(square, 2 * 999) < 1 - 5e-4
    assert noise.epsilon <= 1.0


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


@pytest.mark.slow
def test_vector_protocol_is_calibrated_and_runs():
    protocol = calibrate_protocol(2.0, 1e-6, reports=200, dim=5, bound=1.0)
    assert protocol_epsilon(protocol, 200, 5, 1e-6) <= 2.0
    data = silos([40] * 10, dim=5)
    schedule = make_schedule(
        RootKey.from_seed(1), 2, np.full(10, 40), one_pass_batch=np.full(10, 20)
    )
    oracle = make_vector_oracle(quadratic, data, schedule, protocol, batch=20, cohort=10)
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


def test_vector_protocol_refuses_rounds_that_lack_reports():
    """The noise comes with the reports: with fewer of them there would be less of it."""
    protocol = calibrate_protocol(2.0, 1e-6, reports=80, dim=5, bound=1.0)
    data, sizes = silos([40] * 4, dim=5), np.full(4, 40)
    key = RootKey.from_seed(1)
    for rounds, available in ((3, None), (2, 3)):
        schedule = make_schedule(
            key, rounds, sizes, available=available, one_pass_batch=np.full(4, 20)
        )
        with pytest.raises(BadInputError, match="P_vec is calibrated for 4 silos"):
            make_vector_oracle(quadratic, data, schedule, protocol, batch=20, cohort=4)
    unaware = make_schedule(key, 3, sizes)
    with pytest.raises(BadInputError, match="in round 2 there are 0"):
        make_vector_oracle(quadratic, data, unaware, protocol, batch=20, cohort=4)


def test_a_guarantee_says_what_is_released_and_what_is_idealised():
    noise = silo_noise(Budget(3.0, 1e-6), 100, 10, 5)
    protocol = VectorProtocol(8, 100, 0.5, 1.0)
    sums = {"batch": 5, "cohort": 4, "dim": 3, "delta": 1e-5, "rounds": 2}
    for guarantee, released in (
        (silo_guarantee(noise), "every message of the silo"),
        (protocol_guarantee(protocol, **sums), "the sum of every round"),
    ):
        assert released in guarantee.released
        told = (accounting.IDEALISED, accounting.IDEALISED_FLOAT)
        assert sum(guarantee.assumptions.count(sentence) for sentence in told) == 1


def test_a_large_delta_is_named():
    for delta, said in ((0.02, True), (0.009, False)):
        caveats = silo_guarantee(silo_noise(Budget(3.0, delta), 100, 10, 5)).caveats
        assert any("one over the 100 records of the silo" in c for c in caveats) is said


def test_vector_protocol_guarantee_names_both_adversaries():
    protocol = calibrate_protocol(1.0, 1e-6, reports=400, dim=4, bound=1.0)
    guarantee = protocol_guarantee(protocol, batch=20, cohort=20, dim=4, delta=1e-6, rounds=2)
    assert guarantee.epsilon <= 1.0
    assert guarantee.trust == "shuffle"
    own = protocol_epsilon(protocol, 20, 4, 1e-6)
    assert own > 2 * guarantee.epsilon
    assert f"{own:.3g}" in guarantee.caveats[0]


def test_a_silo_alone():
    data = silos([3, 5, 4])
    part = alone(data, 1)
    assert part.num_silos == 1
    assert int(part.sizes[0]) == 5
    np.testing.assert_array_equal(part.examples["x"][0], data.examples["x"][1])


def a_problem(epsilon=0.2, **changes):
    """Strongly convex if ``strong_convexity`` is given."""
    base = {"lipschitz": 1.0, "diameter": 2.0, "dim": 10, "silos": 50, "cohort": 50.0, "phi": 1.0}
    return Problem(**base | {"silo_size": 1000.0, "budget": Budget(epsilon, 1e-6)} | changes)


def test_bounds_follow_their_theorems():
    """Log-log slopes of the private parts in n, M, d and epsilon, exactly."""

    def slopes(bound, **fixed):
        here = bound(a_problem(**fixed)).private
        doubled = ({"silo_size": 2000.0}, {"cohort": 100.0}, {"dim": 20}, {"epsilon": 0.4})
        there = [bound(a_problem(**fixed | change)).private for change in doubled]
        return [round(math.log(value / here) / math.log(2), 6) for value in there]

    assert slopes(theory.risk_upper_bound) == [-1, -0.5, 0.5, -1]
    assert slopes(theory.risk_lower_bound) == [-1, -0.5, 0.5, -1]
    assert slopes(theory.central_risk_lower_bound) == [-1, -1, 0.5, -1]
    assert slopes(theory.risk_upper_bound, strong_convexity=0.1) == [-2, -1, 1, -2]
    assert slopes(theory.risk_lower_bound, strong_convexity=0.1) == [-2, -1, 1, -2]
    strongly = {"strong_convexity": 0.1, "smoothness": 2.0}
    assert slopes(theory.empirical_risk_upper_bound) == [-1, -0.5, 0.5, -1]
    assert slopes(theory.empirical_risk_upper_bound, **strongly) == [-2, -1, 1, -2]
    assert slopes(theory.one_pass_risk_upper_bound, smoothness=2.0) == [-0.8, -0.4, 0.4, -0.8]
    assert slopes(theory.one_pass_risk_upper_bound, **strongly) == [-2, -1, 1, -2]
    # Theorems 5.1 and 5.2 have N, all silos, where the others have M.
    assert slopes(theory.shuffled_risk_upper_bound) == [-1, 0, 0.5, -1]
    assert slopes(theory.shuffled_risk_upper_bound, **strongly) == [-2, 0, 1, -2]
    assert slopes(theory.shuffled_one_pass_risk_upper_bound, smoothness=2.0) == [-0.8, 0, 0.4, -0.8]
    assert slopes(theory.shuffled_one_pass_risk_upper_bound, **strongly) == [-2, 0, 1, -2]
    assert slopes(theory.local_risk_upper_bound) == [-0.5, -0.5, 0.5, -1]


@pytest.mark.parametrize("mu", [0.0, 0.1])
def test_less_trust_costs_more(mu):
    """Figure 3's order; in the strongly convex case kappa is 1, so that no bound has more of it."""
    p = a_problem(strong_convexity=mu, smoothness=mu or 1.0)
    bounds = (
        theory.local_risk_upper_bound,
        theory.risk_upper_bound,
        theory.shuffled_risk_upper_bound,
    )
    local, silo, shuffled = (bound(p).private for bound in bounds)
    assert local > silo > shuffled
    assert local == pytest.approx(silo * (1000 if mu else math.sqrt(1000)))
    assert silo == pytest.approx(shuffled * (50 if mu else math.sqrt(50)))
    if mu:
        assert theory.one_pass_risk_upper_bound(p).private == pytest.approx(silo)
        assert theory.shuffled_one_pass_risk_upper_bound(p).private == pytest.approx(shuffled)


def test_bounds_say_when_privacy_is_free():
    few, many = theory.risk_upper_bound(a_problem(0.1)), theory.risk_upper_bound(a_problem(10.0))
    assert few.private > few.statistical
    assert many.private < many.statistical
    lower, central = (
        theory.risk_lower_bound(a_problem(0.1)),
        theory.central_risk_lower_bound(a_problem(0.1)),
    )
    assert central.private == pytest.approx(lower.private / math.sqrt(50))
    assert lower.private <= few.private


def test_one_record_of_n_is_not_poisson_sampling():
    """A batch of one record drawn from n: an absent one makes room for another."""
    alone_epsilon = accounting.epsilon(events.fixed_size(1.0, 20, 1, 1), 1e-5, relation=REPLACE)
    # The other 19 gradients are -C, the record's is C or -C: one direction, integrated directly.
    x = np.linspace(-14, 14, 200_001)
    there = 0.05 * stats.norm.pdf(x, 1) + 0.95 * stats.norm.pdf(x, -1)
    absent = stats.norm.pdf(x, -1)

    def delta(epsilon):
        return np.trapezoid(np.maximum(there - math.exp(epsilon) * absent, 0), x)

    assert delta(alone_epsilon) <= 1e-5
    assert delta(alone_epsilon - 0.01) > 1e-5
    assert alone_epsilon == pytest.approx(5.5169, abs=2e-3)


def test_a_guarantee_for_silos_of_different_deltas_holds_for_each():
    taken = [
        silo_noise(Budget(8.0, 1e-6), 290, 290, 20, sampling="full"),
        silo_noise(Budget(7.9, 1e-2), 283, 283, 20, sampling="full"),
    ]
    found = run_of(taken).guarantee(20)
    for z in taken:
        assert accounting.epsilon(z.event, found.delta, relation=REPLACE) <= found.epsilon
    rows = _relations(
        types.SimpleNamespace(federation=FederationConfig(silos=2)),
        taken,
    )
    central = next(row for row in rows if row["notion"] == "central DP")
    assert (central["epsilon"], central["delta"]) == (found.epsilon, found.delta)


@pytest.mark.slow
def test_one_schedule_gives_two_uses_no_common_noise():
    """Else the difference of two messages would be a difference of clipped gradients."""
    rounds, sizes = 6, [5, 4]
    schedule = make_schedule(RootKey.generate(), rounds, np.array(sizes))
    data, w, clip = silos(sizes), jnp.zeros(3), 1.0
    options = {"batch": jnp.asarray(sizes, jnp.float32), "stddev": jnp.full(2, 0.7)}

    def messages(data=data, loss=quadratic, clip=clip, **changes):
        given, seen = options | changes, []

        def watched(w, row):
            def sent(stddev):
                how = given | {"stddev": stddev}
                return make_oracle(loss, MessageSpec("full"), data, clip_norm=clip, **how)(w, row)

            # With its noise and without, by one program: compiling it is nearly all of the work.
            noisy, clean = jax.lax.map(sent, given["stddev"] * jnp.array([[1.0], [0.0]]))
            jax.debug.callback(lambda a, b: seen.append(a - b), noisy, clean)
            return noisy

        return watched, seen

    def by_sgd(made, rate=0.1, radius=None, pull=0.0):
        oracle, seen = made
        etas, weights = jnp.full(rounds, rate), last_weights(rounds)
        pulled = (lambda w, row: oracle(w, row) + pull * w) if pull else oracle
        iterate(minibatch_sgd(etas, weights, ball(radius)), pulled, schedule.rows(), w)
        jax.effects_barrier()
        return np.asarray(seen)

    def by_acceleration(made):
        oracle, seen = made
        alphas, prox = step_weights(rounds, 1.0, 0.1, 1.0)
        iterate(accelerated(alphas, prox, 0.0, ball(None)), oracle, schedule.rows(), w)
        jax.effects_barrier()
        return np.asarray(seen)

    moved = type(data)({**data.examples, "x": data.examples["x"] + 1.0}, data.sizes)
    uses = {
        "sgd": by_sgd(messages()),
        "another step size": by_sgd(messages(), rate=0.2),
        "accelerated": by_acceleration(messages()),
        "other data": by_sgd(messages(data=moved)),
        "another clip norm": by_sgd(messages(clip=0.5)),
        "more noise": by_sgd(messages(stddev=jnp.full(2, 0.8))) * 0.7 / 0.8,
        "another loss": by_sgd(messages(loss=lambda w, e: 2 * quadratic(w, e))),
        "a ball": by_sgd(messages(), radius=3.0),
        "a regulariser": by_sgd(messages(), pull=0.1),
    }
    for (name, a), (other, b) in itertools.combinations(uses.items(), 2):
        assert a.shape == b.shape == (rounds, 3)
        # 36 pairs of 18 normals of deviation 0.13: closer than 1e-6 by chance once in 500.
        assert np.abs(a - b).min() > 1e-6, (name, other)
    np.testing.assert_array_equal(by_sgd(messages()), uses["sgd"])  # the same use again


def test_schedules_of_one_key_that_differ_share_no_key():
    """From the second round on, other silos answered in one of them: the models differ."""
    key, sizes = RootKey.generate(), np.array([6, 5, 4, 3])
    given = [
        {},
        {"available": 3},
        {"available": {4: 0.5, 3: 0.5}},
        {"one_pass_batch": np.array([2, 2, 2, 1])},
        {"most_rounds": 4},
    ]
    made = [np.asarray(make_schedule(key, 5, sizes, **g).keys) for g in given]
    made.append(np.asarray(make_schedule(key, 5, sizes + 1).keys))
    for a, b in itertools.combinations(made, 2):
        assert not (a == b).all(axis=-1).any()
    np.testing.assert_array_equal(made[0], np.asarray(make_schedule(key, 5, sizes).keys))


@pytest.mark.slow
def test_what_other_silos_hold_and_weigh_is_another_use_of_a_schedule():
    """A silo's message depends on it through the model: its noise must not be the same then."""
    rounds, sizes = 3, [5, 4]
    schedule, data = make_schedule(RootKey.generate(), rounds, np.array(sizes)), silos(sizes)
    batch = jnp.asarray(sizes, jnp.float32)
    etas, weights = jnp.full(rounds, 0.1), last_weights(rounds)

    def ended(data, silo_weights=None, stddev=0.7):
        """The model, and the sum of the first silo's noise, by the one that has none."""
        oracle = make_oracle(
            quadratic,
            MessageSpec("full"),
            data,
            batch=batch,
            clip_norm=1e-6,  # all that moves the model is noise
            stddev=jnp.array([stddev, 0.0]),
            silo_weights=silo_weights,
        )
        rows = schedule.rows()
        sgd = minibatch_sgd(etas, weights, ball(None))
        return np.asarray(iterate(sgd, oracle, rows, jnp.zeros(3)))

    other = type(data)({**data.examples, "x": data.examples["x"].at[1].add(1.0)}, data.sizes)
    same, moved = ended(data), ended(other)
    weighed = ended(data, jnp.array([0.25, 0.75])) * 2  # the first silo's weight is halved
    np.testing.assert_array_equal(same, ended(data))
    # 6 normals of deviation about 0.01: closer than 1e-5 by chance once in 200; the clipped
    # gradients are 1e-6 and less.
    assert np.abs(same - moved).min() > 1e-5
    assert np.abs(same - weighed).min() > 1e-5
