"""Federated rounds: updates of devices are bounded; noise and turns are those of central steps."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from fitting import fit_given as fit
from neighbours import people, removed
from noising import banded_matrix, buffered_matrix
from runs import went_on_bit_for_bit
from scipy import stats

from dpfl_jax.cli.main import main
from dpfl_jax.config.schema import AuditConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import buffered_column
from dpfl_jax.mechanisms import Population, allocation, bandmf, blt, truncated, uls
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.pipeline import WITHOUT_PRIVACY

GROUP, CLIP = 5, 0.4
STEPS = {"user_learning_rate": 0.3, "user_batch_size": 2, "user_epochs": 2}
BUFFERS = {"decays": (0.75, 0.25), "scales": (0.5, 0.125)}
COLUMN = (0.75, 0.5, 0.4375)
KINDS = {
    "uls": (uls, {}),
    "blt": (blt, BUFFERS),
    "bandmf": (bandmf, {"bands": 3, "column": COLUMN}),
    "allocation": (allocation, {}),
    "truncated": (truncated, {"cap": 40}),
}


def loss_fn(params, example):
    return (jnp.tanh(params["w"] @ example["x"]) - example["y"]) ** 2 + params["b"] * example["y"]


def device(**fields):
    given = {"group_size": GROUP, "cohort_size": 3, "clip_norm": CLIP}
    return uls(**given | fields)


def units_of(users=6, seed=0):
    """Devices with 5, 4, 3, 2, 1 and no examples."""
    rng = np.random.default_rng(seed)
    return {
        "examples": {
            "x": rng.normal(size=(users, GROUP, 3)).astype("f4"),
            "y": rng.normal(size=(users, GROUP)).astype("f4"),
        },
        "mask": np.arange(GROUP) < (GROUP - np.arange(users) % (GROUP + 1))[:, None],
    }


def params_of(seed=1):
    rng = np.random.default_rng(seed)
    return {"w": jnp.float32(rng.normal(size=3)), "b": jnp.float32(0.3)}


@jax.jit
def slope_of(params, examples, real):
    return jax.grad(lambda p: jax.vmap(loss_fn, (None, 0))(p, examples) @ real / real.sum())(params)


def update_by_hand(params, user, rate, batch, epochs):
    """What a device gives, step by step, with a gradient of each batch's plain mean."""
    now, there = params, user["mask"].astype("f4")
    for _ in range(epochs):
        for first in range(0, GROUP, batch):
            real = there * ((np.arange(GROUP) >= first) & (np.arange(GROUP) < first + batch))
            if not real.any():
                continue
            slope = slope_of(now, user["examples"], real)
            now = jax.tree.map(lambda p, g: p - rate * g, now, slope)
    return jax.tree.map(jnp.subtract, params, now)


@pytest.mark.parametrize("strategy", ["auto", "vmap"])
def test_a_sum_is_that_of_clipped_updates_by_hand(strategy):
    params, units = params_of(), units_of()
    wanted, norms = jax.tree.map(jnp.zeros_like, params), []
    for u in range(6):
        update = update_by_hand(params, jax.tree.map(lambda x, u=u: x[u], units), 0.3, 2, 2)
        norms.append(float(optax.global_norm(update)))
        weight = min(1.0, CLIP / max(norms[-1], 1e-30))
        wanted = jax.tree.map(lambda a, b, w=weight: a + w * b, wanted, update)
    assert min(norms) == 0.0
    assert sum(n > CLIP for n in norms) in (1, 2, 3, 4, 5)
    found = jax.jit(device(**STEPS).clipped_grad(loss_fn, strategy=strategy))(params, units)
    np.testing.assert_allclose(found.norms, norms, atol=1e-6)
    for name in params:
        np.testing.assert_allclose(found.sum[name], wanted[name], atol=2e-6)


@pytest.mark.slow
def test_one_local_step_at_rate_one_is_uls():
    """Sums, norms and losses, whatever is trained."""
    params, units = params_of(), units_of()
    for trainable in (None, {"w": True, "b": False}):
        plain, local = (
            jax.jit(made.clipped_grad(loss_fn, strategy="vmap", trainable=trainable))(params, units)
            for made in (device(), device(user_learning_rate=1.0))
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, local)
    assert plain.sum["b"] is None
    # And what is frozen stays where it is in all steps of more.
    frozen = jax.jit(device(**STEPS).clipped_grad(loss_fn, trainable={"w": True, "b": False}))
    other = jax.tree.map(lambda p: p, params) | {"b": jnp.float32(-7.0)}
    np.testing.assert_array_equal(frozen(params, units).sum["w"], frozen(other, units).sum["w"])


@pytest.mark.nightly
def test_a_run_of_one_local_step_is_a_run_of_uls():
    """The same draws and noise: parameters to rounding, from plans to the optimiser."""

    def run(**fields):
        made = uls(group_size=2, cohort_size=20, **fields)
        return fit(
            loss_fn=lambda p, e: jnp.sum((p["w"] - e["x"]) ** 2), params={"w": jnp.zeros(4)},
            data=people(60), mechanism=made, optimizer=optax.sgd(0.5), steps=6, epsilon=8.0,
            delta=1e-3, microbatch_size=8, key=RootKey.from_seed(0),
        )  # fmt: skip

    plain, local = run(), run(user_learning_rate=1.0)
    np.testing.assert_allclose(local.params["w"], plain.params["w"], atol=1e-5)
    assert local.guarantee.epsilon == plain.guarantee.epsilon


@pytest.mark.slow
@pytest.mark.nightly("vmap")
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("strategy", ["auto", "vmap"])
def test_a_device_moves_a_round_by_no_more_than_the_clip_norm(devices, strategy):
    """Removed, with other data in its place, on the layout that runs; long updates reach it."""
    mesh = make_mesh(data=devices, devices=jax.devices()[:devices])
    mechanism = device(**STEPS | {"user_learning_rate": 3.0})
    summed = jax.jit(clipped_sum_over_microbatches(mechanism, loss_fn, mesh, strategy=strategy))
    units = jax.tree.map(lambda x: x.reshape(2, 8, *x.shape[1:]), units_of(16))
    mask = np.ones((2, 8), bool)
    reached = 0.0
    for where in ((0, 0), (0, 3), (1, 7)):
        sums = [
            summed(params_of(), some, left, np.int32(2))[0]
            for some, left in ((units, mask), removed(units, mask, where))
        ]
        moved = float(optax.global_norm(jax.tree.map(jnp.subtract, *sums)))
        assert moved <= CLIP * (1 + 1e-5)
        reached = max(reached, moved)
    assert reached > 0.99 * CLIP


def test_a_device_that_fails_adds_nothing():
    """Its update is not finite: the sum is that without it, to the last bit."""
    units, params = units_of(), params_of()
    units["examples"]["x"][1, 0] = np.nan
    summed = jax.jit(device(**STEPS).clipped_grad(loss_fn))
    found = summed(params, units)
    assert found.nonfinite.tolist() == [False, True] + [False] * 4
    without = summed(params, units, mask=np.arange(6) != 1)
    jax.tree.map(np.testing.assert_array_equal, found.sum, without.sum)
    assert np.isfinite(found.sum["w"]).all()


def test_turns_are_kept_whoever_drops_out():
    """200 patterns of dropouts: gaps and counts as accounted, and no row moves further."""
    steps, population = 24, Population(200, 400, 200)
    rng = np.random.default_rng(0)
    made = blt(group_size=2, cohort_size=50, **STEPS).calibrate(
        population, steps, noise_multiplier=1.0
    )
    sampler = made.mechanism.sampler(np.arange(201) * 2, RootKey.from_seed(0))
    taken = np.zeros((200, steps))
    for t in range(steps):
        taken[sampler.draw(t).units, t] = 1.0
    assert set(taken.sum(axis=1)) == {6.0}
    accounted = 1 / made.event().noise_multiplier
    matrix = buffered_matrix(made.mechanism.noise.chosen, steps)
    for present in (taken, taken * (rng.random(taken.shape) < 0.6)):
        assert np.linalg.norm(present @ matrix.T, axis=1).max() <= accounted
        for row in present:
            gaps = np.diff(np.flatnonzero(row))
            assert gaps.min(initial=4) >= 4
            assert (gaps % 4 == 0).all()
    assert np.linalg.norm(taken @ matrix.T, axis=1).max() == pytest.approx(accounted, rel=1e-6)
    # BandMF: never at two turns that its bands reach together.
    made = bandmf(group_size=2, cohort_size=20, bands=4, **STEPS)
    sampler = made.sampler(np.arange(201) * 2, RootKey.from_seed(0))
    drawn = [sampler.draw(t).units for t in range(steps)]
    for t in range(steps):
        near = np.concatenate([drawn[t + i] for i in range(1, 4) if t + i < steps] or [[]])
        assert not set(drawn[t]) & set(near)


@pytest.mark.parametrize("kind", KINDS)
def test_user_update_cost_what_steps_cost(kind):
    """The event is that of gradients, and of BLT one Gaussian: its delta by the closed form."""
    cls, fields = KINDS[kind]
    population = Population(200, 400, 200)
    given = {"group_size": 2, "cohort_size": 20, **fields}
    plain, local = (
        cls(**given, **more).calibrate(population, 30, noise_multiplier=8.0, delta=1e-5)
        for more in ({}, STEPS)
    )
    assert local.event() == plain.event()
    told = local.guarantee()
    assert told.epsilon == plain.guarantee().epsilon
    assert told.trust == "central"
    assert "up to 2 examples (for 2 epochs of local steps in batches of 2, rate 0.3)" in (
        told.sampling
    )
    if kind == "blt":  # Balle and Wang 2018, equation (6)
        column = buffered_column(local.mechanism.noise.chosen, 30)
        mu = np.linalg.norm(column + np.r_[np.zeros(10), column[:20]] + np.r_[
            np.zeros(20), column[:10]
        ]) / 8.0  # fmt: skip
        eps = told.epsilon
        delta = stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(
            -mu / 2 - eps / mu
        )
        assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.slow
@pytest.mark.nightly("bandmf")
@pytest.mark.parametrize("kind", ["blt", "bandmf"])
def test_the_noise_of_rounds_on_eight_devices_is_that_of_its_matrix(kind):
    """What a server on 8 devices adds to nothing: covariances over 40,000 coordinates.

    Of the 21 entries none is more than 5 standard errors off, by luck 1e-5 of the time.
    """
    cls, fields = KINDS[kind]
    steps, size = 6, 40_000
    made = cls(group_size=2, cohort_size=20, clip_norm=0.5, **fields, **STEPS)
    matrix = (
        banded_matrix(COLUMN, steps)
        if kind == "bandmf"
        else buffered_matrix(tuple(BUFFERS.values()), steps)
    )
    plan = made.plan(
        people(60), steps=steps, noise_multiplier=3.0, delta=1e-3, mesh=make_mesh(data=8)
    )
    params = {"w": jnp.zeros((200, 200))}
    grad = plan.clipped_grad(lambda p, e: 0.0 * (jnp.sum(p["w"]) + jnp.sum(e["x"])))
    noise, server = plan.noise(), optax.sgd(1.0)
    state, memory, rows = server.init(params), noise.init(params), []
    update = jax.jit(noise.update)
    for batch in plan.batches(RootKey.from_seed(0)):
        total = grad(params, batch).sum
        assert not np.any(total["w"])
        released, memory = update(total, memory, params, noise_key=batch.noise_key)
        change, state = server.update(released, state)
        params = optax.apply_updates(params, change)
        rows.append(-np.asarray(change["w"]).ravel() * 20)
    x = np.stack(rows)
    inverse = np.linalg.inv(matrix)
    wanted = 1.5**2 * inverse @ inverse.T
    error = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / size)
    assert np.abs((x @ x.T / size - wanted) / error).max() < 5
    white = matrix @ x
    assert np.abs(white @ white.T / size - 1.5**2 * np.eye(steps)).max() < 5 * error.max()


@pytest.mark.slow
@pytest.mark.nightly("bandmf")
@pytest.mark.parametrize("kind", ["blt", "bandmf"])
def test_rounds_that_died_go_on_bit_for_bit(kind, tmp_path, monkeypatch):
    cls, fields = KINDS[kind]

    def start(name):
        directory = RunDirectory(tmp_path / name, {}, RootKey.from_seed(0))
        try:
            return fit(
                loss_fn=lambda p, e: jnp.sum((p["w"] - e["x"]) ** 2),
                params={"w": jnp.zeros(4)}, data=people(60), optimizer=optax.adam(0.1),
                mechanism=cls(group_size=2, cohort_size=20, **fields, **STEPS), steps=8,
                epsilon=4.0, delta=1e-3, microbatch_size=8, run_dir=directory, checkpoint_every=3,
            )  # fmt: skip
        finally:
            directory.close()

    _, state = went_on_bit_for_bit(tmp_path, monkeypatch, start)
    assert np.abs(state["noise"]["released"]["w"]).min() > 0


def write_config(folder):
    """60 people with 4 rows each, in a file; the configuration of rounds over their devices."""
    rng = np.random.default_rng(0)
    rows = [f"p{i // 4:02d},{x[0]:.3f},{x[1]:.3f},{int(x.sum() > 0)}" for i, x in enumerate(
        rng.normal(size=(240, 2))
    )]  # fmt: skip
    (folder / "rows.csv").write_text("\n".join(["person,a,b,sick", *rows]))
    config = {
        "data": {
            "source": "csv", "path": str(folder / "rows.csv"), "user_column": "person",
            "target_column": "sick", "classes": 2, "validation_fraction": 0.2,
            "test_fraction": 0.0, "scale": {"a": [0, 1], "b": [0, 1]},
        },
        "model": {"kind": "logistic"},
        "mechanism": {"kind": "blt", "group_size": 4, "cohort_size": 8, **STEPS},
        "privacy": {
            "epsilon": 8.0, "delta": 1e-4, "ledger": "ledger.jsonl", "account": "people",
            "budget": 9.0,
        },
        "optimizer": {"name": "sgd", "learning_rate": 1.0},
        "train": {"steps": 7, "checkpoint_every": 3},
        "eval": {"baseline": True},
    }  # fmt: skip
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.slow
def test_rounds_from_yaml_are_charged_verified_and_shown_beside_themselves(tmp_path, capsys):
    file, place = write_config(tmp_path), tmp_path / "run"
    assert main(["train", str(file), "--json", "--run-dir", str(place)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    assert "2 epochs of local steps in batches of 2, rate 0.3" in report["privacy"]["sampling"]
    assert report["mechanism"]["user_epochs"] == 2
    assert main(["verify", str(place)]) == 0
    assert (tmp_path / "ledger.jsonl").exists()
    beside = report["baselines"][WITHOUT_PRIVACY]
    assert beside["loss"] < report["eval"]["initial"]["loss"]
    # Another number of epochs is another run.
    assert main(["train", str(file), "mechanism.user_epochs=1", "--run-dir", str(place)]) == 2
    assert main(["train", str(file), "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"user_learning_rate": 0.0}, "user_learning_rate is 0.0, but it must be a number above"),
        ({"user_learning_rate": math.nan}, "user_learning_rate is nan"),
        ({"user_learning_rate": 0.1, "user_epochs": 0}, "user_epochs is 0, but .* at least 1"),
        ({"user_learning_rate": 0.1, "user_batch_size": 0}, "user_batch_size is 0"),
        ({"user_epochs": 2}, "give user_learning_rate, too"),
        ({"user_batch_size": 2}, "give user_learning_rate, too"),
    ],
)
def test_bad_fields_of_user_updates_are_one_sentence(fields, message):
    with pytest.raises(BadInputError, match=message):
        device(**fields)


def test_what_user_updates_do_not_go_with_is_one_sentence():
    made = device(**STEPS)
    with pytest.raises(BadInputError, match="strategy=ghost forms no user's gradient"):
        made.clipped_grad(loss_fn, strategy="ghost")
    with pytest.raises(BadInputError, match=r"set mechanism.user_batch_size, and leave out"):
        made.clipped_grad(loss_fn, examples_at_once=2)
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    with pytest.raises(BadInputError, match=r"use execution.mesh with data alone"):
        clipped_sum_over_microbatches(made, loss_fn, mesh)
    with pytest.raises(BadInputError, match=r"leave out execution.examples_at_once and"):
        clipped_sum_over_microbatches(made, loss_fn, mesh, split_users=True)
    packed = units_of() | {"count": np.full(6, 9)}
    with pytest.raises(BadInputError, match=r"execution.packing .* set it to 0"):
        made.clipped_grad(loss_fn)(params_of(), packed)


def test_canaries_and_silos_elsewhere_are_refused(tmp_path):
    from dpfl_jax.training.canaries import check_fit

    plan = device(**STEPS).plan(people(5), steps=2, noise_multiplier=1.0, delta=1e-3)
    with pytest.raises(BadInputError, match="canaries have designed gradients, but user updates"):
        check_fit(plan.calibrated, people(5), AuditConfig())
    file = write_config(tmp_path)
    assert main(["silo", "init", str(tmp_path / "one"), "--name", "one", "--config", str(file),
                 "--data", "some.csv"]) == 2  # fmt: skip
    assert not (tmp_path / "one").exists()


def test_fields_are_those_of_every_kind_that_samples_users():
    for cls, fields in KINDS.values():
        made = cls(group_size=2, cohort_size=20, **fields, **STEPS)
        assert made.clips_user_updates
        assert made.to_json()["user_learning_rate"] == 0.3
