"""Cells of outputs: upper bounds on the divergence at every epsilon, exact at the ends of cells."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.discretize import Mixture, binomial_weights, mixture_step


def divergence(losses, probs, infinity, epsilons):
    over = np.maximum(losses[None, :] - epsilons[:, None], 0.0)
    return -np.expm1(-over) @ probs + infinity


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.floats(0.05, 4.0), st.floats(1e-6, 0.9), st.floats(0.01, 1.0), st.floats(1e-3, 2.0))
def test_cells_and_grid_never_understate_a_divergence(shift, prob, spacing, grid):
    """Poisson-sampled Gaussian, in closed form: H = S(x) - e^epsilon N(x) at the x of the loss."""
    mixture = Mixture(np.array([0.0, shift]), np.array([1.0 - prob, prob]))
    step = mixture_step(mixture, Mixture(np.zeros(1), np.ones(1)), spacing, -80.0)
    least = math.log1p(-prob)
    epsilons = np.concatenate([np.linspace(0.9 * least, 0, 7), np.geomspace(1e-6, 20.0, 60)])
    x = (np.log1p(np.expm1(epsilons) / prob) + 0.5 * shift**2) / shift
    removed = prob * special.ndtr(shift - x) + (1 - prob) * special.ndtr(-x)
    truth = removed - np.exp(epsilons) * special.ndtr(-x)
    for law in (step.remove, step.remove.on_grid(grid)):
        found = divergence(law.losses, law.probs, law.infinity, epsilons)
        assert np.all(found >= truth * (1 - 1e-9) - 1e-15)
        assert law.probs.sum() + law.infinity == pytest.approx(1.0, abs=1e-12)
    # Adding: H_e(N || S) = 1 - e + e H_{1/e}(S || N).
    added = -np.expm1(-epsilons) + np.exp(-epsilons) * truth
    for law in (step.add, step.add.on_grid(grid)):
        found = divergence(law.losses, law.probs, law.infinity, -epsilons)
        assert np.all(found >= added * (1 - 1e-9) - 1e-15)
    # At the ends of the cells the curve is met.
    fine = mixture_step(mixture, Mixture(np.zeros(1), np.ones(1)), 0.002, -80.0).remove
    found = divergence(fine.losses, fine.probs, fine.infinity, epsilons)
    np.testing.assert_allclose(found, truth, rtol=2e-2, atol=1e-14)


@pytest.mark.parametrize("prob", [0.01, 0.6])
def test_what_lies_beyond_the_cells_is_lost_in_neither_direction(prob):
    mixture = Mixture(np.array([0.0, 2.0]), np.array([1.0 - prob, prob]))
    step = mixture_step(mixture, Mixture(np.zeros(1), np.ones(1)), 0.1, -5.0)
    for law in (step.remove, step.add):
        assert law.probs.sum() + law.infinity == pytest.approx(1.0, abs=1e-12)
    assert step.add.infinity == pytest.approx(math.exp(-5.0))


@pytest.mark.parametrize(("size", "prob"), [(10**6, 0.5), (10**6, 1e-3), (40_000, 0.3)])
def test_counts_of_large_groups_are_merged_upwards(size, prob):
    """What lies above a count stays there, and nothing else comes: then nothing costs less."""
    counts, weights = binomial_weights(size, prob)
    assert len(counts) <= 2048
    assert counts[-1] == size
    above = np.cumsum(weights[:0:-1])[::-1]
    np.testing.assert_allclose(above, stats.binom.sf(counts[:-1], size, prob), rtol=1e-9)


@pytest.mark.parametrize(
    ("sigma", "prob", "size", "steps"), [(0.6, 1e-3, 1, 25), (0.8, 0.01, 1, 8), (1.0, 2e-3, 4, 60)]
)
def test_rare_large_losses_lie_between_two_plain_compositions(sigma, prob, size, steps):
    """Losses rounded down, and up, to a grid; composed without a tilt, and nothing cut."""
    counts = np.arange(size + 1.0)
    binomial = special.binom(size, counts) * prob**counts * (1 - prob) ** (size - counts)
    mixture = Mixture(counts / sigma, binomial)
    grid, x = 2e-3, np.linspace(-12.0, 12.0 + size / sigma, 200_001)
    loss, mass = mixture.log_ratio(x), mixture.cells(x)
    down = np.floor(loss[:-1] / grid).astype(int)
    up = np.ceil(loss[1:] / grid).astype(int)
    low, width = int(down.min()), int(up.max() - down.min()) + 1
    length = 1 << math.ceil(math.log2(steps * width))
    ends = []
    for index in (down, up):
        law = np.fft.irfft(np.fft.rfft(np.bincount(index - low, mass), length) ** steps, length)
        losses = (steps * low + np.arange(length)) * grid
        ends.append(lambda e, law=law, losses=losses: law @ -np.expm1(-np.maximum(losses - e, 0)))
    delta = 1e-6
    found = accounting.epsilon(events.els(sigma, prob, size, steps), delta)
    assert ends[0](found) <= delta <= ends[1](found * (1 - 2e-3)) + 1e-12
    assert accounting.delta(events.els(sigma, prob, size, steps), found) >= ends[0](found)
