"""Each record's budget: drawn from the paper's distributions, or read from the data.

Source: Liu et al. 2024, section 7.1. A distribution stands for a public policy. A record's budget
is drawn by a keyed hash of the record, so that adding a record changes no other record's budget. (A
person's records are distinguished by their order.)
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from scipy import special, stats

from dpfl_jax.accounting.rates import check_budgets
from dpfl_jax.config.schema import BudgetConfig
from dpfl_jax.data.store import Store
from dpfl_jax.errors import BadInputError, positive
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.partition import record_numbers, uniforms
from dpfl_jax.files import on_disk


class BudgetDistribution(Protocol):
    """The public distribution of budgets in the population."""

    def quantiles(self, u: np.ndarray) -> np.ndarray:
        """Returns the budgets for uniform numbers ``u`` [n] in [0, 1), float64 [n]."""


@dataclasses.dataclass(frozen=True)
class ThreeLevels(BudgetDistribution):
    """A discrete distribution, such as strict, moderate and relaxed records.

    Attributes:
      levels: epsilon of each level.
      shares: share of the records at each level; they sum to 1.
    """

    levels: tuple[float, ...] = (0.1, 1.0, 5.0)
    shares: tuple[float, ...] = (0.7, 0.2, 0.1)

    def __post_init__(self) -> None:
        check_shares(self.levels, self.shares)

    def quantiles(self, u: np.ndarray) -> np.ndarray:
        return np.asarray(self.levels)[component(u, self.shares)[0]]


@dataclasses.dataclass(frozen=True)
class BoundedMixGauss(BudgetDistribution):
    """A mixture of normal distributions, clipped to bounds.

    Attributes:
      means: mean of each component.
      stds: standard deviation of each component. By default the paper's; the authors' code has
        0.05, 0.1, 0.5.
      shares: share of each component.
      bounds: least and largest budget.
    """

    means: tuple[float, ...] = (0.1, 1.0, 5.0)
    stds: tuple[float, ...] = (0.01, 0.05, 0.5)
    shares: tuple[float, ...] = (0.7, 0.2, 0.1)
    bounds: tuple[float, float] = (0.1, 10.0)

    def __post_init__(self) -> None:
        check_shares(self.means, self.shares)
        if len(self.stds) != len(self.means) or min(self.stds) < 0:
            raise BadInputError("a mixture of normals needs one standard deviation >= 0 per mean")
        check_bounds(self.bounds)

    def quantiles(self, u: np.ndarray) -> np.ndarray:
        # ``u`` picks the component by the share that it falls in, and the value by where in it.
        index, rest = component(u, self.shares)
        normal = special.ndtri(np.clip(rest, 1e-12, 1 - 1e-12))
        return np.clip(np.asarray(self.means)[index] + np.asarray(self.stds)[index] * normal,
                       *self.bounds)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BoundedPareto(BudgetDistribution):
    """A Pareto distribution, a heavy tail of relaxed records, clipped to bounds.

    Attributes:
      shape: shape parameter: 1 in the paper (classical), 4 in the authors' code (lomax).
      kind: ``classical``: bounds[0] times a Pareto variable; ``lomax``: bounds[0] plus a Pareto
        variable minus 1.
      bounds: least and largest budget.
    """

    shape: float = 1.0
    kind: Literal["classical", "lomax"] = "classical"
    bounds: tuple[float, float] = (0.1, 10.0)

    def __post_init__(self) -> None:
        positive("the shape of a Pareto", self.shape)
        check_bounds(self.bounds)

    def quantiles(self, u: np.ndarray) -> np.ndarray:
        tail = stats.pareto.ppf(u, self.shape)
        low, high = self.bounds
        return np.clip(low * tail if self.kind == "classical" else low + tail - 1.0, low, high)


@dataclasses.dataclass(frozen=True)
class Constant(BudgetDistribution):
    """The same budget for all."""

    epsilon: float = 1.0

    def quantiles(self, u: np.ndarray) -> np.ndarray:
        return np.full(len(u), float(self.epsilon))


def component(u: np.ndarray, shares: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the share of [0, 1) that each number falls in, and where within it, in [0, 1)."""
    edges = np.concatenate([[0.0], np.cumsum(shares)])
    index = np.clip(np.searchsorted(edges, u, "right") - 1, 0, len(shares) - 1)
    width = np.asarray(shares)[index]
    return index, np.where(width > 0, (u - edges[index]) / np.where(width > 0, width, 1.0), 0.0)


def check_shares(values: tuple[float, ...], shares: tuple[float, ...]) -> None:
    """Raises BadInputError unless there is one share for each value, and shares sum to 1."""
    check_budgets(np.asarray(values))
    if len(values) != len(shares) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise BadInputError(
            f"{len(values)} budgets need as many shares >= 0 that sum to 1, but "
            f"privacy.budgets.shares is {list(shares)}"
        )


def check_bounds(bounds: tuple[float, float]) -> None:
    """Raises BadInputError unless the bounds are two increasing numbers above 0."""
    if len(bounds) != 2 or not 0 < bounds[0] < bounds[1]:
        raise BadInputError(f"the bounds of budgets are {list(bounds)}: give two, 0 < low < high")


def mean_over(distribution: BudgetDistribution, points: int = 4096) -> np.ndarray:
    """Returns evenly spread quantiles, a public stand-in for the secret list of budgets."""
    return distribution.quantiles((np.arange(points) + 0.5) / points)


def budgets_of_column(
    values: Sequence[Any] | np.ndarray, column: str, where: Callable[[int], str] = "row {}".format
) -> np.ndarray:
    """Returns budgets from a column of the data, float64 [n].

    Args:
      values: one value per record; text is read as a number.
      column: name of the column.
      where: returns the place of a value in words.

    Raises:
      BadInputError: a value is no number >= 0; the message names place and value.
    """
    if isinstance(values, np.ndarray) and values.size != len(values):
        raise BadInputError(
            f"the column {column!r} holds {values.size // max(len(values), 1)} numbers for each "
            "record, but a budget is one number: name another column"
        )
    numbers = np.empty(len(values))
    for i, value in enumerate(np.ravel(values).tolist()):
        try:
            numbers[i] = float(value)
        except (TypeError, ValueError):
            numbers[i] = math.nan
        if not numbers[i] >= 0:
            raise BadInputError(
                f"{where(i)} has {value!r} in column {column!r}, but a record's epsilon must be a "
                "number >= 0 (0 for a record that takes no part, inf for none): correct it"
            )
    return numbers


# ---- of a configuration --------------------------------------------------------------------------


def distribution(config: BudgetConfig) -> BudgetDistribution | None:
    """Returns the distribution of a configuration; None if budgets come from a column."""
    if config.kind == "three_levels":
        return ThreeLevels(config.levels, config.shares)
    if config.kind == "mix_gauss":
        return BoundedMixGauss(config.levels, config.stds, config.shares, config.bounds)
    if config.kind == "pareto":
        return BoundedPareto(config.shape, config.pareto, config.bounds)
    if config.kind == "constant":
        return Constant(config.levels[0])
    return None


def column_budgets(config: BudgetConfig, store: Store) -> np.ndarray:
    """Returns the budgets of a store's records, from a field or from a CSV file by record id."""
    if config.path is None:
        records = store.read(np.arange(store.num_examples))
        if config.column not in records:
            raise BadInputError(
                f"the data have no field {config.column!r} (they have {', '.join(records)}): name "
                "one in privacy.budgets.column, or give privacy.budgets.path"
            )
        owners = np.repeat(np.arange(store.num_users), store.examples_per_user)
        return budgets_of_column(
            records[config.column],
            config.column,
            lambda i: f"record {i} of the data, of {store.user_ids(owners[i : i + 1])[0]!r},",
        )
    path = on_disk(config.path)
    if not path.is_file():
        raise BadInputError(f"{path} does not exist: put the CSV file of budgets there")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not {"record", config.column} <= set(reader.fieldnames or ()):
            raise BadInputError(f"{path} needs the columns 'record' and {config.column!r}")
        given: dict[str, tuple[str, int]] = {}  # budget and line of a record
        for row in reader:
            if row["record"] in given:
                raise BadInputError(
                    f"{path} has two rows for the record {row['record']!r}: keep one"
                )
            given[row["record"]] = row[config.column], reader.line_num
    names = store.user_ids(range(store.num_users))
    missing = next((name for name in names if name not in given), None)
    if missing is not None:
        raise BadInputError(f"{path} has no budget for the record {missing!r}: give it a row")
    values = budgets_of_column(
        [given[name][0] for name in names],
        config.column,
        lambda i: f"{path}, line {given[names[i]][1]} (record {names[i]!r}),",
    )
    return np.repeat(values, store.examples_per_user)


def record_budgets(
    config: BudgetConfig, store: Store, data: FederatedData, keys: np.ndarray
) -> np.ndarray:
    """Returns each record's budget in the order of ``data``, float64 [num_records].

    A budget that is drawn depends only on the record's id, its place among the person's records and
    the public seed, so that it reveals nothing about other people.
    """
    drawn_from = distribution(config)
    if drawn_from is None:
        return column_budgets(config, store)[data.order]
    subjects = np.repeat(np.arange(store.num_users), store.examples_per_user)
    # proof: rpdp-budget-1
    u = uniforms(np.asarray(keys, np.uint64)[subjects], record_numbers(subjects), config.seed, 7)
    return drawn_from.quantiles(u)[data.order]


def public_quantiles(config: BudgetConfig) -> np.ndarray | None:
    """Returns quantiles of the public distribution of budgets; None if none is declared."""
    declared = distribution(config)
    if declared is not None:
        return mean_over(declared)
    if config.declared is None:
        return None
    return check_budgets(np.asarray(config.declared, np.float64))
