"""Events that people bring from dp-accounting: accounted, or refused by name with what to bring."""

import math

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NeighboringRelation,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    dp_event,
    rdp,
)
from scipy import stats

from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE, epsilon, events
from dpfl_jax.accounting.event_types import from_json, to_json
from dpfl_jax.accounting.renyi import ORDERS, renyi_divergences
from dpfl_jax.errors import BadInputError

DELTA = 1e-5
THREE = ComposedDpEvent([GaussianDpEvent(3.0), SelfComposedDpEvent(GaussianDpEvent(4.0), 2)])
AS_ONE = GaussianDpEvent((1 / 9 + 2 / 16) ** -0.5)


def test_gaussian_sums_on_one_poisson_batch_are_one():
    for q in (0.3, 1.0):
        one = epsilon(SelfComposedDpEvent(PoissonSampledDpEvent(q, AS_ONE), 50), DELTA)
        several = SelfComposedDpEvent(PoissonSampledDpEvent(q, THREE), 50)
        assert epsilon(several, DELTA) == pytest.approx(one, rel=1e-9)
        orders = np.array([2.0, 3.0, 8.0])
        theirs = rdp.RdpAccountant(list(orders)).compose(several)._rdp
        np.testing.assert_allclose(renyi_divergences(several, orders), theirs, rtol=1e-6)
        assert one <= epsilon(several, DELTA, accountant="rdp")
    # Not what parts with coins of their own would cost.
    apart = [PoissonSampledDpEvent(0.01, GaussianDpEvent(s)) for s in (3.0, 4.0, 4.0)]
    assert epsilon(PoissonSampledDpEvent(0.01, THREE), DELTA) > epsilon(
        ComposedDpEvent(apart), DELTA
    )
    assert epsilon(PoissonSampledDpEvent(0.0, THREE), DELTA) == 0
    assert epsilon(PoissonSampledDpEvent(0.2, ComposedDpEvent([NoOpDpEvent()])), DELTA) == 0
    silent = ComposedDpEvent([GaussianDpEvent(1.0), GaussianDpEvent(0.0)])
    assert epsilon(PoissonSampledDpEvent(0.2, silent), DELTA) == math.inf


def test_two_sums_on_one_batch_against_the_plane():
    """The divergence of two sums with one coin, by quadrature over both."""
    q, first, second = 0.2, 1.5, 1.0
    both = ComposedDpEvent([GaussianDpEvent(first), GaussianDpEvent(second)])
    stated = epsilon(PoissonSampledDpEvent(q, both), 1e-3)
    x, y = np.linspace(-12, 13, 1501)[:, None], np.linspace(-8, 9, 1501)[None, :]

    def density(shift):
        return stats.norm.pdf(x, shift, first) * stats.norm.pdf(y, shift, second)

    without = density(0.0)
    within = (1 - q) * without + q * density(1.0)
    cell = (x[1, 0] - x[0, 0]) * (y[0, 1] - y[0, 0])
    for p, r in ((within, without), (without, within)):
        truth = np.maximum(p - math.exp(stated) * r, 0).sum() * cell
        assert truth <= 1e-3 * (1 + 1e-6)
    truth = np.maximum(within - math.exp(stated) * without, 0).sum() * cell
    assert truth == pytest.approx(1e-3, rel=2e-3)


def test_a_coin_after_a_coin_is_one():
    inner = PoissonSampledDpEvent(0.5, GaussianDpEvent(1.0))
    for relation in (ADD_OR_REMOVE, REPLACE):
        found = epsilon(PoissonSampledDpEvent(0.2, inner), DELTA, relation=relation)
        one = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
        assert found == epsilon(one, DELTA, relation=relation)


def test_batches_of_fixed_size():
    for inner, sigma in ((GaussianDpEvent(2.0), 2.0), (THREE, AS_ONE.noise_multiplier)):
        brought = dp_event.SampledWithoutReplacementDpEvent(1000, 20, inner)
        again = from_json(to_json(brought))
        ours = epsilon(events.fixed_size(sigma, 1000, 20, 30), DELTA, relation=REPLACE)
        theirs = epsilon(SelfComposedDpEvent(again, 30), DELTA, relation=REPLACE)
        assert theirs == pytest.approx(ours, rel=1e-9)
        with pytest.raises(BadInputError, match="accounted for Gaussian sums under replace-one"):
            epsilon(brought, DELTA)
    none = dp_event.SampledWithoutReplacementDpEvent(1000, 0, GaussianDpEvent(2.0))
    assert epsilon(none, DELTA, relation=REPLACE) == 0
    few = dp_event.SampledWithoutReplacementDpEvent(10, 20, GaussianDpEvent(2.0))
    with pytest.raises(BadInputError, match="a batch of 20 cannot be drawn from 10"):
        epsilon(few, DELTA, relation=REPLACE)


def test_gaussians_are_concentrated():
    """Of sampled ones zCDP knows no more than that they are Gaussians."""
    event = ComposedDpEvent([THREE, PoissonSampledDpEvent(0.1, GaussianDpEvent(5.0))])
    plain = ComposedDpEvent([THREE, GaussianDpEvent(5.0)])
    theirs = rdp.RdpAccountant(list(ORDERS)).compose(plain).get_epsilon(DELTA)
    assert epsilon(event, DELTA, accountant="zcdp") == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_the_best_of_several_runs_by_renyi(shape):
    inner = SelfComposedDpEvent(GaussianDpEvent(20.0), 10)
    event = dp_event.RepeatAndSelectDpEvent(inner, 10.0, shape)
    theirs = rdp.RdpAccountant(list(ORDERS)).compose(event).get_epsilon(DELTA)
    ours = epsilon(event, DELTA, accountant="rdp")
    assert ours == pytest.approx(theirs, rel=1e-4)
    # Of users, whose event dp-accounting has no divergences of.
    people = dp_event.RepeatAndSelectDpEvent(events.els(4.0, 0.01, 4, 100), 10.0, shape)
    once = epsilon(people.event, DELTA, accountant="rdp")
    assert once < epsilon(people, DELTA, accountant="rdp") < 6 * once
    with pytest.raises(BadInputError, match="accountant='rdp'"):
        epsilon(event, DELTA)
    # It is not what one run is.
    one = dp_event.RepeatAndSelectDpEvent(GaussianDpEvent(2.0), 10.0, shape)
    with pytest.raises(BadInputError, match="zCDP is not available for RepeatAndSelect"):
        epsilon(one, DELTA, accountant="zcdp")
    nothing = dp_event.RepeatAndSelectDpEvent(GaussianDpEvent(0.0), 10.0, shape)
    assert epsilon(nothing, DELTA, accountant="rdp") == math.inf
    with pytest.raises(BadInputError, match="mean number of runs of which the best is chosen is"):
        epsilon(dp_event.RepeatAndSelectDpEvent(inner, 0.5, shape), DELTA, accountant="rdp")


@pytest.mark.parametrize(
    ("event", "relation", "words"),
    [
        (
            dp_event.SampledWithReplacementDpEvent(100, 5, GaussianDpEvent(1.0)),
            REPLACE,
            "sample without replacement",
        ),
        (PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)), ADD_OR_REMOVE, "for Gaussian sums"),
        (PoissonSampledDpEvent(0.1, THREE), REPLACE, "under add-or-remove"),
        (dp_event.UnsupportedDpEvent(), ADD_OR_REMOVE, "event of the mechanism itself"),
        (LaplaceDpEvent(1.0), ADD_OR_REMOVE, r"ApproximateDpEvent\(epsilon, delta\)"),
        (dp_event.DiscreteLaplaceDpEvent(1.0, 1), ADD_OR_REMOVE, "use its guarantee"),
        (dp_event.RandomizedResponseDpEvent(0.5, 2), REPLACE, "use its guarantee"),
        (dp_event.ZCDpEvent(0.1), ADD_OR_REMOVE, "use its guarantee"),
        (
            dp_event.SingleEpochTreeAggregationDpEvent(5.0, 8),
            NeighboringRelation.REPLACE_SPECIAL,
            "events.matrix_factorization",
        ),
    ],
)
def test_the_rest_is_refused_by_name_with_what_to_bring(event, relation, words):
    for accountant in ("pld", "rdp", "zcdp"):
        with pytest.raises(BadInputError, match=f"{type(event).__name__}.*{words}"):
            epsilon(event, DELTA, relation=relation, accountant=accountant)
