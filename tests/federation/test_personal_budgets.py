"""Budget distributions of the paper: their parameters, checked by their means."""

import math

import numpy as np
import pytest

from dpfl_jax.errors import BadInputError
from dpfl_jax.federation import personal_budgets as b


def test_published_means_and_shares():
    levels = b.mean_over(b.ThreeLevels(), 10_000)
    assert [np.mean(levels == e) for e in (0.1, 1.0, 5.0)] == pytest.approx([0.7, 0.2, 0.1])
    assert levels.mean() == pytest.approx(0.77)
    # Clipped means: classical Pareto(1, .1) .560, median .2, 1 % at the cap; Lomax(4) + .1 .434.
    classical = b.mean_over(b.BoundedPareto(), 200_000)
    assert classical.mean() == pytest.approx(0.560, abs=2e-3)
    assert np.median(classical) == pytest.approx(0.2, rel=1e-3)
    assert np.mean(classical == 10.0) == pytest.approx(0.01, rel=0.01)
    assert b.mean_over(b.BoundedPareto(4.0, "lomax"), 200_000).mean() == pytest.approx(
        0.434, abs=1e-3
    )
    mixed = b.mean_over(b.BoundedMixGauss(), 100_000)
    assert mixed.min() == 0.1
    assert mixed.max() <= 10
    assert np.mean(mixed > 3) == pytest.approx(0.1)
    assert mixed[mixed > 3].mean() == pytest.approx(5.0, rel=1e-3)
    assert mixed[mixed > 3].std() == pytest.approx(0.5, rel=0.02)


def test_bad_distributions_and_columns_are_one_sentence():
    for bad in (
        lambda: b.ThreeLevels((1.0, 2.0), (0.5, 0.6)),
        lambda: b.ThreeLevels((1.0, -2.0), (0.5, 0.5)),
        lambda: b.BoundedMixGauss(stds=(0.1,)),
        lambda: b.BoundedPareto(shape=0.0),
        lambda: b.BoundedPareto(bounds=(2.0, 1.0)),
        lambda: b.budgets_of_column(np.array(["a", "b"]), "epsilon"),
    ):
        with pytest.raises(BadInputError):
            bad()
    with pytest.raises(BadInputError, match="row 2"):
        b.budgets_of_column(np.array([1.0, 2.0, math.nan]), "epsilon")
    assert b.budgets_of_column(np.array(["1", "inf"]), "e").tolist() == [1.0, math.inf]
