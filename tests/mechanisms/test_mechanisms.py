"""Mechanisms: what they sample, bound, add and account come from the same fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.clipping import Normalized, PerLayer
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Population, els, mean_of_examples, non_private, uls
from dpfl_jax.randomness import RootKey

OFFSETS = np.cumsum([0, 1, 4, 9, 2, 6])
KEY = RootKey.from_seed(0)
PEOPLE = Population(5, 22, 5)


def noisy(sigma):
    return uls(group_size=1, cohort_size=2).calibrate(PEOPLE, 3, noise_multiplier=sigma)


def test_els_limits_once_and_samples_what_it_accounts():
    mechanism = els(group_size=3, batch_size=4)
    population = mechanism.participation.population(OFFSETS)
    assert (population.num_users, population.num_examples, population.num_units) == (5, 22, 12)
    made = mechanism.calibrate(population, 7, noise_multiplier=1.0)
    sampler = mechanism.sampler(OFFSETS, KEY)
    assert len(sampler.positions) == 12
    assert sampler.scheme.sampling_prob == made.scheme.draw_prob == 4 / 12
    assert sampler.expected_size == pytest.approx(mechanism.participation.divisor)
    again = mechanism.sampler(OFFSETS, KEY)
    np.testing.assert_array_equal(sampler.positions, again.positions)
    event = made.event()
    assert event.count == 7
    np.testing.assert_allclose(event.event.sampling_probs, [(2 / 3) ** 3, 4 / 9, 2 / 9, 1 / 27])


def test_uls_samples_users():
    mechanism = uls(group_size=2, cohort_size=2)
    population = mechanism.participation.population(OFFSETS)
    assert population.num_units == 5
    made = mechanism.calibrate(population, 7, noise_multiplier=1.0)
    sampler = mechanism.sampler(OFFSETS, KEY)
    assert sampler.scheme.sampling_prob == made.scheme.draw_prob == 0.4
    assert sampler.expected_size == pytest.approx(mechanism.participation.divisor)
    assert made.event().event.sampling_probability == 0.4


def test_declared_probabilities_do_not_depend_on_the_data():
    mechanism = uls(group_size=2, cohort_size=3, sampling_prob=0.25)
    assert mechanism.sampler(OFFSETS, KEY).scheme.sampling_prob == 0.25
    assert mechanism.participation.divisor == 3.0


def test_noise_follows_the_rule_s_sensitivity():
    standard = uls(group_size=1, cohort_size=2, clip_norm=0.3)

    def stddev(mechanism):
        return mechanism.calibrate(PEOPLE, 7, noise_multiplier=2.0).noise_stddev

    assert stddev(standard) == pytest.approx(0.6)
    assert stddev(dataclasses.replace(standard, clip=PerLayer(0.3))) == stddev(standard)
    normalized = dataclasses.replace(standard, clip=Normalized(0.3))
    assert stddev(normalized) == pytest.approx(2.0)


def test_default_delta_is_the_paper_s():
    """135,818,730 examples: 1.13e-9 (Charles et al. 2024, section 5.1)."""
    population = dataclasses.replace(
        non_private(batch_size=1).participation.population(OFFSETS), num_examples=135_818_730
    )
    assert population.default_delta() == pytest.approx(1.1317e-9, rel=1e-4)


def test_a_user_s_loss_is_the_mean_over_their_own_examples():
    user_loss = mean_of_examples(lambda p, x: p * x["v"])
    user = {
        "examples": {"v": jnp.array([1.0, 3.0, jnp.nan])},
        "mask": jnp.array([True, True, False]),
    }
    assert float(user_loss(2.0, user)) == 4.0
    gradient = jax.grad(user_loss)(2.0, {**user, "examples": {"v": jnp.array([1.0, 3.0, 9.0])}})
    assert float(gradient) == 2.0


def test_units_of_users_carry_the_mask_of_their_examples():
    mask = np.array([[[True, True, False], [True, False, False]]])
    examples = {"x": np.arange(6.0).reshape(1, 2, 3)}
    users = uls(group_size=3, cohort_size=3).participation.units(examples, mask)
    assert users["examples"] is examples
    assert users["mask"] is mask
    assert els(group_size=3, batch_size=3).participation.units(examples, None) is examples


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: els(group_size=0, batch_size=1), "group_size"),
        (lambda: els(group_size=1, batch_size=0), "batch_size"),
        (lambda: uls(group_size=1, cohort_size=-2), "cohort_size"),
        (lambda: uls(group_size=1, cohort_size=2, clip_norm=0), "clip_norm"),
        (lambda: uls(group_size=1, cohort_size=2, clipping="hard"), "clipping"),
        (lambda: noisy(-1), "noise_multiplier is -1"),
        (lambda: noisy(1e7), "at most 1e\\+06"),
        (lambda: uls(group_size=1, cohort_size=2, arithmetic="none"), "'exact' or 'float'"),
        (lambda: uls(group_size=1, cohort_size=2, sampling_prob=1.5), "sampling probability"),
        (lambda: uls(group_size=1, cohort_size=9).sampler(OFFSETS, KEY), "sampling probability"),
        (lambda: noisy(None), "neither epsilon nor noise_multiplier"),
    ],
)
def test_bad_fields_are_one_sentence(make, message):
    with pytest.raises(BadInputError, match=message):
        make()
