"""Augmented copies in the loss of an example: what they are, and that they change no guarantee."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from neighbours import removed
from rich.console import Console

import dpfl_jax as dpfl
from dpfl_jax.config import validate_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.federated_run import prepare
from dpfl_jax.mechanisms.plan.batches import example_loss, step_arguments, training_pipeline
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.randomness import RootKey, key_argument
from dpfl_jax.run.pipeline import run_experiment
from dpfl_jax.training import augmented, data_parallel_mesh

RNG = np.random.default_rng(0)
IMAGE = np.arange(30, dtype="f4").reshape(5, 6)
KEYS = jax.random.split(jax.random.key(1), 200)


def dot(params, example):
    return jnp.sum(params * example["x"])


def gradient_of(loss, key):
    """Of ``dot`` it is the image that was looked at, or the mean of copies."""
    return np.asarray(jax.grad(loss)(jnp.zeros(IMAGE.shape), {"x": IMAGE}, rng=key))


@pytest.mark.parametrize("colours", [0, 3])
def test_copies_are_shifted_and_mirrored(colours):
    image = IMAGE if not colours else RNG.random((5, 6, colours)).astype("f4")
    room = np.pad(image, [(1, 1), (1, 1), *[(0, 0)] * (image.ndim - 2)], mode="reflect")
    moved = [room[i : i + 5, j : j + 6] for i in range(3) for j in range(3)]
    possible = {x.tobytes(): 0 for m in moved for x in (m, np.ascontiguousarray(m[:, ::-1]))}
    loss = augmented(dot, copies=1, shift=1, flip=True)
    gradient = jax.vmap(jax.grad(loss), (None, None, 0))
    for copy in np.asarray(jax.jit(gradient)(jnp.zeros(image.shape), {"x": image}, KEYS)):
        possible[copy.tobytes()] += 1
    assert min(possible.values()) > 0
    assert len(possible) == 18


def test_the_loss_is_the_mean_of_copies_and_in_evaluation_that_of_the_image():
    loss = augmented(dot, copies=3, shift=1)
    np.testing.assert_array_equal(gradient_of(loss, None), IMAGE)
    got, room = gradient_of(loss, KEYS[0]), np.pad(IMAGE, 1, mode="reflect")
    moved = [room[i : i + 5, j : j + 6] for i in range(3) for j in range(3)]
    means = (np.mean(three, axis=0) for three in itertools.product(moved, repeat=3))
    assert any(np.allclose(mean, got, atol=1e-4) for mean in means)
    np.testing.assert_array_equal(got, gradient_of(loss, KEYS[0]))
    assert np.any(got != gradient_of(loss, KEYS[1]))


def test_a_loss_with_its_own_key_has_another_for_each_copy():
    def noisy(params, example, *, key=None):
        return dot(params, example) + (0.0 if key is None else jax.random.normal(key))

    loss = augmented(noisy, copies=500, flip=True)
    drawn = float(loss(jnp.zeros((5, 6)), {"x": IMAGE}, rng=KEYS[0]))
    assert 0 < abs(drawn) < 0.3  # a mean of 500 numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": 4}, "changes nothing"),
        ({"copies": 0, "flip": True}, "copies is 0"),
        ({"copies": 1, "shift": -1}, "shift is -1"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(BadInputError, match=message):
        augmented(dot, **options)


def test_only_images_are_moved():
    loss = augmented(dot, copies=2, shift=5)
    with pytest.raises(BadInputError, match=r"more than 5 pixels on a side, .* \[5, 6\]"):
        gradient_of(loss, KEYS[0])


# ---- the guarantee -------------------------------------------------------------------------------

CLIP, KEY = 0.5, RootKey.from_seed(3)
MECHANISMS = {
    "example": dpfl.els(group_size=1, batch_size=6, clip_norm=CLIP),
    "user": dpfl.uls(group_size=3, cohort_size=6, clip_norm=CLIP),
}
COUNTS = RNG.integers(1, 5, 9)
STORE = dpfl.from_arrays(
    {"x": RNG.normal(size=(COUNTS.sum(), 5, 6)).astype("f4")}, users=np.repeat(range(9), COUNTS)
)
PARAMS = {"w": RNG.normal(size=(5, 6)).astype("f4") / 9, "b": np.zeros((), "f4")}


def steep(params, example):
    return jnp.tanh(jnp.sum(params["w"] * example["x"]) + params["b"]) * 20


@pytest.mark.parametrize("strategy", ["vmap", "ghost"])
@pytest.mark.parametrize("unit", MECHANISMS)
def test_a_units_data_move_the_sum_by_the_clip_norm_at_most(unit, strategy):
    """A unit left out, with other data in its place, and one whose data are others."""
    mechanism = MECHANISMS[unit]
    sampler = mechanism.sampler(STORE.user_offsets, KEY)
    mesh = data_parallel_mesh(jax.devices()[:1])
    batch = training_pipeline(sampler, STORE, mesh, 4, loss_key=KEY).build(0)
    loss = example_loss(augmented(steep, copies=4, shift=2, flip=True), STORE)
    summed = jax.jit(clipped_sum_over_microbatches(mechanism, loss, mesh, strategy=strategy))
    (units,), (mask,), (rows,) = step_arguments(mechanism, batch)

    def total(units, mask):
        return jax.tree.leaves(summed(PARAMS, units, mask, rows)[0])

    whole, moved = total(units, mask), []
    for where in np.argwhere(np.asarray(mask))[:4]:
        others, without = removed(units, mask, tuple(where))
        for found, most in ((total(others, without), CLIP), (total(others, mask), 2 * CLIP)):
            apart = np.sqrt(sum(np.square(a - b).sum() for a, b in zip(whole, found, strict=True)))
            assert apart <= most * (1 + 1e-5)
            moved.append(apart / most)
    assert max(moved) > 0.8


def test_both_strategies_agree_on_copies():
    """The copies are within a unit, whose norm is that of their mean."""
    loss = augmented(steep, copies=4, shift=1)
    x, keys = RNG.normal(size=(8, 5, 6)).astype("f4"), KEYS[:8]
    sums = [
        dpfl.clipped_grad(loss, clip_norm=CLIP, strategy=how)(PARAMS, {"x": x}, rng=keys)
        for how in ("vmap", "ghost")
    ]
    np.testing.assert_allclose(sums[0].norms, sums[1].norms, rtol=1e-4)
    np.testing.assert_allclose(sums[0].sum["w"], sums[1].sum["w"], atol=1e-5)
    one = jax.grad(loss)(PARAMS, {"x": x[0]}, rng=keys[0])
    size = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(one)))
    np.testing.assert_allclose(sums[0].norms[0], size, rtol=1e-5)


# ---- by a configuration --------------------------------------------------------------------------

CONFIG = {
    "name": "digits",
    "seed": 0,
    "data": {"source": "digits", "test_fraction": 0.0},
    "mechanism": {"kind": "els", "group_size": 1, "batch_size": 64},
    "privacy": {"epsilon": 3.0, "delta": 1e-4},
    "optimizer": {"name": "sgd", "learning_rate": 1.0},
    "train": {"steps": 2},
}


def trained(directory, **model):
    section = {"kind": "linear", **model}
    config = validate_config({**CONFIG, "model": section})
    report = run_experiment(config, directory, Console(quiet=True))
    return report["eval"]["final"]["loss"]


@pytest.mark.slow
def test_a_configuration_augments_deterministically(tmp_path):
    copies = {"augmentation": {"copies": 2, "shift": 1}}
    one, plain = trained(tmp_path / "one", **copies), trained(tmp_path / "plain")
    assert one == trained(tmp_path / "two", **copies)
    assert one != plain
    assert abs(one - plain) < 0.2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"source": "breast_cancer"}}, "is for images, and these data are"),
        ({"model": {"kind": "transformer"}}, "model.augmentation does not go with"),
        ({"model": {"augmentation": {"copies": 4}}}, "changes nothing"),
    ],
)
def test_what_cannot_be_augmented_is_refused(sections, message, tmp_path):
    raw = {**CONFIG, "model": {"kind": "linear", "augmentation": {"shift": 1}}}
    raw = {name: {**value, **sections.get(name, {})} if isinstance(value, dict) else value
           for name, value in raw.items()}  # fmt: skip
    with pytest.raises(BadInputError, match=message):
        run_experiment(validate_config(raw), tmp_path / "run", Console(quiet=True))


def test_silos_augment_their_records():
    raw = {
        "data": {"source": "digits"},
        "federation": {"silos": 2, "rounds": 1, "local_steps": 1},
        "model": {"kind": "linear", "augmentation": {"copies": 2, "shift": 1}},
        "mechanism": {"kind": "fed_avg", "batch_size": 32},
    }
    run = prepare(validate_config(raw), Console(quiet=True))
    assert key_argument(run.model.loss) == "rng"
    x, weights = RNG.random((8, 8)).astype("f4"), run.model.init(jax.random.key(0))
    example = {"x": x, "label": np.int32(3)}
    assert run.model.loss(weights, example) != run.model.loss(weights, example, rng=KEYS[0])
    assert run.model.predict(weights, x).shape == ()
