"""Records with their own epsilon: rates, draws and divisors of the run as executed."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fed_zoo import loss_fn, make_data, make_params
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dpfl_jax import accounting
from dpfl_jax.accounting import IDEALISED
from dpfl_jax.accounting.accountant import FINEST
from dpfl_jax.accounting.rates import TwoStage, certified_rates
from dpfl_jax.clipping import Flat
from dpfl_jax.config import RunConfig
from dpfl_jax.config.execution import Execution
from dpfl_jax.data import ArrayStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.engine import clipped_sum
from dpfl_jax.federation.federated import run_rounds
from dpfl_jax.federation.federated_run import build_federation
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import SiloMechanism, local_item, rpdp
from dpfl_jax.federation.participation import PersonalRecords, SiloFacts
from dpfl_jax.federation.partition import spread, subject_keys
from dpfl_jax.federation.personal import RATE_POLICIES, assign, personal_guarantee, personalise
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Poisson

KEY = RootKey.from_seed(3)
HEART = TwoStage(12.2509765625, 50, 15, 1.0, 1e-3)


def make_store(budgets, seed=0, each=1):
    rng = np.random.default_rng(seed)
    return ArrayStore.from_users(
        (
            f"patient {i:04d}",
            {
                "x": rng.normal(size=(each, 5)).astype(np.float32),
                "y": rng.normal(size=(each, 3)).astype(np.float32),
                "epsilon": np.full(each, budget, np.float64),
            },
        )
        for i, budget in enumerate(budgets)
    )


def make_config(
    policy="certified", sigma=None, unreachable="error", delta=1e-3, **federation
):  # fmt: skip
    section = {"silos": 3, "rounds": 4, "local_steps": 3} | federation
    return RunConfig.model_validate(
        {
            "federation": section,
            "mechanism": {
                "kind": "rpdp",
                "max_records_per_subject": 1,
                "clip_norm": 0.7,
            },
            "privacy": {
                "epsilon": None if sigma else 10.0,
                "noise_multiplier": sigma,
                "delta": delta,
                "policy": policy,
                "unreachable": unreachable,
                "budgets": {"kind": "column", "declared": [0.2, 1.0, 5.0]},
            },
        }
    )


def build(budgets, seed=0, each=1, **options):
    store, config = make_store(budgets, seed, each), make_config(**options)
    data = spread(store, config)
    federation = build_federation(config, [SiloFacts.of(silo) for silo in data.silos])
    federation, data, personal = personalise(
        config, federation, data, store, subject_keys(store, 0), config.privacy.delta
    )
    return data, federation, personal


def builder_of(data, federation, key=KEY):
    return RoundBuilder(federation, data, key, data_parallel_mesh(jax.devices()[:1]))


def executed_rates(data, rounds):
    """The rate of every record in every round, as it is drawn: [rounds, records]."""
    return np.stack(
        [np.concatenate([silo.at_round(r).rates for silo in data.silos]) for r in range(rounds)]
    )


ANY_RUN = {
    "seed": st.integers(0, 2**31),
    "policy": st.sampled_from(RATE_POLICIES),
    "sigma": st.floats(3.0, 20.0),
    "steps": st.integers(1, 30),
    "rounds": st.integers(1, 12),
    "lam": st.sampled_from([0.3, 0.7, 1.0]),
}


def check_what_is_executed(distinct, seed, policy, sigma, steps, rounds, lam):
    """Accounts anew, finely, what each round samples of 100 records; returns budgets checked."""
    rng = np.random.default_rng(seed)
    budgets = rng.choice(np.exp(rng.uniform(np.log(0.03), np.log(11), distinct)), 100)
    data, federation, personal = build(
        budgets, policy=policy, sigma=sigma, local_steps=steps, rounds=rounds,
        participation_prob=lam,
    )  # fmt: skip
    mine = np.array([budgets[int(name.split()[1])] for name in personal.names])
    assert personal.budgets.tolist() == mine.tolist()  # nobody got somebody else's
    rates = executed_rates(data, rounds)
    for column in np.unique(np.vstack([rates, mine]), axis=1).T:
        used, budget = column[:-1], column[-1]
        active = used[used > 0]
        assert len(np.unique(active)) <= 1
        assert np.all(used[: len(active)] > 0)  # who has left does not come back
        if len(active):
            event = accounting.events.two_stage(sigma, active[0], lam, steps, len(active))
            assert accounting.epsilon(event, 1e-3, resolution=FINEST) <= budget * (1 + 1e-9)
    assert np.all(personal.check(rounds) <= mine)
    # What is drawn is drawn among records that have a rate.
    builder = builder_of(data, federation)
    for r in range(rounds):
        for i in range(3):
            drawn = [d.positions for d in builder.draws(i, r)]
            assert np.all(rates[r, np.concatenate(drawn)] > 0)
    return len(np.unique(mine))


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=10)
@given(**ANY_RUN)
def test_no_record_exceeds_its_budget_in_the_run_as_executed(**run):
    """10 runs of 100 records with 6 distinct budgets each."""
    check_what_is_executed(6, **run)


@pytest.mark.nightly
def test_a_thousand_budgets_are_kept_in_runs_as_executed():
    """Distinct budgets in random settings until there are 1,000 of them."""
    checked = []

    @settings(derandomize=True, deadline=None, max_examples=24, phases=[Phase.generate])
    @given(**ANY_RUN)
    def many(**run):
        checked.append(check_what_is_executed(60, **run))

    many()
    assert sum(checked) >= 1000


def test_realised_frequencies_match_the_rates():
    """Records' counts over 4,000 draws: chi-square at 1e-4, and each within 5 deviations."""
    budgets = np.repeat([0.1, 0.5, 2.0, 10.0, math.inf], 12)
    data, federation, personal = build(budgets, rounds=40, local_steps=100, silos=1)
    builder, n = builder_of(data, federation), 40 * 100
    counts = np.zeros(60)
    for r in range(40):
        for draw in builder.draws(0, r):
            counts[draw.positions] += 1
    rates = personal.assignment.rates
    assert np.all(counts[np.isinf(personal.budgets)] == n)
    random = rates < 1
    z = (counts - n * rates)[random] / np.sqrt(n * rates * (1 - rates))[random]
    assert np.abs(z).max() < 5.0
    assert 15 < np.sum(z**2) < 92  # 48 degrees of freedom: 1e-4 on both sides together


def test_silos_take_part_with_the_declared_probability_and_empty_rounds_happen():
    """Bernoulli(0.3) per silo and round; 1,000 rounds of 3 silos: within 4.5 deviations."""
    _, federation, _ = build(np.ones(60), rounds=1000, local_steps=1, participation_prob=0.3)
    cohorts = [federation.cohort_of(KEY, r) for r in range(1000)]
    counts = np.bincount(np.concatenate(cohorts), minlength=3)
    assert np.all(np.abs(counts - 300) < 4.5 * math.sqrt(1000 * 0.3 * 0.7))
    empty = sum(len(c) == 0 for c in cohorts)
    assert abs(empty - 343) < 4.5 * math.sqrt(1000 * 0.343 * 0.657)


@pytest.mark.slow
def test_equal_budgets_are_uniform_sampling():
    """The same draws, the same epsilon and the same model as DP-SGD with one rate for all."""
    data, federation, personal = build(np.full(40, 2.0), sigma=3.0)
    rate = personal.assignment.rates[0]
    assert set(personal.assignment.rates) == {rate}
    plans = []
    for i, plan in enumerate(federation.silos):
        silo = data.silos[i]
        mine = plan.mechanism.participation.select(silo, KEY, 7)
        assert mine.tolist() == Poisson(rate).indices(KEY, 7, silo.num_records).tolist()
        same = local_item(sampling_prob=rate, clip_norm=0.7)
        drawn = plan.mechanism.participation
        assert drawn.expected_batch > 0
        divisor = same.participation.divisor(plan.facts)
        drawn = dataclasses.replace(drawn, expected_batch=divisor)
        own = dataclasses.replace(plan.mechanism, participation=drawn)
        plans.append((plan, own, same))
    one = dataclasses.replace(
        federation, silos=tuple(dataclasses.replace(p, mechanism=m) for p, m, _ in plans)
    )
    two = dataclasses.replace(
        federation, silos=tuple(dataclasses.replace(p, mechanism=m) for p, _, m in plans)
    )
    results = [
        run_rounds(
            loss_fn=loss_fn, params=make_params(), data=data, federation=f,
            local_optimizer=optax.sgd(0.1), delta=1e-3, key=KEY, show_spent=False,
        ).params
        for f in (one, two)
    ]  # fmt: skip
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.array_equal(a, b)
    event = accounting.events.uls(3.0, rate, 12)
    assert personal.spent(4)[0] == pytest.approx(accounting.epsilon(event, 1e-3), rel=1e-3)


def test_the_divisor_is_declared_and_no_budget_moves_it():
    budgets = np.full(50, 1.0)
    data, federation, _ = build(budgets)
    _, other, _ = build(np.where(np.arange(50) == 7, 5.0, budgets))
    one_less, _, _ = build(budgets[:-1])
    for plan, twin in zip(federation.silos, other.silos, strict=True):
        constant = plan.mechanism.participation.divisor(plan.facts)
        assert constant == twin.mechanism.participation.divisor(
            twin.facts
        )  # secret budgets do not show
    # The plan, made once, goes with the data of a neighbour: rates are the silo's own.
    one_less = one_less.with_rates(np.full(one_less.num_records, data.rates[0]))
    federation.check(one_less)
    silos = np.arange(3)
    chunks = [builder_of(d, federation).build(0, silos).chunk for d in (data, one_less)]
    for name in ("divisor", "stddev", "active", "weight", "noise_key"):
        assert np.array_equal(getattr(chunks[0], name), getattr(chunks[1], name)), name


@settings(derandomize=True, deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), exponent=st.integers(-3, 12))
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(seed, exponent):
    budgets = np.random.default_rng(seed).choice([0.5, 3.0, 12.0], 24)
    data, federation, _ = build(budgets, seed=seed, silos=1, sigma=2.0)
    mechanism, silo = federation.silos[0].mechanism, data.silos[0]
    summed = SUM.setdefault(0, jax.jit(clipped_sum(mechanism, loss_fn)))
    chosen = mechanism.participation.select(silo, KEY, seed)
    if not len(chosen):
        return

    def total(records):
        read = data.read(np.arange(24))
        read = {k: v for k, v in read.items() if k != "epsilon"}
        read["y"] = read["y"].copy()
        read["y"][chosen[0]] *= 10.0**exponent
        mask = np.isin(np.arange(24), records)
        units = jax.tree.map(lambda a: jnp.asarray(a[None]), read)
        out, _ = summed(make_params(), units, mask[None], np.ones((1, 24), np.float32),
                        np.int32(1), np.float32(0.7))  # fmt: skip
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(out)])

    moved = np.linalg.norm(total(chosen) - total(chosen[1:]))
    assert moved <= 0.7 * (1 + 1e-5)


SUM: dict = {}


def test_nearly_zero_infinite_and_unreachable_budgets():
    budgets = np.full(30, 1.0)
    budgets[4], budgets[9] = 1e-9, math.inf
    data, federation, personal = build(budgets, sigma=8.0)
    place = {name: i for i, name in enumerate(personal.names)}
    tiny, free = place["patient 0004"], place["patient 0009"]
    assert personal.assignment.rates[free] == 1.0
    # Delta alone lets it in a little: (0, delta) is a total variation distance of delta.
    assert personal.assignment.rates[tiny] < 0.01
    assert personal.spent(4)[tiny] <= 1e-9
    builder = builder_of(data, federation)
    drawn = np.concatenate(
        [d.positions for r in range(4) for i in range(3) for d in builder.draws(i, r)]
    )
    assert np.sum(drawn == free) == 12  # all steps of its silo
    assert np.sum(drawn == tiny) <= 1
    with pytest.raises(
        BadInputError, match=r"record 'patient 0004': row \d+ asks.* smallest sampling rate"
    ):
        build(budgets, sigma=8.0, delta=1e-13)
    _, _, personal = build(budgets, sigma=8.0, delta=1e-13, unreachable="exclude")
    assert personal.assignment.rates[place["patient 0004"]] == 0.0
    assert personal.summary(4)["never_sampled"] == 1


@pytest.mark.slow
def test_records_whose_budget_is_used_up_leave_and_training_goes_on():
    """The fitted curve overruns 0.1; uniform sampling overruns more: both end those records."""
    budgets = np.repeat([0.05, 0.1, 8.0], 20)
    data, federation, personal = build(budgets, policy="uniform", rounds=6)
    stay = personal.assignment.stay
    strict = personal.budgets < 1
    assert np.all(stay[strict] < 6)
    assert np.all(stay[~strict] == 6)
    rates = executed_rates(data, 6)
    assert np.all(rates[-1, strict] == 0)
    result = run_rounds(
        loss_fn=loss_fn, params=make_params(), data=data, federation=federation,
        local_optimizer=optax.sgd(0.05), delta=1e-3, key=KEY, show_spent=False,
    )  # fmt: skip
    assert result.steps == 6
    assert np.all(personal.check(6) <= personal.budgets)
    # Everybody leaves: batches are empty, noise is still added, and nothing is spent any more.
    data, federation, personal = build(np.full(30, 0.02), policy="uniform", rounds=6)
    gone = int(personal.assignment.stay.max())
    assert gone < 6
    builder = builder_of(data, federation)
    assert all(d.size == 0 for i in range(3) for d in builder.draws(i, gone))
    chunk = builder.build(gone, np.arange(3)).chunk
    assert np.asarray(chunk.active).all()
    assert np.all(np.asarray(chunk.stddev) > 0)
    assert personal.spent(gone).tolist() == personal.spent(6).tolist()


@pytest.mark.slow
def test_rounds_without_silos_leave_the_model_and_are_charged():
    data, federation, personal = build(
        np.full(30, 2.0), silos=2, rounds=3, sigma=1.0, participation_prob=0.05
    )
    key = RootKey.from_seed(1)
    assert sum(len(federation.cohort_of(key, r)) for r in range(3)) == 0
    params = make_params()
    result = run_rounds(
        loss_fn=loss_fn, params=params, data=data, federation=federation,
        local_optimizer=optax.sgd(0.1), delta=1e-3, key=key,
    )  # fmt: skip
    assert result.steps == 3
    for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(params), strict=True):
        assert np.array_equal(a, b)
    assert [row["silos"] for row in result.metrics] == [0] * 3
    spent = [row["epsilon_spent"] for row in result.metrics]
    assert spent == sorted(spent)
    assert spent[-1] > 0
    assert np.all(personal.spent(3) > 0)


def test_policies_agree_with_their_definitions():
    budgets, public = np.array([0.1, 0.1, 1.0, 5.0, 0.77]), np.repeat([0.1, 1.0, 5.0], [7, 2, 1])
    least, mean = certified_rates(np.array([0.1, 0.77]), HEART).rates
    assert assign("minimum", budgets, public, HEART).rates.tolist() == [least] * 5
    assert assign("dropout", budgets, public, HEART).rates.tolist() == [0, 0, mean, mean, mean]
    uniform = assign("uniform", budgets, public, HEART)
    assert uniform.rates.tolist() == [mean] * 5
    assert uniform.violations == 2  # they would overrun: so they leave
    assert np.all(uniform.stay[:2] < 15)
    certified = assign("certified", budgets, public, HEART)
    bisection = assign("bisection", budgets, public, HEART)
    assert certified.violations == bisection.violations == 0
    assert np.all(bisection.rates < certified.rates)
    assert np.all(bisection.rates > 0.75 * certified.rates)
    fitted = assign("curve_fit", budgets, public, HEART)
    assert fitted.facts["renyi_violations"] == 3  # 5 too, a little
    with pytest.raises(BadInputError, match="must be one of certified"):
        assign("scaled", budgets, public, HEART)


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_a_record_with_budget_zero_is_never_drawn(policy):
    budgets = np.full(30, 2.0)
    budgets[[3, 17]] = 0.0
    data, federation, personal = build(budgets, policy=policy, sigma=3.0, delta=0.03)
    out = np.flatnonzero(personal.budgets == 0)
    assert len(out) == 2
    assert np.all(personal.assignment.rates[out] == 0.0)
    assert np.all(personal.check(4)[out] == 0.0)
    others = np.delete(personal.assignment.rates, out)
    assert np.all(others > 0) or policy == "dropout"  # 2 is below the declared mean
    builder = builder_of(data, federation)
    drawn = [d.positions for r in range(4) for i in range(3) for d in builder.draws(i, r)]
    assert not np.isin(out, np.concatenate(drawn)).any()


def test_zeros_among_declared_budgets_are_nobody():
    declared, budgets = np.array([0.0, 0.1, 1.0]), np.array([0.0, 0.1, 1.0])
    least = certified_rates(np.array([0.1]), HEART).rates[0]
    assert assign("minimum", budgets, declared, HEART).rates.tolist() == [0.0, least, least]
    assert assign("uniform", budgets, declared, HEART).facts["mean_budget"] == 0.55
    with pytest.raises(BadInputError, match="all declared budgets are 0"):
        assign("minimum", budgets, np.zeros(3), HEART)


def test_a_large_delta_is_named():
    for delta, said in ((0.05, True), (0.03, False)):
        _, _, personal = build(np.ones(30), delta=delta)
        caveats = personal_guarantee(personal.public, 4).caveats
        assert any("one over the 30 records" in c for c in caveats) is said


def test_reports_hold_no_rate_and_no_budget():
    _, federation, personal = build(np.random.default_rng(0).uniform(0.5, 4.0, 30))
    public = json.dumps([p.mechanism.to_json() for p in federation.silos])
    sentence = str(personal_guarantee(personal.public, 4))
    secrets = {*personal.assignment.rates.tolist(), *personal.budgets.tolist()}
    for secret in secrets:
        assert f"{secret:.4g}" not in public + sentence
    assert "rates" not in public
    for words in ("each record", "every record keeps its own", "between 0.2 and 5", "silo-local"):
        assert words in sentence
    guarantee = personal_guarantee(personal.public, 4)
    assert guarantee.unit == "record"
    assert guarantee.assumptions.count(IDEALISED) == 1
    assert guarantee.epsilon <= 10.0
    assert guarantee.epsilon == pytest.approx(personal.setting.epsilon(1.0), rel=1e-6)


@pytest.mark.parametrize("partition", ["confined", "uniform"])
def test_a_person_of_several_records_is_refused_and_the_guarantee_says_what_it_would_be(partition):
    """No record is left out that nobody said may be."""
    _, _, one_each = build(np.ones(90))
    caveats = personal_guarantee(one_each.public, 4).caveats
    assert any("a person who owns several" in caveat for caveat in caveats)
    with pytest.raises(
        BadInputError, match=r"data\.max_examples_per_user=1 to train only on the first"
    ):
        build(np.ones(30), each=3, partition=partition)


def test_mechanism_refuses_what_it_cannot_keep():
    data, federation, _ = build(np.ones(20), sigma=5.0)
    with pytest.raises(BadInputError, match="from 0 to 1 for each"):
        data.with_rates(np.full(20, 1.5))
    with pytest.raises(BadInputError, match="10 sampling rates for 20 records"):
        data.with_rates(np.full(10, 0.5))
    with pytest.raises(BadInputError, match="expected_batch"):
        rpdp(expected_batch=0.0)
    with pytest.raises(BadInputError, match="max_records_per_subject to 1"):
        rpdp(max_records_per_subject=2)
    with pytest.raises(BadInputError, match="rounds to stay"):
        data.with_rates(np.full(20, 0.5), np.array([1, 2]))
    bare = dataclasses.replace(data, rates=None)
    with pytest.raises(BadInputError, match="but 0 sampling rates"):
        rpdp().participation.select(bare.silos[0], KEY, 0)
    with pytest.raises(BadInputError, match="but 0 sampling rates"):
        run_rounds(
            loss_fn=loss_fn, params=make_params(), data=bare, federation=federation,
            local_optimizer=optax.sgd(0.1), delta=1e-3, key=KEY,
        )  # fmt: skip
    with pytest.raises(BadInputError, match="no accounting setting"):
        SiloPlan(rpdp(), federation.silos[0].facts, 3, 1.0, 1.0).event(1)


@pytest.mark.slow
def test_norms_are_compared_before_the_first_unit_whenever_that_comes(monkeypatch):
    """Rounds without a unit come first here; the check waits for none of them to be filled."""
    from dpfl_jax.clipping import SelfCheckError
    from dpfl_jax.clipping.taps import leaves

    data = make_data(records=80, subjects=80, silos=4, cap=1)
    setting = TwoStage(1.0, 2, 4, 1.0, 1e-3)
    data = data.with_rates(np.full(data.num_records, 0.004))
    mechanism = SiloMechanism(
        participation=PersonalRecords(setting=setting, expected_batch=4.0),
        clip=Flat(0.7),
    )
    plans = tuple(SiloPlan(mechanism, SiloFacts.of(silo), 2, 1.0, 1.0) for silo in data.silos)

    def train(seed, strategy):
        return run_rounds(
            loss_fn=loss_fn,
            params=make_params(),
            data=data,
            federation=Federation(plans, 4, 4),
            local_optimizer=optax.sgd(0.1),
            delta=1e-3,
            key=RootKey.from_seed(seed),
            execution=Execution(strategy=strategy),
            show_spent=False,
        )

    def units(seed):
        return [row["outside_guarantee"]["units"] for row in train(seed, "scan").metrics]

    late = next(s for s in range(20) if (u := units(s))[0] == 0 and sum(u))
    train(late, "ghost")
    norms, formed = leaves.squared_norm, leaves.formed_gradients
    monkeypatch.setattr(leaves, "squared_norm", lambda *a, **k: 1e-4 * norms(*a, **k))
    monkeypatch.setattr(
        leaves, "formed_gradients", lambda *a, **k: (lambda r: (r[0], 1e-4 * r[1]))(formed(*a, **k))
    )
    with pytest.raises(SelfCheckError):
        train(late, "ghost")
