"""Every sampling scheme draws what it says, at every step, on every host.

Statistical tests use fixed seeds; each threshold has a false-alarm rate of at most 1e-6.
"""

import numpy as np
import pytest
from scipy import stats

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import (
    ExampleSampler,
    FixedSize,
    PersonalizedPoisson,
    Poisson,
    UserSampler,
    limit_contributions,
    share_of,
)

ALARM = 1e-6
KEY = RootKey.from_seed(11)
N, STEPS = 40, 3000
OFFSETS = np.array([0, 3, 3, 20, 21, 40])
PROBS = np.linspace(0.0, 0.5, N)

SCHEMES = {
    "poisson": (Poisson(0.2), np.full(N, 0.2)),
    "fixed": (FixedSize(7), np.full(N, 7 / N)),
    "personalized": (PersonalizedPoisson(PROBS), PROBS),
}


def inclusion(scheme, steps=STEPS):
    drawn = np.zeros((steps, N), bool)
    for step in range(steps):
        drawn[step, scheme.indices(KEY, step, N)] = True
    return drawn


@pytest.fixture(scope="module")
def drawn():
    return {name: inclusion(scheme) for name, (scheme, _) in SCHEMES.items()}


@pytest.mark.parametrize("name", SCHEMES)
def test_marginal_probability_of_every_unit(drawn, name):
    scheme, probs = SCHEMES[name]
    counts = drawn[name].sum(axis=0)
    for count, prob in zip(counts, probs):
        assert stats.binomtest(int(count), STEPS, prob).pvalue > ALARM / N
    assert abs(counts.sum() / STEPS - scheme.expected_size(N)) < 5 * np.sqrt(N / STEPS)


@pytest.mark.parametrize("name", SCHEMES)
def test_steps_are_independent(drawn, name):
    z = drawn[name] - drawn[name].mean(axis=0)
    lagged = (z[1:] * z[:-1]).sum(axis=0)
    spread = np.sqrt((z[1:] ** 2 * z[:-1] ** 2).sum(axis=0)) + 1e-9
    assert np.abs(lagged / spread).max() < stats.norm.isf(ALARM / (2 * N)) * 1.2
    total = drawn[name].sum(axis=1)
    if total.std() > 0:
        correlation = np.corrcoef(total[1:], total[:-1])[0, 1]
        assert abs(correlation) * np.sqrt(STEPS) < stats.norm.isf(ALARM / 2)


def pairs(drawn):
    """Observed joint inclusion of units 4 and 5 , and 4 and 30."""
    return (drawn[:, 4] & drawn[:, 5]).sum(), (drawn[:, 4] & drawn[:, 30]).sum()


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("poisson", 0.2**2, 0.2**2),
        ("fixed", 7 * 6 / (40 * 39), 7 * 6 / (40 * 39)),
        ("personalized", PROBS[4] * PROBS[5], PROBS[4] * PROBS[30]),
    ],
)
def test_joint_inclusion_of_two_units(drawn, name, same, other):
    observed = pairs(drawn[name])
    for count, prob in zip(observed, (same, other)):
        assert stats.binomtest(int(count), STEPS, prob).pvalue > ALARM


@pytest.mark.parametrize("name", SCHEMES)
def test_sizes(drawn, name):
    scheme, _ = SCHEMES[name]
    sizes = drawn[name].sum(axis=1)
    assert sizes.max() <= scheme.size_bound(N, 1e-12)
    if name == "fixed":
        assert (sizes == 7).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_any_step_without_the_steps_before_it(name):
    scheme, _ = SCHEMES[name]
    forward = [scheme.indices(KEY, t, N) for t in range(12)]
    for t in (11, 3, 7, 0):
        np.testing.assert_array_equal(scheme.indices(KEY, t, N), forward[t])
    for drawn in forward:
        assert drawn.dtype == np.int64
        assert (np.diff(drawn) > 0).all()
    other = [scheme.indices(RootKey.from_seed(12), t, N) for t in range(12)]
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(forward, other))


@pytest.mark.parametrize("scheme", [Poisson(0.5), FixedSize(2)])
def test_users_hold_their_own_examples_up_to_the_group_size(scheme):
    sampler = UserSampler(scheme, OFFSETS, 4, KEY)
    seen = np.zeros(40, int)
    steps = 2000
    for t in range(steps):
        draw = sampler.draw(t)
        assert draw.positions.shape == (draw.size, 4)
        counts = draw.example_mask.sum(axis=1)
        sizes = np.diff(OFFSETS)[draw.units]
        np.testing.assert_array_equal(counts, np.minimum(sizes, 4))
        for user, row in zip(draw.units, draw.positions):
            real = row[row >= 0]
            assert len(set(real.tolist())) == len(real)
            assert ((real >= OFFSETS[user]) & (real < OFFSETS[user + 1])).all()
            seen[real] += 1
    # Within the users that own more than 4 examples, every example is as likely as any other.
    prob = scheme.expected_size(5) / 5
    for user in (2, 4):
        size = OFFSETS[user + 1] - OFFSETS[user]
        for count in seen[OFFSETS[user] : OFFSETS[user + 1]]:
            assert stats.binomtest(int(count), steps, prob * 4 / size).pvalue > ALARM / size


def test_contribution_limit_is_never_exceeded_on_heavy_tails():
    rng = np.random.default_rng(0)
    offsets = np.r_[0, np.cumsum(rng.zipf(1.3, 3000).clip(max=5000))]
    for group_size in (1, 7, 100):
        kept = limit_contributions(KEY.numpy("limit", group_size), offsets, group_size)
        owner = np.searchsorted(offsets, kept, side="right") - 1
        counts = np.bincount(owner, minlength=3000)
        np.testing.assert_array_equal(counts, np.minimum(np.diff(offsets), group_size))
        assert len(np.unique(kept)) == len(kept)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_one_host_or_four_give_the_same_global_batch(name, hosts):
    scheme, _ = SCHEMES[name]
    users = np.r_[0, np.cumsum(np.arange(N) % 5)]
    samplers = [ExampleSampler(scheme, np.arange(N) * 3, KEY), UserSampler(scheme, users, 3, KEY)]
    for sampler in samplers:
        for t in range(4):
            draw = sampler.draw(t)
            row = 8
            whole = share_of(draw, row, range(row))
            width = row // hosts
            shares = [
                share_of(draw, row, range(h * width, (h + 1) * width), len(whole.slots))
                for h in range(hosts)
            ]
            np.testing.assert_array_equal(
                np.concatenate([s.slots for s in shares], axis=1), whole.slots
            )
            np.testing.assert_array_equal(
                np.concatenate([s.positions for s in shares], axis=1), whole.positions
            )
            real = whole.slots >= 0
            assert sorted(whole.slots[real].tolist()) == list(range(draw.size))
            np.testing.assert_array_equal(whole.positions[real], draw.positions)
            assert (whole.positions[~real] == -1).all()


def test_bad_settings():
    for make, message in (
        (lambda: Poisson(1.5), "sampling probability is 1.5"),
        (lambda: ExampleSampler(Poisson(0.5), np.arange(0), KEY), "nothing to sample"),
        (lambda: FixedSize(0).indices(KEY, 0, 10), "batch size is 0"),
        (lambda: FixedSize(11).indices(KEY, 0, 10), "batch size is 11"),
        (lambda: PersonalizedPoisson(np.array([0.5, 1.1])), r"in \[0, 1\]"),
        (lambda: PersonalizedPoisson(np.array([0.5, np.nan])), r"in \[0, 1\]"),
        (lambda: PersonalizedPoisson(PROBS).indices(KEY, 0, 5), "40 sampling prob.*but 5 units"),
        (lambda: UserSampler(Poisson(0.5), OFFSETS, 0, KEY), "group_size is 0"),
    ):
        with pytest.raises(BadInputError, match=message):
            make()
    with pytest.raises(ValueError, match="lie outside"):
        share_of(ExampleSampler(Poisson(0.2), np.arange(N), KEY).draw(0), 4, range(2, 6))
