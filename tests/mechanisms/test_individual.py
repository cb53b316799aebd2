"""Individual accounting: who takes part follows from what is released and one's own data alone."""

import csv
import dataclasses
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from neighbours import people
from runs import DiedError, death_after_a_checkpoint, final_state
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting.filters import RenyiFilter, bounds
from dpfl_jax.clipping import OwnBound
from dpfl_jax.config.execution import Execution
from dpfl_jax.data import ArrayStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.experimental import individual, individual_els
from dpfl_jax.mechanisms import Mechanism, Population, uls
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import driver
from dpfl_jax.run.directory import SPENT
from dpfl_jax.run.driver import Hooks
from dpfl_jax.training import filtered
from dpfl_jax.training.filtered import FilteredSteps, Spending
from tests.mechanisms.individuals import SIZES, curved, loss_fn, made, of_sizes, taken

# ---- what is planned ----------------------------------------------------------------------------


def test_the_target_is_that_of_the_steps_that_everybody_can_pay_for():
    population = Population(400, 800, 400)
    given = {"group_size": 2, "cohort_size": 20}
    target, delta = {"epsilon": 4.0, "delta": 1e-4}, 1e-4
    planned = individual(**given).calibrate(population, 60, **target)
    assert planned.mechanism.budget.least_steps == 30
    told = planned.guarantee()
    assert told.accountant.startswith("Renyi filter over Poisson-subsampled Gaussians")
    assert 3.99 < told.epsilon <= 4.0
    assert any("told to nobody" in said for said in told.assumptions)
    same = accounting.epsilon(planned.event(), delta, accountant="rdp")
    assert told.epsilon == same
    # Midway, as long as nobody can have left, it is user-level sampling.
    sigma = planned.noise_multiplier
    plain = uls(**given).calibrate(population, 60, noise_multiplier=sigma, delta=delta)
    assert planned.guarantee(30).epsilon == pytest.approx(
        accounting.epsilon(plain.event(30), delta)
    )
    assert planned.guarantee(30).epsilon < told.epsilon
    # Everybody in all steps at once: no order, no slack.
    whole = individual(**given | {"cohort_size": 400})
    whole = whole.calibrate(population, 60, **target)
    assert accounting.accountant_of(whole.event()) == "pld"
    assert 3.99 < whole.guarantee().epsilon <= 4.0
    # An order that is given is kept, and paid for.
    odd = individual(**given, renyi_order=20.0).calibrate(population, 60, **target)
    assert odd.mechanism.budget.renyi_order == 20.0
    assert odd.noise_multiplier > planned.noise_multiplier
    assert 3.99 < odd.guarantee().epsilon <= 4.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"least_steps": 60}, "no user would ever leave: set it lower, or do"),
        ({"refresh": 0}, "mechanism.refresh is 0, but it must be at least 1"),
        ({"clipping": "per_layer"}, "mechanism.clipping is per_layer, but individual budgets"),
        ({"renyi_order": 1.0}, "leave it out, and the best is taken"),
        ({"noise_multiplier": 0.0}, "no individual budget pays for a step"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(fields, message):
    sigma = fields.pop("noise_multiplier", 1.0)
    with pytest.raises(BadInputError, match=re.escape(message)):
        individual(group_size=2, cohort_size=5, **fields).plan(
            people(20), steps=60, noise_multiplier=sigma, delta=1e-3
        )


def test_a_loop_of_ones_own_is_refused():
    mechanism = individual(group_size=2, cohort_size=5)
    plan = mechanism.plan(people(20), steps=6, noise_multiplier=1.0, delta=1e-3)
    key = RootKey.from_seed(0)
    with pytest.raises(BadInputError, match="which only fit does: use fit"):
        next(plan.batches(key))
    with pytest.raises(BadInputError, match="which only fit does: use fit"):
        plan.clipped_grad(loss_fn)
    # What it is made of: nobody is drawn, and nobody is summed without a bound.
    assert [plan.sampler(key).draw(step).size for step in range(6)] == [0] * 6
    with pytest.raises(BadInputError, match="the units have no bounds"):
        mechanism.rule.weights(jnp.ones(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"packing": 4}, "execution.packing makes shapes depend on everybody's data"),
        ({"group_buckets": True}, "execution.group_buckets makes shapes"),
        ({"mesh": make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])}, "with data alone"),
    ],
)
def test_a_look_that_cannot_be_taken_is_refused_before_anything_is_paid(given, message):
    paid = []
    with pytest.raises(BadInputError, match=message):
        run(charge=paid.append, **given)
    assert not paid


# ---- who takes part -----------------------------------------------------------------------------


def test_small_gradients_stay_for_longer_and_are_drawn_as_often_as_is_paid_for():
    data, own = of_sizes(600)
    steps, plan = made(data, steps=60)
    found = taken(steps)
    levels = found[0][1]
    assert (bounds(1.0)[levels] >= np.minimum(own, 1.0)).all()
    assert all((now == levels).all() for _, now, _ in found)
    may = steps.run.filter.steps_left(np.zeros(600, np.int64), levels, 60)
    assert may[own > 0.9].max() == 6  # nobody is there who cannot pay
    assert 6 < may[(own > 0.5) & (own < 0.9)].max() < 60
    assert (may[own < 0.2] == 60).all()
    counts = np.bincount(np.concatenate([who for who, _, _ in found]), minlength=600)
    assert not owing(found, may)
    # Each of 6 sizes: coins with q = 1/4 in every step that is paid for; wrong once in 10^4 keys.
    prob = plan.calibrated.scheme.draw_prob
    for size in SIZES:
        there = own == size
        got = stats.binomtest(int(counts[there].sum()), int(may[there].sum()), prob)
        assert got.pvalue > 1e-4 / 6


def owing(found, may):
    """Users who were drawn in a step that they cannot pay for."""
    return {int(u) for step, (who, _, _) in enumerate(found) for u in who if step >= may[u]}


def test_a_user_who_stays_after_the_budget_is_spent_is_seen(monkeypatch):
    """Of a filter that forgets at every look what was spent before."""
    after = RenyiFilter.after
    monkeypatch.setattr(
        RenyiFilter, "after", lambda self, spent, *rest: 0 * after(self, spent, *rest)
    )
    data, _ = of_sizes(60)
    steps, _ = made(data)
    found = taken(steps)
    may = steps.run.filter.steps_left(np.zeros(60, np.int64), found[0][1], 40)
    assert len(owing(found, may)) > 20


def test_a_user_moves_a_sum_by_its_bound_and_nobody_elses_part():
    """The last user has other data: draws, bounds and budgets of all others are what they were."""
    key, runs = 3, {}
    for last in (1e-6, 0.7, -40.0):  # of the first: nearly nothing is there
        steps, _ = made(people(60, last), key=key, steps=30, width=4, clip_norm=3.0)
        runs[last] = taken(steps)
    mine = 59
    assert people(60, 0.7).user_ids(np.array([mine]))[0] == people(60).user_ids(np.array([mine]))[0]
    for last in (0.7, -40.0):
        took = moved = 0
        for (a, x, without), (b, y, other) in zip(runs[1e-6], runs[last], strict=True):
            assert np.setdiff1d(a, [mine]).tolist() == np.setdiff1d(b, [mine]).tolist()
            np.testing.assert_array_equal(np.delete(x, mine), np.delete(y, mine))
            distance = np.linalg.norm(other - without)
            bound = bounds(3.0)[y[mine]] if mine in b else 0.0
            assert distance <= bound * (1 + 1e-5) + 1e-4
            took += mine in b
            moved = max(moved, distance)
        assert took >= 1
        assert moved > 0.8 * min(3.0, 2 * abs(last))
    ends = [max(t for t, (who, _, _) in enumerate(r) if mine in who) for r in runs.values()]
    assert ends[0] > 6 > ends[-1]  # it leaves at 6, at the latest


def levels_under(key, data):
    """Of two stretches, between which the model moves as if something had been released."""
    steps, _ = made(data, key=key, loss=curved, width=4, steps=10, clip_norm=3.0)
    found = []
    for number, _ in steps.inputs():
        steps.params = {"w": jnp.full(4, 0.1 * number)}
        found.append(Spending.decrypt(steps.encrypted, steps.key, (number - 1) // 5).levels)
    return np.array(found)


def test_bounds_do_not_tell_who_was_drawn(monkeypatch):
    """They are those of everybody: other coins, the same bounds. A bound of those drawn is seen."""
    one, other = levels_under(0, people(40)), levels_under(1, people(40))
    np.testing.assert_array_equal(one, other)
    assert (one[0] != one[-1]).any()
    norms = FilteredSteps.compute_norms

    def of_those_drawn(self, stretch):
        users = self.run.users
        scheme = dataclasses.replace(self.sampler.scheme, until=np.full(users, 10))
        drawn = scheme.indices(self.key, max(5 * stretch - 1, 0), users)
        found = np.full(self.run.users, np.inf, np.float32)
        found[drawn] = norms(self, stretch)[drawn]
        return found

    monkeypatch.setattr(FilteredSteps, "compute_norms", of_those_drawn)
    assert (levels_under(0, people(40)) != levels_under(1, people(40))).any()


@pytest.mark.slow
def test_bounds_are_norms_of_plain_gradients_however_they_are_computed():
    rng = np.random.default_rng(1)
    rows = {f"u{u:03d}": {"x": np.float32(rng.normal(size=(1 + u % 3, 4)))} for u in range(50)}
    data = ArrayStore.from_users(rows.items())
    at = {"w": jnp.float32([0.3, -0.2, 0.1, 0.5])}
    names = data.user_ids(np.arange(50))

    def mean(user):
        own = jax.vmap(jax.grad(curved), (None, 0))(at, {"x": user["x"]})["w"].mean(0)
        return float(jnp.linalg.norm(own))

    want = [mean(rows[name]) for name in names]
    for given in ({}, {"examples_at_once": 2}, {"microbatch_size": 3}):
        execution = Execution(**{"microbatch_size": 8} | given)
        steps, _ = made(data, execution=execution, loss=curved, width=4, group_size=3)
        steps.params = at
        np.testing.assert_allclose(steps.compute_norms(0), want, rtol=1e-5)


def test_looks_are_of_one_shape_and_of_the_same_bits_without_a_user():
    """However many users there are: another program may round in another way."""
    found, shapes = [], set()
    rng = np.random.default_rng(0)
    rows = [(f"u{u:03d}", {"x": np.float32(rng.normal(size=(1, 4)))}) for u in range(300)]
    for users in (rows, rows[1:], rows[-5:]):
        data = ArrayStore.from_users(users)
        steps, _ = made(data, loss=curved, width=4, cohort_size=len(users) / 4)
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


@pytest.mark.parametrize("kind", [individual, individual_els])
@pytest.mark.parametrize("width", [24, 784])
def test_a_bound_is_the_same_bits_wherever_its_user_stands(kind, width):
    """Rows of 13 have columns left over, which a product of all of them would round otherwise."""
    rng = np.random.default_rng(2)
    rows = [(f"u{u:03d}", {"x": np.float32(rng.normal(size=(2, width)))}) for u in range(41)]
    at, found = {"w": jnp.float32(rng.normal(size=width) / width**0.5)}, []

    def loss(params, example):
        return jnp.square(example["x"] @ params["w"] - 1.0)

    for users in (rows, rows[1:], rows[7:]):
        data = ArrayStore.from_users(users)
        given = {"execution": Execution(microbatch_size=13), "kind": kind}
        steps, _ = made(data, loss=loss, width=width, **given)
        steps.params = at
        names = data.user_ids(np.arange(len(users)))
        found.append(dict(zip(names, steps.compute_norms(0).tolist(), strict=True)))
    assert found[1].items() < found[0].items()
    assert found[2].items() < found[0].items()


def test_rounding_moves_a_sum_by_less_than_the_smallest_bound():
    """Without compensation by many times as much: removing the first user shifts all others."""
    row, rows, smallest = 64, 128, bounds(1.0)[-1]
    mechanism = individual(group_size=1, cohort_size=row * rows)
    mesh = make_mesh(data=1, devices=jax.devices()[:1])

    def moved(rule):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mechanism, "rule", rule)
            summed = jax.jit(clipped_sum_over_microbatches(mechanism, loss_fn, mesh))

            def total(norms, own):
                filled = np.zeros((3, row * rows), np.float32)
                filled[:, : len(norms)] = norms, own, np.ones(len(norms))
                x, own, there = filled.reshape(3, rows, row)
                units = {"examples": {"x": x[..., None, None]}, "mask": there[..., None] > 0}
                given = ({**units, "bound": own}, there > 0, np.int32(-(-len(norms) // row)))
                found, stats = summed({"w": jnp.zeros(1)}, *given)
                return float(found["w"][0]), float(stats.clipped)

            first = np.float32([smallest])
            most = 0.0
            for seed in range(4):
                others = np.random.default_rng(seed).uniform(0.9, 1, 8100).astype(np.float32)
                both, up = np.r_[first, others], np.ones_like(others)
                with_it, clipped = total(both, np.r_[first, up])
                most = max(most, abs(with_it - total(others, up)[0]))
                assert clipped == 0
            # Clipped is what is above its own bound, not above the clip norm.
            assert total(others, 0 * up + 0.5)[1] == len(others)
            return most / smallest

    @dataclasses.dataclass(frozen=True)
    class Plain(OwnBound):
        compensated = False

    # At the end a sum near 8,000 is rounded, by up to 1/4096: a twentieth of the bound.
    assert moved(property(lambda self: OwnBound(1.0))) < 1.1
    assert moved(property(lambda self: Plain(1.0))) > 1.2


def test_what_is_not_finite_is_bounded_by_the_clip_norm():
    data, _ = of_sizes(12, np.array([0.1, np.nan]))
    steps, _ = made(data, steps=10)
    norms = steps.compute_norms(0)
    assert np.isinf(norms).sum() == 6
    next(steps.inputs())
    levels = Spending.decrypt(steps.encrypted, steps.key, 0).levels
    assert (levels == np.where(np.isinf(norms), 0, levels.max())).all()


# ---- whole runs ---------------------------------------------------------------------------------


def run(directory=None, loss=curved, **given):
    given = {"steps": 14, "epsilon": 4.0, "delta": 1e-3, "microbatch_size": 8} | given
    key = {"key": RootKey.from_seed(0)} if directory is None else {}
    mechanism = individual(group_size=2, cohort_size=20, refresh=3, least_steps=4)
    return fit(
        loss_fn=loss, params={"w": jnp.zeros(4)}, data=people(60), optimizer=optax.adam(0.1),
        mechanism=mechanism, run_dir=directory, **key, **given,
    )  # fmt: skip


@pytest.mark.slow
def test_what_users_have_spent_is_private(tmp_path):
    """It stands in private/, and in checkpoints as what nobody reads without the root key."""
    result = run(tmp_path / "run", checkpoint_every=5)
    with (tmp_path / "run" / SPENT).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (tmp_path / "run" / SPENT).stat().st_mode & 0o777 == 0o600
    assert len(rows) == 60
    shares = np.array([float(row["share_of_budget"]) for row in rows])
    assert (shares <= 1).all()
    assert 0 < (shares < 0.999).sum() < 60
    spent = [float(row["epsilon_spent"]) for row in rows]
    assert max(spent) <= result.guarantee.epsilon <= 4.0
    assert result.private_state is not None
    assert "Spending" not in repr(result)
    words = final_state(tmp_path / "run")["units"]
    assert words.shape == (60, 3)
    assert (words > 1 << 16).mean() > 0.99  # as of random bits; a level is below 32
    told = {f"{value:.7g}" for value in [*shares.tolist(), *spent] if 0 < value < 0.999}
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and not {"private", "checkpoints"} & set(path.parts):
            text = path.read_text(errors="replace")
            assert not any(number in text for number in told), path
            assert "share_of_budget" not in text


def test_a_run_does_not_go_on_computed_in_another_way(tmp_path, monkeypatch):
    """Other rounding could move a level, under the same bits and behind the same noise."""
    with death_after_a_checkpoint(monkeypatch):
        run(tmp_path, checkpoint_every=4, strategy="vmap")
    shutil.rmtree(next((tmp_path / "checkpoints").glob("4")))  # nor does it begin again so
    for given in ({"strategy": "ghost"}, {"strategy": "vmap", "microbatch_size": 4}):
        with pytest.raises(BadInputError, match=r"how steps are computed .* is not what the run"):
            run(tmp_path, checkpoint_every=4, **given)


def test_a_run_does_not_go_on_where_numbers_round_otherwise(tmp_path, monkeypatch):
    """Devices of one kind may: a look taken again would find other levels behind the same noise."""
    with death_after_a_checkpoint(monkeypatch):
        run(tmp_path, checkpoint_every=4)
    monkeypatch.setattr(filtered, "rounding_digest", lambda: "another")
    with pytest.raises(BadInputError, match=r"how steps are computed .* is not what the run"):
        run(tmp_path, checkpoint_every=4)


@pytest.mark.slow
def test_what_users_spent_in_steps_that_a_kill_lost_is_told_too(tmp_path, monkeypatch):
    """Their bounds in those steps are lost, so that each is told as one at the clip norm."""
    monkeypatch.setattr(driver, "NOTED_EVERY_S", 0.0)

    def shares(name, ends):
        def on_step(row):
            if row["step"] in ends:
                ends.pop(row["step"])()

        hooks = Hooks(on_step=on_step)
        result = run(tmp_path / name, checkpoint_every=20, hooks=hooks)
        with (tmp_path / name / SPENT).open(newline="") as file:
            rows = {row["user"]: float(row["share_of_budget"]) for row in csv.DictReader(file)}
        return result.steps, np.array([rows[user] for user in sorted(rows)])

    def dies():
        raise DiedError

    def stops():
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(DiedError):
        shares("killed", {3: dies})
    steps, told = shares("killed", {1: stops})
    assert steps == 2
    before = shares("whole", {1: stops})[1]
    np.testing.assert_allclose(told, np.minimum(before + 1 / 4, 1.0))  # one of least_steps


@pytest.mark.slow
def test_on_eight_devices_the_same_users_take_part(tmp_path):
    from dpfl_jax.mesh import data_parallel_mesh

    found = []
    for devices in (1, 8):
        mesh = data_parallel_mesh(jax.devices()[:devices])
        result = run(tmp_path / f"on{devices}", mesh=mesh, key=RootKey.from_seed(0))
        found.append((result, (tmp_path / f"on{devices}" / SPENT).read_text()))
    assert found[0][1] == found[1][1]
    units = [[r["outside_guarantee"]["units"] for r in result.metrics] for result, _ in found]
    assert units[0] == units[1]
    np.testing.assert_allclose(found[0][0].params["w"], found[1][0].params["w"], rtol=1e-4)


@pytest.mark.nightly
def test_who_is_learnt_soon_stays_for_five_times_as_long(tmp_path):
    """At one epsilon and clip norm: docs/guides/individual.md has these numbers."""
    rng, users, rate, target = np.random.default_rng(0), 400, 0.25, {"epsilon": 2.0, "delta": 1e-4}
    truth = rng.normal(size=8)
    rows = {}
    for u in range(users):  # one in five is labelled by coins
        x = rng.normal(size=(4, 8))
        label = x @ truth > 0 if u % 5 else rng.random(4) < 0.5
        rows[f"u{u:03d}"] = {"x": np.float32(x), "label": np.float32(label)}
    data = ArrayStore.from_users(rows.items())

    def logistic(params, example):
        score = example["x"] @ params["w"]
        return jnp.logaddexp(0.0, score) - example["label"] * score

    def loss(result):
        own = [r for u, r in enumerate(rows.values()) if u % 5]
        each = jax.vmap(jax.vmap(logistic, (None, 0)), (None, 0))
        return float(each(result.params, jax.tree.map(lambda *x: np.stack(x), *own)).mean())

    given = {"loss_fn": logistic, "params": {"w": jnp.zeros(8)}, "data": data, **target}
    fields = {"group_size": 4, "cohort_size": rate * users}
    key = RootKey.from_seed(0)
    longer = individual(**fields, least_steps=20, refresh=10)
    filtered = fit(mechanism=longer, steps=120, optimizer=optax.sgd(3.0), key=key,
                   run_dir=tmp_path / "run", **given)  # fmt: skip
    sigma = filtered.guarantee.noise_multiplier
    allowed = accounting.calibrate_steps(
        lambda steps: accounting.events.uls(sigma, rate, steps), *target.values()
    )
    assert allowed == 25
    with (tmp_path / "run" / SPENT).open(newline="") as file:
        shares = np.array([float(row["share_of_budget"]) for row in csv.DictReader(file)])
    assert (shares < 0.98).mean() > 0.6
    plain = fit(mechanism=uls(**fields), steps=60, optimizer=optax.sgd(3.0), key=key, **given)
    assert filtered.guarantee.epsilon <= 2.0
    assert plain.guarantee.epsilon <= 2.0
    assert loss(filtered) < 0.75 * loss(plain)
