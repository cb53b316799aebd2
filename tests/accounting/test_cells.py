"""The table of proven cells: what is in it, what is refused, and what silos look up there."""

import itertools
import pathlib
import re

import dp_accounting
import numpy as np
import pytest

from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE, cells, delta, epsilon, events
from dpfl_jax.accounting.cells import (
    AveragedUnits,
    Everyone,
    NoisedSums,
    OnePass,
    Sensitivity,
    SeveralUnits,
    StrategyMatrix,
    TwoStagePoisson,
    cell_of,
)
from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.errors import BadInputError
from dpfl_jax.sampling import Cyclic, CyclicPoisson, Poisson, RandomAllocation, TruncatedPoisson

WORDS = {
    None: "one unit",
    SeveralUnits: "several units",
    AveragedUnits: "averaged units",
    Sensitivity: "sensitivity",
}
THEORY = pathlib.Path(__file__).parents[2] / "docs" / "theory"


def test_the_first_page_shows_every_cell_with_its_page_and_function():
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \| (one unit|several units|averaged units|sensitivity) \| "
        r"(add or remove|replace one) \| \[(\w+)\]\(\5\.md\) \| `(\w+)` \|$",
        (THEORY / "README.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [
        (scheme.__name__, noise, WORDS[contribution], adjacency,
         cell.proof, cell.event.__name__)
        for table, adjacency in (
            (cells.TABLE, "add or remove"), (cells._REPLACE_TABLE, "replace one"),
        )
        for (scheme, noise, contribution), cell in table.items()
        if scheme.__module__.startswith("dpfl_jax.")  # tests add cells of their own
    ]  # fmt: skip
    assert all((THEORY / f"{page}.md").is_file() for *_, page, _ in rows)


@pytest.mark.parametrize(
    ("scheme", "kind", "of", "relation", "words"),
    [
        (Everyone(), "independent", None, ADD_OR_REMOVE, "take Poisson with independent"),
        (OnePass(), "independent", None, ADD_OR_REMOVE, "nothing is proven of OnePass"),
        (Poisson(0.1), "banded", None, REPLACE, "under replace-one adjacency: take Poisson"),
        (Poisson(0.1), "independent", SeveralUnits(2), REPLACE, "several .* one of them"),
        (TwoStagePoisson(0.1, 1.0, 2), "full", None, ADD_OR_REMOVE, ": take TwoStagePoisson"),
        (RandomAllocation(4), "banded", None, ADD_OR_REMOVE, ": take RandomAllocation with ind"),
        (Cyclic(4), "banded", None, ADD_OR_REMOVE, ": take Cyclic with full noise$"),
        (Cyclic(4), "independent", SeveralUnits(2), ADD_OR_REMOVE, ": take Poisson with ind"),
        (Cyclic(4), "full", SeveralUnits(2), ADD_OR_REMOVE, "full .* it has one of them$"),
    ],
)
def test_an_empty_cell_is_refused_in_a_sentence(scheme, kind, of, relation, words):
    with pytest.raises(BadInputError, match=words):
        cell_of(scheme, StrategyMatrix(kind=kind), of, relation)


def test_whatever_is_refused_a_cell_that_is_proven_is_named():
    plain = (Poisson(0.1), TruncatedPoisson(0.1, 9), RandomAllocation(4), Everyone(), OnePass())
    schemes = (*plain, Cyclic(4), CyclicPoisson(0.1, period=4), TwoStagePoisson(0.1, 1.0, 2))
    told = []
    for scheme, kind, units, relation in itertools.product(
        schemes, ("independent", "banded", "full"), (None, 1, 3), (ADD_OR_REMOVE, REPLACE)
    ):
        try:
            cell_of(scheme, StrategyMatrix(kind=kind), units and SeveralUnits(units), relation)
        except BadInputError as error:
            told.append((str(error), units == 3, relation))
    assert len(told) > 50
    for sentence, several, relation in told:
        near = re.search(r": take (\w+) with (\w+) noise( where it has one of them)?$", sentence)
        table = cells.TABLE if relation is ADD_OR_REMOVE else cells._REPLACE_TABLE
        known = {(scheme.__name__, noise, more) for scheme, noise, more in table}
        more = SeveralUnits if several and near[3] is None else None
        assert (near[1], near[2], more) in known, sentence


# ---- what the identity is, too -------------------------------------------------------------------


def test_turns_with_independent_noise_cost_as_many_gaussians():
    """Against dp_accounting's own; a run may end within a turn."""
    for steps, turns in ((12, 3), (13, 4), (3, 1)):
        plain = dp_accounting.pld.PLDAccountant().compose(dp_accounting.GaussianDpEvent(3.0), turns)
        found = epsilon(NoisedSums(Cyclic(4), 3.0, steps, 90).event(), 1e-5)
        assert found == pytest.approx(plain.get_epsilon(1e-5), rel=1e-3)
        sampled = NoisedSums(CyclicPoisson(0.3, period=4), 3.0, steps, 90).event()
        assert epsilon(sampled, 1e-5) == pytest.approx(
            epsilon(events.uls(3.0, 0.3, turns), 1e-5), rel=1e-6
        )


@pytest.mark.parametrize("scheme", [Cyclic(2), CyclicPoisson(0.4, period=2)])
def test_turns_with_independent_noise_by_monte_carlo(scheme):
    """Five steps: who has the first turn attains what is stated, who has any no more."""
    sigma, prob = 1.3, getattr(scheme, "sampling_prob", 1.0)
    y = np.random.default_rng(0).normal(size=(400_000, 5))
    likelihood = 1 - prob + prob * np.exp(y / sigma - 0.5 / sigma**2)
    first, second = likelihood[:, ::2].prod(axis=1), likelihood[:, 1::2].prod(axis=1)
    event = NoisedSums(scheme, sigma, 5, 90).event()
    for at in (0.5, 1.5):
        stated = delta(event, at)
        found = []
        for ratio in (first, (first + second) / 2):
            both = np.maximum(ratio - np.exp(at), 0), np.maximum(1 - np.exp(at) * ratio, 0)
            found.append(max((x.mean(), x.std() / len(x) ** 0.5) for x in both))
        (attained, error), (any_turn, _) = found
        assert abs(attained - stated) < 5 * error  # false-alarm rate 1e-6
        assert any_turn < stated


@pytest.mark.parametrize(
    ("scheme", "matrix"),
    [
        (Cyclic(4), StrategyMatrix((1.0, 0.5, 0.25), "full")),
        (CyclicPoisson(0.2, period=4), StrategyMatrix((1.0, 0.5), "banded")),
        *(
            (s, StrategyMatrix())
            for s in (Cyclic(4), RandomAllocation(4), TruncatedPoisson(0.1, 9))
        ),
    ],
)
def test_a_privacy_unit_of_one_drawn_unit_is_what_is_drawn(scheme, matrix):
    one, drawn = (NoisedSums(scheme, 2.0, 9, 90, matrix, of) for of in (SeveralUnits(1), None))
    assert one.event() == drawn.event()


@pytest.mark.parametrize("units", [1, 2, 5])
def test_everyone_moves_the_sum_by_its_sensitivity(units):
    """Against dp_accounting's own Gaussian of that sensitivity, at every step."""
    sums = NoisedSums(Everyone(), 7.0, 12, 1, contribution=Sensitivity(units))
    plain = dp_accounting.pld.PLDAccountant()
    plain.compose(dp_accounting.GaussianDpEvent(7.0 / units), 12)
    assert epsilon(sums.event(), 1e-5) == pytest.approx(plain.get_epsilon(1e-5), rel=1e-4)
    if units == 2:  # one unit turned into another
        other = NoisedSums(Everyone(), 7.0, 12, 1, relation=REPLACE).event()
        found = epsilon(other, 1e-5, relation=REPLACE)
        assert found == pytest.approx(epsilon(sums.event(), 1e-5), rel=1e-9)


def test_a_unit_that_is_in_one_step_at_most_pays_once():
    for steps in (1, 9):
        made = NoisedSums(OnePass(), 3.0, steps, 50, relation=REPLACE).event()
        assert made == events.gaussian(3.0, 1)


def test_two_stages_are_accounted_in_whole_rounds():
    setting = TwoStage(2.0, 5, 4, 0.5, 1e-4)
    assert setting.event(0.1, 3) == events.two_stage(2.0, 0.1, 0.5, 5, 3)
    with pytest.raises(BadInputError, match="13 local steps are not a whole number of rounds of 5"):
        NoisedSums(setting.scheme(0.1), 2.0, 13, 1).event()
