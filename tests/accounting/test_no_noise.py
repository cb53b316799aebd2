"""No noise is no guarantee, whatever the event; too little is the answer or one sentence, soon."""

import math
import time

import pytest
from dp_accounting import dp_event

from dpfl_jax import accounting
from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE, events
from dpfl_jax.accounting.event_types import (
    ApproximateDpEvent,
    FixedSizeGaussianDpEvent,
    TwoStageSampledDpEvent,
)
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError


def gaussian(x):
    return dp_event.GaussianDpEvent(x)


def poisson(event):
    return dp_event.PoissonSampledDpEvent(0.1, event)


# Every event that an accountant knows, by its noise (for (epsilon, delta) events: 1 / epsilon).
EVENTS = {
    "gaussian": (gaussian, ADD_OR_REMOVE),
    "gaussian, replace": (gaussian, REPLACE),
    "poisson gaussian": (lambda x: poisson(gaussian(x)), ADD_OR_REMOVE),
    "poisson gaussian, replace": (lambda x: poisson(gaussian(x)), REPLACE),
    "mixture": (
        lambda x: dp_event.MixtureOfGaussiansDpEvent(x, [0.0, 1.0, 2.0], [0.5, 0.3, 0.2]),
        ADD_OR_REMOVE,
    ),
    "truncated": (
        lambda x: dp_event.TruncatedSubsampledGaussianDpEvent(100, 0.1, 12, x),
        ADD_OR_REMOVE,
    ),
    "truncated, replace": (
        lambda x: dp_event.TruncatedSubsampledGaussianDpEvent(100, 0.1, 12, x),
        REPLACE,
    ),
    "two-stage": (lambda x: TwoStageSampledDpEvent(0.5, poisson(gaussian(x)), 3), ADD_OR_REMOVE),
    "fixed size": (lambda x: FixedSizeGaussianDpEvent(100, 10, x), REPLACE),
    "els": (lambda x: events.els(x, 0.1, 5, 3), ADD_OR_REMOVE),
    "local group": (lambda x: events.poisson_of_several(x, 0.1, 5, 3, 2), ADD_OR_REMOVE),
    "approximate": (
        lambda x: ApproximateDpEvent(1.0 / x if x else math.inf, 1e-9),
        ADD_OR_REMOVE,
    ),
}
HOW = {
    "alone": lambda event: event,
    "ten times": lambda event: dp_event.SelfComposedDpEvent(event, 10),
    "beside a Gaussian": lambda event: dp_event.ComposedDpEvent([event, gaussian(1.0)]),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", EVENTS)
def test_no_noise_is_no_guarantee(name, how):
    make, relation = EVENTS[name]
    event = HOW[how](make(0.0))
    assert accounting.epsilon(event, 1e-5, relation=relation) == math.inf
    assert accounting.delta(event, 3.0, relation=relation) == 1.0
    assert accounting.epsilon_curve(event, [0, 2], 1e-5, relation=relation) == [0.0, math.inf]


@pytest.mark.slow
@pytest.mark.nightly("-0.001]", "-1e-05]", "-1e-09]")
@pytest.mark.parametrize("noise", [1e-2, 1e-3, 1e-5, 1e-7, 1e-9, 1e-300])
@pytest.mark.parametrize("name", EVENTS)
def test_too_little_noise_is_the_answer_or_one_sentence_and_soon(name, noise):
    make, relation = EVENTS[name]
    start = time.process_time()
    for wrap in HOW.values():
        event = wrap(make(noise))
        for ask in (
            lambda event=event: accounting.epsilon(event, 1e-5, relation=relation) > 4.0,
            lambda event=event: accounting.delta(event, 1.0, relation=relation) > 0.04,
        ):
            try:
                assert ask()
            except BadInputError as error:
                assert "noise" in str(error)  # noqa: PT017
                assert len(str(error)) < 300  # noqa: PT017
    # Six answers, each under about a second; much more on a busy machine.
    assert time.process_time() - start < 30.0


def test_an_event_with_impossible_noise_is_refused():
    for event, relation in (
        (gaussian(-1.0), ADD_OR_REMOVE),
        (gaussian(math.nan), ADD_OR_REMOVE),
        (poisson(gaussian(math.nan)), ADD_OR_REMOVE),
        (dp_event.PoissonSampledDpEvent(1.5, gaussian(1.0)), ADD_OR_REMOVE),
        (ApproximateDpEvent(-1.0, 0.0), ADD_OR_REMOVE),
    ):
        with pytest.raises(BadInputError):
            accounting.epsilon(event, 1e-5, relation=relation)


def test_an_event_that_does_nothing_costs_nothing():
    for event, relation in (
        (dp_event.PoissonSampledDpEvent(0.0, gaussian(0.0)), ADD_OR_REMOVE),
        (ApproximateDpEvent(0.0, 0.0), REPLACE),
        (dp_event.TruncatedSubsampledGaussianDpEvent(100, 0.0, 5, 0.0), ADD_OR_REMOVE),
    ):
        assert accounting.epsilon(event, 1e-5, relation=relation) == 0.0


@pytest.mark.parametrize("noise", ["0", "1e-7"])
def test_the_command_states_no_guarantee_without_noise(noise, capsys):
    arguments = "--sampling-prob 0.01 --dataset-size 1000 --batch-cap 20 --steps 10 --delta 1e-5"
    main(["account", "truncated-poisson", "--noise-multiplier", noise, *arguments.split()])
    out = capsys.readouterr().out
    assert "NO differential-privacy guarantee" in out
    assert "(0, 1e-05)" not in out


@pytest.mark.parametrize(
    ("sensitivities", "weights"),
    [([-1.0, 0.0], [0.5, 0.5]), ([0.0, 1.0], [0.1, 0.2]), ([0.0, 1.0], [-0.5, 1.5])],
)
def test_what_is_no_mixture_is_refused(sensitivities, weights):
    event = dp_event.MixtureOfGaussiansDpEvent(1.0, sensitivities, weights)
    with pytest.raises(BadInputError, match="a mixture of Gaussians needs"):
        accounting.epsilon(event, 1e-6)
