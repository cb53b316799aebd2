"""A silo's message: sampling, sensitivity under replace-one, keys, independence of others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from isrl_zoo import logistic, quadratic, silos
from scipy import stats

from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl import (
    MessageSpec,
    make_oracle,
    make_schedule,
    message,
)
from dpfl_jax.federation.isrl.message import make_message
from dpfl_jax.noise import GaussianNoise, Noise
from dpfl_jax.randomness import RootKey
from reproductions.isrl import _baselines as baselines
from reproductions.isrl._baselines import make_central_oracle

KEY = RootKey.from_seed(3)


def send(spec, examples, w, batch, clip, keys, stddev=0.0, turn=0, rank=None):
    n = examples["x"].shape[0]
    message = make_message(logistic, spec)
    return message(
        w,
        examples,
        jnp.asarray(n),
        jnp.arange(n) if rank is None else rank,
        jnp.asarray(turn),
        jnp.asarray(float(batch)),
        jnp.asarray(clip),
        jnp.asarray(stddev),
        jnp.asarray(keys, jnp.uint32),
    )


@pytest.mark.parametrize("sampling", ["poisson", "full", "disjoint"])
def test_replacing_a_record_moves_the_message_by_at_most_2c_over_k(sampling):
    """Brute force over records, values and keys; gradients are made as far apart as can be."""
    rng = np.random.default_rng(0)
    n, dim, batch, clip = 6, 3, 3, 0.7
    batch = n if sampling == "full" else batch
    spec = MessageSpec(sampling)
    send_now = jax.jit(lambda e, w, keys: send(spec, e, w, batch, clip, keys))
    worst = 0.0
    for trial, j in itertools.product(range(8), range(n)):
        x = rng.normal(size=(n, dim)) * 10.0 ** rng.uniform(-1, 3)
        y = rng.integers(0, 2, n).astype(float)
        other_x, other_y = x.copy(), y.copy()
        if trial % 2:  # the opposite gradient
            other_x[j] = -x[j]
        else:
            other_x[j], other_y[j] = rng.normal(size=dim) * 100, 1 - y[j]
        w = rng.normal(size=dim) * 1e-4
        keys = rng.integers(0, 2**32, (2, 8))
        a = send_now({"x": jnp.asarray(x), "y": jnp.asarray(y)}, w, keys)
        b = send_now({"x": jnp.asarray(other_x), "y": jnp.asarray(other_y)}, w, keys)
        worst = max(worst, float(jnp.linalg.norm(a - b)))
    assert worst <= 2 * clip / batch * (1 + 1e-4)
    assert worst > 1.5 * clip / batch  # the bound is reached, so that the test can fail


def test_poisson_takes_each_record_with_probability_k_over_n():
    """Chi-square over records, false-alarm rate 1e-3; the mean over draws is the full gradient."""
    n, batch, draws = 12, 4, 4000
    data = silos([n])
    examples = jax.tree.map(lambda x: x[0], data.examples)
    keys = np.random.default_rng(5).integers(0, 2**32, (draws, 2, 8), dtype=np.uint32)
    w = jnp.asarray([0.3, -0.2, 0.1])
    spec = MessageSpec("poisson")
    sent = jax.jit(jax.vmap(lambda k: send(spec, examples, w, batch, 1e9, k)))(jnp.asarray(keys))
    gradients = jax.vmap(jax.grad(logistic), in_axes=(None, 0))(w, examples)
    full = np.asarray(gradients).mean(0)
    error = np.asarray(sent).mean(0) - full
    scale = np.asarray(sent).std(0) / np.sqrt(draws)
    assert np.all(np.abs(error) < 4.5 * scale)
    # Inclusion of each record, from messages of one-hot gradients.
    eye = jnp.eye(n)

    def linear(w, example):
        return w @ example["x"]

    message = make_message(linear, spec)
    taken = jax.jit(
        jax.vmap(
            lambda k: message(
                jnp.zeros(n),
                {"x": eye},
                jnp.asarray(n),
                jnp.arange(n),
                jnp.asarray(0),
                jnp.asarray(float(batch)),
                jnp.asarray(10.0),
                jnp.asarray(0.0),
                k,
            )
        )
    )(jnp.asarray(keys))
    counts = (np.asarray(taken) * batch).round().sum(0)
    p = batch / n
    square = ((counts - draws * p) ** 2 / (draws * p * (1 - p))).sum()
    assert stats.chi2.sf(square, n) > 1e-3
    # Pairs are independent: the correlation of any two records is small.
    joint = np.corrcoef((np.asarray(taken) * batch).round().T)
    assert np.abs(joint - np.eye(n)).max() < 4.5 / np.sqrt(draws)


@pytest.mark.slow
def test_one_pass_uses_every_record_at_most_once():
    sizes, batch, rounds = np.array([10, 7, 3]), np.array([3, 3, 4]), 9
    schedule = make_schedule(KEY, rounds, sizes, available=2, one_pass_batch=batch)
    n = int(sizes.max())

    def linear(w, example):
        return w @ example["x"]

    message = make_message(linear, MessageSpec("disjoint"))
    used = np.zeros((3, n))
    for r in range(rounds):
        for i in range(3):
            if not bool(schedule.present[r, i]):
                continue
            taken = message(
                jnp.zeros(n),
                {"x": jnp.eye(n)},
                jnp.asarray(sizes[i]),
                schedule.rank[i],
                schedule.turn[r, i],
                jnp.asarray(float(batch[i])),
                jnp.asarray(10.0),
                jnp.asarray(0.0),
                schedule.keys[r, i],
            )
            used[i] += np.asarray(taken) * batch[i]
            assert round(float(taken.sum() * batch[i])) == batch[i]
    assert used.max() <= 1 + 1e-5
    assert used[0].sum() >= 9 - 1e-4  # all that fits was used
    assert used[2].sum() == 0  # three records are no batch of four
    assert np.all(used[np.arange(n) >= sizes[:, None]] == 0)


@pytest.mark.slow
def test_keys_are_distinct_and_messages_depend_on_nobody_else():
    schedule = make_schedule(KEY, 20, np.array([5, 5, 4]))
    keys = np.asarray(schedule.keys).reshape(-1, 8)
    assert len(np.unique(keys, axis=0)) == len(keys) == 20 * 3 * 2
    data, w = silos([5, 5, 4]), jnp.ones(3)
    options = {"batch": jnp.full(3, 2.0), "clip_norm": 1.0, "stddev": jnp.ones(3)}
    spec = MessageSpec("poisson")
    alone = {k: v[0] for k, v in schedule.rows().items()}
    alone["present"] = jnp.asarray([True, False, False])
    first = make_oracle(quadratic, spec, data, **options)(w, alone)
    changed = jax.tree.map(lambda x: x.at[1:].add(7.0), data.examples)
    second = make_oracle(quadratic, spec, type(data)(changed, data.sizes), **options)(w, alone)
    np.testing.assert_array_equal(first, second)
    # The same schedule again is the same run; nobody present is a zero gradient.
    again = make_schedule(KEY, 20, np.array([5, 5, 4]))
    np.testing.assert_array_equal(again.keys, schedule.keys)
    alone["present"] = jnp.zeros(3, bool)
    np.testing.assert_array_equal(make_oracle(quadratic, spec, data, **options)(w, alone), 0 * w)


def test_one_row_asked_at_two_points_has_two_noises():
    """Else the difference of both would be that of two clipped sums."""
    data = silos([4, 4], dim=50)
    row = {k: v[0] for k, v in make_schedule(KEY, 1, np.array([4, 4])).rows().items()}
    options = {"batch": jnp.full(2, 4.0), "clip_norm": 1e-6}
    spec, points = MessageSpec("full"), (jnp.zeros(50), jnp.ones(50))
    oracle = make_oracle(quadratic, spec, data, stddev=jnp.full(2, 4.0), **options)
    central = make_central_oracle(quadratic, spec, data, noise_multiplier=1e6, **options)
    for draw in (oracle, central):
        first, second, again = (np.asarray(draw(w, row)) for w in (*points, points[0]))
        np.testing.assert_array_equal(first, again)
        assert np.std(first - second) > 0.5 * np.std(first)


@pytest.mark.nightly
def test_noise_has_the_stated_variance():
    """Chi-square test of 6,000 normals, false-alarm rate 1e-3; and silos are independent."""
    data = silos([4, 4], dim=3000)
    schedule = make_schedule(RootKey.from_seed(8), 1, np.array([4, 4]))
    row = {k: v[0] for k, v in schedule.rows().items()}
    found = []
    for who in ([True, False], [False, True]):
        row["present"] = jnp.asarray(who)
        args = {"batch": jnp.full(2, 4.0), "clip_norm": 1e-6}
        oracle = make_oracle(
            quadratic, MessageSpec("full"), data, stddev=jnp.asarray([6.0, 2.0]), **args
        )
        found.append(np.asarray(oracle(jnp.zeros(3000), row)))
    for sent, stddev in zip(found, (6.0, 2.0)):
        square = np.sum((sent * 4 / stddev) ** 2)
        assert 5e-4 < stats.chi2.cdf(square, 3000) < 1 - 5e-4
    assert abs(np.corrcoef(found)[0, 1]) < 4 / np.sqrt(3000)


@pytest.mark.slow
def test_noise_is_that_of_the_one_implementation(monkeypatch):
    """A silo's, and a trusted server's: its tails are tested there."""
    for module in (message, baselines):  # the keys as they are in the schedule
        monkeypatch.setattr(module, "derived_keys", lambda keys, words: keys)
    data, w = silos([4, 4], dim=7), jnp.zeros(7)
    row = {k: v[0] for k, v in make_schedule(KEY, 1, np.array([4, 4])).rows().items()}
    row["present"] = jnp.asarray([True, False])
    args = {"batch": jnp.full(2, 4.0), "clip_norm": 1e-5}
    for law in ("exact", "float"):
        spec = MessageSpec("full", noise=law)
        oracle = make_oracle(quadratic, spec, data, stddev=jnp.full(2, 6.0), **args)
        drawn = Noise(6.0, 1e-5, law).add(row["keys"][0, 1], w) / 4.0
        np.testing.assert_allclose(oracle(w, row), drawn, atol=1e-5)
    one_key = jax.random.wrap_key_data(row["keys"][0, 1, :2], impl="threefry2x32")
    drawn = GaussianNoise(6.0 / 4.0).sample(one_key, w)
    args["clip_norm"] = 1.0
    data = type(data)(jax.tree.map(jnp.zeros_like, data.examples), data.sizes)
    central = make_central_oracle(
        quadratic, MessageSpec("full"), data, noise_multiplier=6.0, **args
    )
    np.testing.assert_allclose(central(w, row), drawn, rtol=1e-5)


def test_random_availability_follows_its_law():
    """Binomial test, false-alarm rate 1e-3."""
    schedule = make_schedule(KEY, 2000, np.full(5, 3), available={1: 0.25, 4: 0.75})
    counts = np.asarray(schedule.present).sum(axis=1)
    assert set(counts) == {1, 4}
    assert stats.binomtest(int((counts == 4).sum()), 2000, 0.75).pvalue > 1e-3
    assert stats.binomtest(int(schedule.present[:, 2].sum()), 2000, 3.25 / 5).pvalue > 1e-3
    capped = make_schedule(KEY, 50, np.full(5, 3), available=4, most_rounds=10)
    assert np.asarray(capped.present).sum(axis=0).max() <= 10
    for law in (6, 0, {2: 0.5}, {9: 1.0}):
        with pytest.raises(BadInputError):
            make_schedule(KEY, 5, np.full(5, 3), available=law)


@pytest.mark.nightly
def test_unequal_silos_and_weights_equal_a_loop():
    sizes = [6, 1, 4]
    data, w = silos(sizes), jnp.asarray([0.5, 0.1, -1.0])
    schedule = make_schedule(KEY, 1, np.array(sizes))
    row = {k: v[0] for k, v in schedule.rows().items()}
    p = jnp.asarray([0.5, 0.2, 0.3])
    oracle = make_oracle(
        logistic,
        MessageSpec("full"),
        data,
        batch=jnp.asarray([6.0, 1.0, 4.0]),
        clip_norm=jnp.asarray([0.5, 5.0, 1.0]),
        stddev=jnp.zeros(3),
        silo_weights=p,
    )
    want = 0.0
    for i, (size, clip) in enumerate(zip(sizes, (0.5, 5.0, 1.0))):
        part = jax.tree.map(lambda x, i=i, n=size: x[i, :n], data.examples)
        g = jax.vmap(jax.grad(logistic), in_axes=(None, 0))(w, part)
        norms = jnp.linalg.norm(g, axis=1, keepdims=True)
        want += p[i] * (g * jnp.minimum(1, clip / norms)).mean(0)
    np.testing.assert_allclose(oracle(w, row), want, rtol=1e-5)
