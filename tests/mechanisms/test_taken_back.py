"""Noise that later steps take back: what a user adds to rows, what it costs, how a run goes on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from neighbours import people
from noising import banded_matrix, buffered_matrix, inverse_banded_matrix

from benchmarks import audit as bench
from dpfl_jax.accounting import epsilon, events
from dpfl_jax.audit import audit
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Calibrated, Population, banded_inverse, bandmf, blt
from dpfl_jax.mesh import make_mesh
from dpfl_jax.randomness import RootKey

COLUMN = (0.75, 0.5, 0.4375)
DECAYS, SCALES = (0.75, 0.25), (0.5, 0.125)
TAKEN = (0.5, 0.25)
PEOPLE = Population(100, 200, 100)
MADE = {
    "bandmf": (bandmf, {"bands": 3, "column": COLUMN}),
    "blt": (blt, {"decays": DECAYS, "scales": SCALES}),
    "banded_inverse": (banded_inverse, {"fractions": TAKEN}),
}
MATRIX = {
    "bandmf": lambda steps: banded_matrix(COLUMN, steps),
    "blt": lambda steps: buffered_matrix((DECAYS, SCALES), steps),
    "banded_inverse": lambda steps: inverse_banded_matrix(TAKEN, steps),
}
IN_TURNS = ("blt", "banded_inverse")


def made(kind, **fields):
    cls, own = MADE[kind]
    return cls(**{"group_size": 2, "cohort_size": 20} | own | fields)


def loss_fn(params, example):
    return jnp.sum(params["w"] * example["x"]) + 0.5 * jnp.sum(params["w"] ** 2)


@pytest.mark.parametrize("kind", IN_TURNS)
def test_epsilon_midway_is_that_of_the_turns_so_far(kind):
    """Of who takes part first, and of rows that were released: by the matrix itself."""
    mechanism = made(kind, cohort_size=25, horizon=11)
    made_for = Calibrated(mechanism, 3.0, PEOPLE, 11, 1e-5)
    matrix, before = MATRIX[kind](11), 0.0
    for steps in range(1, 12):
        norms = [
            np.linalg.norm(matrix[:steps, first:steps:4].sum(axis=1))
            for first in range(min(4, steps))
        ]
        assert max(norms) == norms[0]
        found = epsilon(made_for.event(steps), 1e-5)
        assert found == pytest.approx(epsilon(events.gaussian(3.0 / norms[0], 1), 1e-5), rel=1e-9)
        assert found > before
        before = found


def rows_of(kind, data, steps, devices):
    """What is noised at each step, [steps, 4]: the library's release without noise, times K."""
    # BandMF draws within the group whose turn it is: here all of it.
    rate = {"sampling_prob": 1.0} if kind == "bandmf" else {"period": 3}
    mechanism = made(kind, **rate, clip_norm=0.5)
    mesh = make_mesh(data=devices, devices=jax.devices()[:devices])
    plan = mechanism.plan(data, steps=steps, noise_multiplier=0.0, delta=1e-5, mesh=mesh)
    params = {"w": jnp.zeros(4)}
    grad, noise = plan.clipped_grad(loss_fn), plan.noise()
    state, released = noise.init(params), []
    for batch in plan.batches(RootKey.from_seed(0)):
        x, state = noise.update(grad(params, batch).sum, state, noise_key=batch.noise_key)
        released.append(np.asarray(x["w"]) * mechanism.participation.divisor)
    return MATRIX[kind](steps) @ np.stack(released)


@pytest.mark.slow
@pytest.mark.nightly("8")
@pytest.mark.parametrize(
    ("kind", "devices"),
    [*((kind, 1) for kind in MADE), ("banded_inverse", 8)],
)
def test_a_user_moves_rows_from_its_first_turn_on_and_no_further_than_accounted(kind, devices):
    """The last user is removed, and has other data: turns of the others are what they were."""
    steps = 8
    without, one, other = (rows_of(kind, people(60, x), steps, devices) for x in (0.0, 3.0, -7.0))
    column = MATRIX[kind](steps)[:, 0]
    # All gradients of this user point one way: it is as bad as it can be, from its turn on.
    turns = [
        sum(np.r_[np.zeros(j), column[: steps - j]] for j in range(i, steps, 3)) for i in (0, 1, 2)
    ]
    for moved in (one - without, other - without):
        norms = np.linalg.norm(moved, axis=1) / 0.5
        first = int(np.argmax(norms > 1e-4))
        assert first in (0, 1, 2)
        np.testing.assert_allclose(norms, turns[first], rtol=1e-4, atol=1e-5)
    if kind != "bandmf":  # of which each turn is accounted for by itself
        stated = (
            made(kind, horizon=steps)
            .calibrate(Population(60, 120, 60), steps, noise_multiplier=1.0)
            .event()
        )
        # Who takes part first moves most; that is what is accounted.
        assert 1 / stated.noise_multiplier == pytest.approx(np.linalg.norm(turns[0]), rel=1e-9)
        assert np.linalg.norm(norms) <= np.linalg.norm(turns[0]) * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seen"), [("bandmf", 0.4), ("blt", 0.5)])
def test_a_release_under_attack_stands_and_is_seen_through_its_noise(kind, seen):
    """By the likelihood ratio of what the columns of the matrix say of all turns together."""
    found = audit(bench.SOUND[kind](4.0, 7, 4000), 0.999)
    assert not found.exceeds, str(found)
    assert found.proved >= seen * found.claimed, str(found)


def test_a_plan_chooses_what_is_taken_back_and_keeps_it():
    for kind, chosen in (("blt", "decays"), ("banded_inverse", "fractions")):
        empty = made(kind, cohort_size=21, horizon=None, **dict.fromkeys(MADE[kind][1]))
        assert empty.participation.scheme_of(PEOPLE).period == 5
        with pytest.raises(BadInputError, match=r"(horizon|buffers|bands) yet"):
            empty.noise.matrix(40)
        planned = empty.calibrate(PEOPLE, 40, epsilon=4.0, delta=1e-5)
        assert planned.is_stateful
        noise = planned.mechanism.noise
        assert (noise.horizon, len(getattr(noise, chosen))) == (40, 2)
        assert 3.99 < epsilon(planned.event(), 1e-5) <= 4.0
        # It stays when it is planned again; another separation has another.
        again = planned.mechanism.calibrate(PEOPLE, 30, noise_multiplier=1.0)
        assert again.mechanism == planned.mechanism
        elsewhere = empty.calibrate(Population(1000, 2000, 1000), 40, noise_multiplier=1.0)
        assert getattr(elsewhere.mechanism.noise, chosen) != getattr(noise, chosen)
        with pytest.raises(BadInputError, match="horizon is 40: raise it"):
            dataclasses.replace(planned, steps=41).event()
