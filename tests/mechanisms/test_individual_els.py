"""Individual accounting of examples: a user pays for all that are kept, at the largest bound."""

import csv
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from neighbours import people
from scipy import stats

from dpfl_jax.accounting.filters import bounds
from dpfl_jax.config.execution import Execution
from dpfl_jax.data import ArrayStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.experimental import individual, individual_els
from dpfl_jax.mechanisms import Population, els
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import SPENT, RunDirectory
from tests.mechanisms.individuals import curved, loss_fn, made, of_sizes, taken

KIND = {"kind": individual_els}


def held_by(users, rng):
    """Users of 1, 2 or 6 examples (4 are kept), whose largest gradient has a norm of its own."""
    norms, counts = np.resize([0.05, 0.3, 0.95, 5.0], users), np.resize([1, 2, 6], users)
    rows = {}
    for u in range(users):
        sizes = norms[u] * np.r_[np.ones(5), rng.uniform(0.2, 1.0, counts[u])][-counts[u] :]
        sizes[0] = norms[u] if counts[u] < 6 else sizes[0]
        rows[f"u{u:03d}"] = {"x": np.float32(np.c_[sizes, 0 * sizes])}
    data = ArrayStore.from_users(rows.items())
    names = data.user_ids(np.arange(users))
    return data, [rows[name]["x"][:, 0] for name in names]


def test_the_target_is_that_of_the_steps_that_a_whole_group_can_pay_for():
    population = Population(100, 500, 400)
    mechanism = individual_els(group_size=4, batch_size=20)
    target = {"epsilon": 4.0, "delta": 1e-4}
    planned = mechanism.calibrate(population, 60, **target)
    assert planned.mechanism.budget.least_steps == 30
    told = planned.guarantee()
    assert 3.99 < told.epsilon <= 4.0
    assert any("told to nobody" in said for said in told.assumptions)
    plain = els(group_size=4, batch_size=20).calibrate(
        population, 60, noise_multiplier=planned.noise_multiplier, delta=1e-4
    )
    assert planned.guarantee(30).epsilon == plain.guarantee(30).epsilon < told.epsilon
    # Of one example of each user it is individual accounting of users.
    alone = Population(400, 400, 400)
    uls = individual(group_size=1, cohort_size=20).calibrate(alone, 60, **target)
    one = individual_els(group_size=1, batch_size=20).calibrate(alone, 60, **target)
    assert one.noise_multiplier == uls.noise_multiplier
    assert one.mechanism.budget == uls.mechanism.budget
    assert one.event() == uls.event()
    assert one.filter() == uls.filter()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"least_steps": 60}, "no user would ever leave: set it lower, or do"),
        ({"noise_multiplier": 0.0}, "set it higher, or leave out mechanism.budget"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(fields, message):
    sigma = fields.pop("noise_multiplier", 1.0)
    with pytest.raises(BadInputError, match=re.escape(message)):
        individual_els(group_size=2, batch_size=5, **fields).plan(
            people(20), steps=60, noise_multiplier=sigma, delta=1e-3
        )


def test_a_column_of_the_name_of_a_bound_is_refused():
    rows = {"x": np.ones((1, 2), np.float32), "bound": np.ones(1, np.float32)}
    with pytest.raises(BadInputError, match="the data have a column 'bound'"):
        made(ArrayStore.from_users((f"u{u}", rows) for u in range(9)), **KIND)


def test_of_one_example_each_it_draws_and_sums_what_individual_does():
    data, _ = of_sizes(60)
    users, examples = (
        taken(made(data, kind=kind, group_size=1, **size)[0])
        for kind, size in ((individual, {"cohort_size": 15}), (individual_els, {"batch_size": 15}))
    )
    for (a, x, one), (b, y, other) in zip(users, examples, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_few_or_small_examples_stay_for_longer_and_are_drawn_as_often_as_is_paid_for():
    data, _ = held_by(240, np.random.default_rng(0))
    steps, plan = made(data, steps=60, group_size=4, batch_size=140, noise_multiplier=3.0, **KIND)
    found = taken(steps)
    levels, parts, owners = found[0][1], steps.run.parts, steps.owners
    np.testing.assert_array_equal(np.bincount(owners), parts)
    assert set(parts.tolist()) == {1, 2, 4}
    may = steps.run.filter.steps_left(np.zeros(240, np.int64), levels, 60, parts)
    largest = bounds(1.0)[levels] == 1.0
    assert (may[largest & (parts == 4)] == 6).all()
    assert 6 < may[largest & (parts == 2)].min() < may[largest & (parts == 1)].min()
    counts = np.bincount(np.concatenate([who for who, _, _ in found]), minlength=len(owners))
    late = [u for t, (who, _, _) in enumerate(found) for u in who if t >= may[owners[u]]]
    assert not late
    # Coins in every step that is paid for; wrong once in 10^4 keys.
    prob = plan.calibrated.scheme.draw_prob
    for size in (1, 2, 4):
        of = parts[owners] == size
        got = stats.binomtest(int(counts[of].sum()), int(may[owners][of].sum()), prob)
        assert got.pvalue > 1e-4 / 3


def test_a_user_moves_a_sum_by_its_bound_times_its_examples_and_nobody_elses_part():
    """The last user has other data: draws, bounds and budgets of all others are what they were."""
    runs, mine = {}, 59
    for last in (1e-6, 0.7, -40.0):  # of the first: nearly nothing is there
        steps, _ = made(
            people(60, last), key=3, steps=30, width=4, clip_norm=3.0, batch_size=70, **KIND
        )
        runs[last] = taken(steps)
    own = np.flatnonzero(steps.owners == mine)
    assert len(own) == 2
    for last in (0.7, -40.0):
        both = moved = 0
        for (a, x, without), (b, y, other) in zip(runs[1e-6], runs[last], strict=True):
            assert np.setdiff1d(a, own).tolist() == np.setdiff1d(b, own).tolist()
            np.testing.assert_array_equal(np.delete(x, mine), np.delete(y, mine))
            drawn = np.isin(own, b).sum()
            distance = np.linalg.norm(other - without)
            assert distance <= drawn * bounds(3.0)[y[mine]] * (1 + 1e-5) + 1e-4
            both += drawn == 2
            moved = max(moved, distance)
        assert both >= 1
        assert moved > 1.6 * min(3.0, 2 * abs(last))  # by both at once
    ends = [
        max(t for t, (who, _, _) in enumerate(r) if np.isin(own, who).any()) for r in runs.values()
    ]
    assert ends[0] > 6 > ends[-1]  # it leaves at 6, at the latest


def test_bounds_are_the_largest_norms_of_plain_gradients_of_what_is_kept():
    rng = np.random.default_rng(1)
    rows = {f"u{u:03d}": {"x": np.float32(rng.normal(size=(1 + u % 5, 4)))} for u in range(50)}
    data = ArrayStore.from_users(rows.items())
    at = {"w": jnp.float32([0.3, -0.2, 0.1, 0.5])}
    every = jax.vmap(jax.grad(curved), (None, 0))
    for execution in (None, Execution(microbatch_size=3, strategy="vmap")):
        steps, _ = made(data, execution=execution, loss=curved, width=4, group_size=3, **KIND)
        steps.params = at
        kept = data.read(steps.sampler.positions)
        norms = np.linalg.norm(every(at, kept)["w"], axis=1)
        want = [norms[steps.owners == u].max() for u in range(50)]
        np.testing.assert_allclose(steps.compute_norms(0), want, rtol=1e-5)
        assert np.bincount(steps.owners).max() == 3
    rows["u007"]["x"][0] = np.nan
    steps, _ = made(ArrayStore.from_users(rows.items()), width=4, group_size=5, **KIND)
    which = list(steps.run.data.user_ids(np.arange(50))).index("u007")
    assert np.flatnonzero(~np.isfinite(steps.compute_norms(0))).tolist() == [which]


def test_looks_are_of_one_shape_and_of_the_same_bits_without_a_user():
    found, shapes = [], set()
    rng = np.random.default_rng(0)
    rows = [(f"u{u:03d}", {"x": np.float32(rng.normal(size=(2, 4)))}) for u in range(90)]
    for users in (rows, rows[1:], rows[-5:]):
        data = ArrayStore.from_users(users)
        steps, _ = made(data, loss=curved, width=4, **KIND)
        steps.params, look = {"w": jnp.float32([0.3, -0.2, 0.1, 0.5])}, steps.norms_of_batch

        def noted(params, units, mask, *rest, look=look):
            shapes.add(mask.shape)
            return look(params, units, mask, *rest)

        steps.norms_of_batch = noted
        found.append(
            dict(zip(data.user_ids(np.arange(len(users))), steps.compute_norms(0).tolist()))
        )
    assert shapes == {(4, 8 * len(jax.devices()))}
    assert found[1].items() < found[0].items()
    assert found[2].items() < found[0].items()


def run(directory, **given):
    given = {"steps": 14, "epsilon": 4.0, "delta": 1e-3, "microbatch_size": 8} | given
    held = RunDirectory(directory, {}, RootKey.from_seed(0))
    try:
        return fit(
            loss_fn=curved, params={"w": jnp.zeros(4)}, data=people(60), optimizer=optax.adam(0.1),
            mechanism=individual_els(group_size=2, batch_size=20, refresh=3, least_steps=4),
            run_dir=held, **given,
        )  # fmt: skip
    finally:
        held.close()


@pytest.mark.slow
def test_what_users_have_spent_is_within_their_budgets(tmp_path):
    """And some of it is left."""
    whole = run(tmp_path / "whole")
    with (tmp_path / "whole" / SPENT).open(newline="") as file:
        rows = list(csv.DictReader(file))
    shares = np.array([float(row["share_of_budget"]) for row in rows])
    assert len(rows) == 60
    assert 0 < (shares < 0.999).sum() < 60
    assert shares.max() <= 1.0
    assert max(float(row["epsilon_spent"]) for row in rows) <= whole.guarantee.epsilon <= 4.0


def test_records_of_several_owners_are_refused():
    population = Population(100, 500, 400, shared=True)
    with pytest.raises(BadInputError, match=r"use mechanism[.]kind=els or owner_sets"):
        individual_els(group_size=4, batch_size=20).calibrate(
            population, 60, epsilon=4.0, delta=1e-4
        )


def test_its_loss_is_that_of_an_example():
    mechanism = individual_els(group_size=4, batch_size=20)
    assert mechanism.participation.unit_loss(loss_fn) is loss_fn
