"""Scattering coefficients against what is known of them, and as examples of a data set."""

import numpy as np
import pytest

from dpfl_jax.data import DataConfig, SourceConfig, load_dataset, load_examples, scattering
from dpfl_jax.data.features import with_features
from dpfl_jax.data.owners import store_from_users
from dpfl_jax.errors import BadInputError
from dpfl_jax.task import Task

RNG = np.random.default_rng(0)


def images(count, size=28):
    return RNG.random((count, size, size)).astype("f4")


def test_coefficients_are_those_of_kymatio():
    """Kymatio 0.3.0, which cuts off the highest frequencies before it subsamples."""
    i, j = np.mgrid[:28, :28]
    image = np.sin(0.3 * i) * np.cos(0.5 * j) + (i * j % 7) / 7
    found = scattering(image[None].astype("f4"))
    assert found.shape == (1, 7, 7, 81)
    kymatio = {0: 0.547568, 1: 0.089944, 8: 0.102742, 9: 0.11707, 17: 0.015801, 80: 0.023838}
    for channel, value in kymatio.items():
        np.testing.assert_allclose(found[0, 3, 2, channel], value, atol=3e-4)


def test_what_is_constant_has_no_coefficients_but_its_average():
    found = scattering(np.full((1, 28, 28), 0.7, "f4"))
    np.testing.assert_allclose(found[..., 0], 0.7, rtol=1e-5)
    assert np.abs(found[..., 1:]).max() < 1e-6


def test_a_shift_by_four_pixels_is_one_by_a_place():
    image = np.zeros((1, 28, 28), "f4")
    image[0, 8:16, 9:15] = RNG.random((8, 6))
    before, after = scattering(np.concatenate([image, np.roll(image, (4, -4), (1, 2))]))
    np.testing.assert_allclose(before[:-1, 1:], after[1:, :-1], atol=1e-6)
    assert before.max() > 0.1


def test_directions_turn_with_the_image():
    image = images(1)
    there, turned = scattering(image)[0], scattering(image.transpose(0, 2, 1))[0]
    mirror = np.array([2, 1, 0, 7, 6, 5, 4, 3])  # of angles, at the diagonal
    second = 17 + (8 * mirror[:, None] + mirror).ravel()
    channels = np.concatenate([[0], 1 + mirror, 9 + mirror, second])
    np.testing.assert_allclose(there.transpose(1, 0, 2)[..., channels], turned, atol=1e-5)


def test_images_come_no_further_apart():
    """There is one coefficient for sixteen pixels."""
    x, y = images(16), images(16)
    apart = 16 * np.square(scattering(x) - scattering(y)).sum((1, 2, 3))
    room = ((0, 0), (4, 4), (4, 4))
    there = np.square(np.pad(x, room, mode="reflect") - np.pad(y, room, mode="reflect"))
    assert (apart <= there.sum((1, 2))).all()


@pytest.mark.parametrize(
    ("shape", "scales", "angles", "out"),
    [
        ((9, 14), 1, 6, (5, 7, 7)),
        ((32, 32, 3), 2, 8, (8, 8, 243)),
        ((20, 17), 3, 4, (3, 3, 61)),
    ],
)
def test_shapes(shape, scales, angles, out):
    x = RNG.random((2, *shape)).astype("f4")
    found = scattering(x, scales=scales, angles=angles)
    assert found.shape == (2, *out)
    assert found.dtype == np.float32
    if len(shape) == 3:  # colours one by one
        np.testing.assert_allclose(found[..., 81:162], scattering(x[..., 1]), atol=1e-6)
    assert scattering(x[:0], scales=scales, angles=angles).shape == (0, *out)


@pytest.mark.parametrize("shape", [(3, 28), (3, 28, 4), (2, 3, 8, 8, 1)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(BadInputError, match=r"scattering takes images .* more than 4 x 4 pixels"):
        scattering(np.zeros(shape, "f4"))


def test_features_of_a_data_set():
    config = DataConfig(source="digits", features="scattering", validation_fraction=0.2)
    data = load_dataset(config)
    assert data.task.input_shape == (2, 2, 81)
    assert data.train.task == data.task
    plain = load_dataset(DataConfig(source="digits", validation_fraction=0.2))
    assert data.rules == plain.rules
    assert data.train.user_ids(range(50)) == plain.train.user_ids(range(50))
    some = np.arange(50)
    x, images = data.train.read(some)["x"], plain.train.read(some)["x"]
    np.testing.assert_array_equal(data.train.read(some)["label"], plain.train.read(some)["label"])
    groups = x.reshape(50, 4, 27, 3)
    np.testing.assert_allclose(groups.mean((1, 3)), 0, atol=1e-5)
    assert groups.var((1, 3)).max() <= 1.0001
    raw = scattering(images).reshape(50, 4, 27, 3)
    size = np.sqrt(raw.var((1, 3), keepdims=True) + 1e-5)
    wanted = (raw - raw.mean((1, 3), keepdims=True)) / size
    np.testing.assert_allclose(groups, wanted, atol=1e-4)


def test_an_example_is_a_function_of_its_own_image():
    """Without a person, and with other data of theirs, all others have the same features."""
    people = {f"u{u}": {"x": images(2, 8), "label": np.zeros(2, "i4")} for u in range(6)}
    task = Task("classes", (8, 8), 10)

    def features(of):
        store, _ = with_features(store_from_users(of.items()), task)
        x = store.read(np.arange(store.num_examples))["x"]
        ids = store.user_ids(range(store.num_users))
        return dict(zip(ids, np.split(x, store.user_offsets[1:-1]), strict=True))

    whole = features(people)
    without = features({name: arrays for name, arrays in people.items() if name != "u3"})
    changed = features({**people, "u3": {"x": 5 * images(1, 8), "label": np.zeros(1, "i4")}})
    for name in without:
        np.testing.assert_array_equal(without[name], whole[name])
        np.testing.assert_array_equal(changed[name], whole[name])


def test_records_of_several_owners_keep_them():
    sets = {name: {"x": images(1, 8), "label": np.zeros(1, "i4")} for name in ("a\x1fb", "b")}
    shared, task = with_features(store_from_users(sets.items()), Task("classes", (8, 8), 10))
    assert shared.most_owners == 2
    assert shared.sets.read(np.arange(2))["x"].shape == (2, *task.input_shape)


@pytest.mark.parametrize("source", ["breast_cancer", "shakespeare"])
def test_only_images_have_features(source):
    with pytest.raises(BadInputError, match=r"data\.features=scattering is for images"):
        load_examples(SourceConfig(source=source, features="scattering"))
