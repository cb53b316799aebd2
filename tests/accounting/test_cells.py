"""The table of proven cells: what is in it, what is refused, and what silos look up there."""

import pathlib

import dp_accounting
import pytest

from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE, cells, epsilon, events
from dpfl_jax.accounting.cells import (
    Contribution,
    Everyone,
    NoisedSums,
    OnePass,
    StrategyMatrix,
    TwoStagePoisson,
    cell_of,
)
from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.errors import BadInputError
from dpfl_jax.sampling import Poisson

THEORY = pathlib.Path(__file__).parents[2] / "docs" / "theory"


def test_every_cell_has_its_page():
    for table in (cells.TABLE, cells._REPLACE_TABLE):
        for cell in table.values():
            assert (THEORY / f"{cell.proof}.md").is_file(), cell.proof


@pytest.mark.parametrize(
    ("scheme", "kind", "of", "relation", "words"),
    [
        (Everyone(), "independent", None, ADD_OR_REMOVE, "take Poisson with independent"),
        (OnePass(), "independent", None, ADD_OR_REMOVE, "nothing is proven of OnePass"),
        (Poisson(0.1), "banded", None, REPLACE, "under replace-one adjacency: take Poisson"),
        (Poisson(0.1), "independent", Contribution(2), REPLACE, "several of the units"),
        (TwoStagePoisson(0.1, 1.0, 2), "toeplitz", None, ADD_OR_REMOVE, "toeplitz noise: take "),
    ],
)
def test_an_empty_cell_is_refused_in_a_sentence(scheme, kind, of, relation, words):
    with pytest.raises(BadInputError, match=words):
        cell_of(scheme, StrategyMatrix(kind=kind), of, relation)


@pytest.mark.parametrize("units", [1, 2, 5])
def test_everyone_moves_the_sum_by_all_its_units(units):
    """Against dp_accounting's own Gaussian of that sensitivity, at every step."""
    sums = NoisedSums(Everyone(), 7.0, 12, 1, contribution=Contribution(units))
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
    with pytest.raises(BadInputError, match="13 local steps are no whole number of rounds of 5"):
        NoisedSums(setting.scheme(0.1), 2.0, 13, 1).event()
