"""Noise that is drawn again from its keys: what it is, what it hides, and that nothing is kept."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from neighbours import people
from noising import KEY, inverse_banded_matrix, released
from runs import went_on_bit_for_bit

from dpfl_jax import mechanisms
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import inverse_bound, inverse_strategy
from dpfl_jax.mechanisms import Population
from dpfl_jax.mesh import make_mesh, parameter_shardings
from dpfl_jax.noise import Noise, banded_inverse, chacha, exact, redrawn, redrawn_rows
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory

TAKEN, STEPS = (0.5, 0.25, 0.125), 8
STDDEV = 2.0


def keys_of(step, bands=4):
    """As a plan's."""
    words = [KEY.words("noise", max(step - i, 0)) for i in range(bands)]
    return np.concatenate([*words, np.uint32([step, 7, 9])])


def rows_of(transform, sums, params, keys=keys_of):
    """What is released of the sums of each step."""
    state, update, rows = transform.init(params), jax.jit(transform.update), []
    for step, total in enumerate(sums):
        row, state = update(total, state, noise_key=keys(step))
        rows.append(np.asarray(row["w"]))
    assert set(state.memory) == {"run"}
    assert int(state.step) == len(sums)
    return np.stack(rows)


def sums_of(shape, steps=STEPS):
    rng = np.random.default_rng(0)
    return [{"w": jnp.float32(rng.normal(size=shape))} for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("law", ["exact", "float"])
def test_it_equals_noise_that_is_kept_to_the_rounding_of_that(law):
    """What is kept is rounded to float32 at every step, next to its own size (at most 2^4 here)."""
    sums, params = sums_of((40, 3)), {"w": jnp.zeros((40, 3))}
    noise = Noise(STDDEV, 1.0, law, rows=4 * STEPS)
    again = rows_of(redrawn(noise, TAKEN, 4.0), sums, params)
    kept, _ = released(banded_inverse(noise, TAKEN, 4.0), sums, params)
    kept = np.stack([np.asarray(row["w"]) for row in kept])
    assert np.abs(again).max() > 1
    np.testing.assert_allclose(again, kept, atol=2 * 2.0**-24 * 2**4)


def integers_of(words):
    high, low = (np.asarray(w, np.uint64) for w in words)
    return ((high << np.uint64(32)) | low).astype(np.int64).astype(object)


@pytest.mark.slow
def test_bits_are_those_of_python_s_integers():
    """Of 500 coordinates, with sums far larger than noise, too; parts up to all of it."""
    places = [jnp.arange(500, dtype=jnp.uint32)] + [jnp.zeros(500, jnp.uint32)] * 3
    keys = jnp.stack([jnp.asarray(KEY.words("noise", step)) for step in range(4)])
    scale, rng = jnp.float32(3e11), np.random.default_rng(0)
    noised = jax.jit(exact.noised_integers)
    drawn = jax.jit(lambda key: exact.draw(chacha.block(key, places)))
    z = [integers_of(drawn(key)) for key in keys]
    assert max(np.abs(z[0])) > 2**40
    for parts in ((1 << 15, 1 << 14, 1 << 13), (65_536, 0, 0), (1, 65_000, 7), (0, 0, 0)):
        for size in (0.0, 1.0, 1e6):
            x = jnp.float32(size * rng.normal(size=500))
            back = sum(p * one for p, one in zip(parts, z[1:], strict=True))
            wanted = integers_of(exact.integers(x, scale)) + z[0] - [b >> 16 for b in back]
            earlier = (keys[1:], jnp.asarray(parts, jnp.uint32))
            found = noised(keys[0], x, places, scale, None, earlier)
            np.testing.assert_array_equal(integers_of(found), wanted)


@pytest.mark.parametrize("taken", [TAKEN, (0.3125, 0.65625), (0.99609375,)])
def test_a_neighbour_releases_the_same_by_noise_that_is_no_further_off_than_accounted(taken):
    """The proof, in numbers: of all whole numbers that are released there is one such noise.

    Sums of a neighbour differ in every third step; its noise differs by C times that, and for what
    is rounded down at every step and coordinate by what ``redrawn_rows`` pays for.
    """
    steps, size, rng = 40, 30, np.random.default_rng(1)
    parts = [round(f * 2**16) for f in taken]
    z = rng.integers(-(2**43), 2**43, size=(steps, size)).astype(object)
    g = rng.integers(-(2**20), 2**20, size=(steps, size)).astype(object)
    other = g + np.where(np.arange(steps)[:, None] % 3 == 0, rng.integers(-50, 50, size), 0)

    def back(noise, t):
        return sum(p * noise[t - i] for i, p in enumerate(parts, 1) if i <= t) // 2**16

    x = [g[t] + z[t] - back(z, t) for t in range(steps)]
    own = []
    for t in range(steps):
        own.append(x[t] - other[t] + back(own, t))
    moved = np.array(np.stack(own) - z, float)
    wanted = inverse_banded_matrix(taken, steps) @ np.array(g - other, float)
    spare = math.sqrt(redrawn_rows(inverse_bound(taken, steps)) * size)
    assert np.linalg.norm(moved - wanted) <= spare / 2  # the other half is for cutting off sums
    assert np.linalg.norm(moved - wanted) > 0


@pytest.mark.slow
def test_eight_devices_release_what_one_does():
    mesh, shape = make_mesh(data=1, fsdp=4, tensor=2), (64, 600)
    sums = [{"mlp": {"up": {"kernel": s["w"]}}} for s in sums_of(shape, 4)]
    places = parameter_shardings(sums[0], mesh)
    assert not places["mlp"]["up"]["kernel"].is_fully_replicated
    transform = redrawn(Noise(STDDEV, 1.0, rows=32), TAKEN, 1.0)
    found = []
    for place in (lambda tree: tree, lambda tree: jax.device_put(tree, places)):
        state, update = transform.init(sums[0]), jax.jit(transform.update)
        for step, total in enumerate(sums):
            row, state = update(place(total), state, noise_key=keys_of(step))
        found.append(np.asarray(row["mlp"]["up"]["kernel"]))
    np.testing.assert_array_equal(*found)


def loss_fn(params, example):
    return jnp.sum(params["w"] * example["x"]) + 0.5 * jnp.sum(params["w"] ** 2)


def run(**given):
    mechanism = mechanisms.banded_inverse(
        group_size=2, cohort_size=20, bands=3, **given.pop("fields")
    )
    return fit(
        loss_fn=loss_fn, params={"w": jnp.zeros(4)}, data=people(60), mechanism=mechanism,
        optimizer=optax.adam(0.1), steps=8, epsilon=4.0, delta=1e-3, microbatch_size=8, **given,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_is_that_of_kept_noise_and_costs_the_same():
    """But checkpoints are no secret."""
    taken = (0.5, 0.25)
    runs = [
        run(fields={"fractions": taken, "redrawn": again}, key=RootKey.from_seed(0))
        for again in (False, True)
    ]
    np.testing.assert_allclose(runs[0].params["w"], runs[1].params["w"], atol=1e-4)
    kept, again = (made.guarantee for made in runs)
    assert kept.epsilon == again.epsilon
    left = set(kept.assumptions) - set(again.assumptions)
    assert [told.partition(":")[0] for told in left] == [
        "checkpoints are as secret as the root key"
    ]
    assert set(again.assumptions) < set(kept.assumptions)


@pytest.mark.slow
def test_a_run_that_died_draws_noise_again_bit_for_bit(tmp_path, monkeypatch):
    def start(name):
        directory = RunDirectory(tmp_path / name, {}, RootKey.from_seed(0))
        try:
            return run(fields={"redrawn": True}, run_dir=directory, checkpoint_every=3)
        finally:
            directory.close()

    _, state = went_on_bit_for_bit(tmp_path, monkeypatch, start)
    assert set(state["noise"]) == {"run"}


def test_bands_are_multiples_that_are_drawn_and_accounted():
    population = Population(1000, 2000, 1000)
    made = mechanisms.banded_inverse(group_size=1, cohort_size=20, bands=4, redrawn=True)
    chosen = made.calibrate(population, 200, epsilon=4.0, delta=1e-5).mechanism
    best = inverse_strategy(4, 200, 50)
    assert all(f * 2**16 == int(f * 2**16) for f in chosen.noise.fractions)
    np.testing.assert_allclose(chosen.noise.fractions, best, atol=2.0**-16)
    assert (np.array(chosen.noise.fractions) <= best).all()
    assert chosen.noise.keys_per_step == 4
    with pytest.raises(BadInputError, match="all from 0 to 1"):
        mechanisms.banded_inverse(
            group_size=1, cohort_size=2, redrawn=True, fractions=(0.5, math.nan)
        )


def test_bands_that_never_forget_and_much_noise_are_one_sentence():
    made = mechanisms.banded_inverse(
        group_size=1, cohort_size=20, bands=2, fractions=(1.0,), horizon=10_000, redrawn=True,

    )  # fmt: skip
    people = Population(1000, 2000, 1000)
    with pytest.raises(
        BadInputError, match=r"fractions adds up to 1\): leave mechanism.redrawn out"
    ):
        made.calibrate(people, 9, noise_multiplier=100.0).noise_transform()
