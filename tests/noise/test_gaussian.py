"""The noise has the stated law, whatever the devices. False-alarm rates 1e-6, fixed seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from scipy import stats

from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.noise import GaussianNoise, Noise, gaussian
from dpfl_jax.randomness import RootKey

KEY = RootKey.from_seed(11)
LIKE = {"a": jnp.zeros((200, 100)), "b": jnp.zeros((30_000,), jnp.bfloat16)}


def test_mean_variance_and_shape_are_gaussian():
    sample = GaussianNoise(3.0).sample(KEY.jax("noise", 0), LIKE)
    values = np.concatenate([np.ravel(x) for x in jax.tree.leaves(sample)]).astype(np.float64)
    n = len(values)
    assert abs(values.mean()) < 3.0 * stats.norm.isf(5e-7) / np.sqrt(n)
    chi2 = (values**2).sum() / 9.0
    assert stats.chi2.sf(chi2, n) > 5e-7
    assert stats.chi2.cdf(chi2, n) > 5e-7
    assert stats.kstest(values / 3.0, "norm").pvalue > 1e-6
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(sample))


def test_leaves_steps_and_keys_are_independent():
    like = {"a": jnp.zeros(20_000), "b": jnp.zeros(20_000)}
    samples = [GaussianNoise(1.0).sample(KEY.jax("noise", t), like) for t in range(3)]
    columns = np.stack([s[k] for s in samples for k in ("a", "b")])
    correlation = np.corrcoef(columns)[np.triu_indices(6, 1)]
    assert np.abs(correlation).max() < stats.norm.isf(1e-6 / 15) / np.sqrt(20_000)


@pytest.mark.slow
def test_the_tail_reaches_beyond_one_float32_draw():
    """One float32 draw stops near 5.4; a sum of two must go on like the normal law."""
    sample = GaussianNoise(1.0).sample(KEY.jax("noise", 0), {"x": jnp.zeros(20_000_000)})["x"]
    beyond = int((jnp.abs(sample) > 4.5).sum())
    expected = 20_000_000 * 2 * stats.norm.sf(4.5)
    assert stats.poisson.sf(beyond, expected) > 1e-6
    assert stats.poisson.cdf(beyond, expected) > 1e-6
    # Both draws at their bit limit: what the construction can reach.
    assert 2 * float(jax.lax.erf_inv(jnp.float32(1 - 2**-23))) > 7.2


def test_small_and_large_arrays_are_drawn_from_the_words_of_jax():
    """A known answer of Random123, and both ways of computing the rounds."""
    key = jnp.array([0x13198A2E, 0x03707344], jnp.uint32)
    shape = (3, 1 << 17)
    got = [np.asarray(x) for x in gaussian.threefry(key, shape)]
    rows, columns = np.indices(shape, np.uint32)
    want = threefry2x32_p.bind(key[0], key[1], jnp.asarray(rows), jnp.asarray(columns))
    np.testing.assert_array_equal(got, want)
    few = [np.asarray(x) for x in gaussian.threefry(key, (3, 5))]
    np.testing.assert_array_equal(few, [x[:, :5] for x in got])
    # Two leading axes: no place is used twice.
    many = np.asarray(gaussian.threefry(key, (7, 11, 13, 5))).reshape(2, -1)
    assert len(np.unique(many, axis=1).T) == 7 * 11 * 13 * 5
    zero = gaussian.threefry(jnp.zeros(2, jnp.uint32), ())
    assert [int(x) for x in zero] == [0x6B200159, 0x99BA4EFE]  # kat_vectors of Random123


@pytest.mark.slow
def test_every_sharding_gives_the_same_numbers():
    mesh = data_parallel_mesh()
    assert mesh.size == 8
    noise, key = GaussianNoise(2.0), KEY.jax("noise", 5)
    like = {"a": jax.ShapeDtypeStruct((64, 32), jnp.float32)}

    def draw(sharding):
        return jax.jit(lambda k: noise.sample(k, like), out_shardings=sharding)(key)["a"]

    whole = draw(NamedSharding(mesh, PartitionSpec()))
    split = draw(NamedSharding(mesh, PartitionSpec("data")))
    single = draw(SingleDeviceSharding(jax.devices()[0]))
    # The same bits are drawn; compilers may round their last digit differently.
    np.testing.assert_allclose(np.asarray(whole), np.asarray(single), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(split), np.asarray(single), rtol=1e-4, atol=1e-5)
    assert len({float(s.data[0, 0]) for s in split.addressable_shards}) == 8


def test_zero_noise_is_exactly_nothing():
    tree, key = {"a": jnp.ones(3)}, jnp.asarray(KEY.words("noise", 0))
    for law in ("exact", "float"):
        assert Noise(0.0, 1.0, law).add(key, tree) is tree
        # A deviation of zero that the device alone knows, as of a silo that is not private.
        noised = jax.jit(lambda s, law=law: Noise(s, 1.0, law).add(key, tree))(jnp.float32(0.0))
        np.testing.assert_array_equal(noised["a"], tree["a"])
        noised = jax.jit(lambda s, law=law: Noise(s, 1.0, law).add(key, tree))(jnp.float32(np.nan))
        assert not np.isfinite(noised["a"]).any()  # never the sum itself


@pytest.mark.parametrize("stddev", [-1.0, float("nan"), float("inf")])
def test_impossible_deviations_are_refused(stddev):
    with pytest.raises(BadInputError, match="standard deviation"):
        GaussianNoise(stddev)
    with pytest.raises(BadInputError, match="standard deviation"):
        Noise(stddev, 1.0).add(jnp.zeros(8, jnp.uint32), {"a": jnp.ones(3)})
