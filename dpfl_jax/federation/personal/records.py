"""The table of what every record asked for and spent. It belongs to the silos: private."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np

from dpfl_jax.accounting import NoiseLaw
from dpfl_jax.accounting.rates import TwoStage, solver
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.personal.policies import Assignment
from dpfl_jax.files import csv_text, unquoted
from dpfl_jax.run.directory import RECORDS, RECORDS_SUMMARY, write_atomically

BUDGETS = "private/budgets.csv"
COLUMNS = ("record", "silo", "budget", "rate", "rounds", "epsilon_spent")


@dataclasses.dataclass(frozen=True, eq=False)
class Personal:
    """Budgets, rates and stays of all records, in the order of the federation's data.

    Attributes:
      setting: what is accounted.
      budgets: float64 [n].
      assignment: rates and stays.
      silos: int64 [n], silo of each record.
      names: id of each record.
      groups: (budget, rate, stay) of budgets of the public distribution, increasing: all of them
        if they are few, else the least and the largest; none if there is no such distribution.
      noise: law of the noise.
    """

    setting: TwoStage
    budgets: np.ndarray
    assignment: Assignment
    silos: np.ndarray
    names: tuple[str, ...]
    groups: tuple[tuple[float, float, int], ...] = ()
    noise: NoiseLaw = "exact"

    def spent(self, rounds: int) -> np.ndarray:
        """Upper bounds on the epsilon of every record after ``rounds`` rounds, float64 [n]."""
        rates, stay = self.assignment.rates, self.assignment.stay
        return solver(self.setting).spent_after(rates, stay, rounds)

    def check(self, rounds: int) -> np.ndarray:
        """``spent``, after making sure that nobody exceeds its budget."""
        spent = self.spent(rounds)
        over = np.flatnonzero(spent > self.budgets)
        if len(over):
            row = int(over[0])
            raise RuntimeError(
                f"record {self.names[row]} has spent {spent[row]:.6g} of {self.budgets[row]:.6g}"
            )
        return spent

    def check_rates(self, data: FederatedData) -> None:
        """Holds what silos will draw by against each record's own budget.

        Args:
          data: as the run draws from them.

        Raises:
          BadInputError: a record would spend more than it allows; the sentence names the first.
        """
        for index, own in enumerate(data.silos):
            mine = np.flatnonzero(self.silos == index)
            rates = np.zeros(0) if own.rates is None else own.rates
            if len(rates) != len(mine):
                raise BadInputError(
                    f"silo {index} holds {len(mine)} records with budgets, but {len(rates)} "
                    "sampling rates: make the rates for these records (personalise)"
                )
            rounds = self.setting.rounds
            stay = np.full(len(rates), rounds) if own.stay is None else own.stay
            spent = solver(self.setting).spent_after(rates, stay, rounds)
            over = np.flatnonzero(~(spent <= self.budgets[mine]))
            if len(over):
                row, first = mine[over[0]], over[0]
                raise BadInputError(
                    f"record {self.names[row]!r} allows epsilon {self.budgets[row]:g}, but silo "
                    f"{index} would draw it at the rate {rates[first]:.4g} and spend "
                    f"{spent[first]:.4g} (it would overspend {len(over)} of its {len(mine)} "
                    "records): make the rates for these records, in their order (personalise)"
                )

    def remember(self, directory: pathlib.Path) -> None:
        """Writes what every record asked for under ``private/`` (owner only), once a run."""
        if not (directory / BUDGETS).exists():
            text = csv_text(zip(self.names, self.budgets.tolist()))
            write_atomically(directory / BUDGETS, text, mode=0o600)

    def check_unchanged(self, directory: pathlib.Path, source: str) -> None:
        """Raises BadInputError, naming a record, if a run began with other budgets of the records.

        Args:
          directory: of the run; nothing is compared if it does not remember.
          source: where budgets come from now, in words.
        """
        if not (directory / BUDGETS).exists():
            return
        with (directory / BUDGETS).open(newline="") as file:
            rows = list(csv.reader(file))
        if [unquoted(name) for name, _ in rows] != list(self.names):
            return  # other records: the run directory says so
        for name, (_, before), now in zip(self.names, rows, self.budgets.tolist(), strict=True):
            if float(before) != now:
                raise BadInputError(
                    f"record {name!r} has the budget {now:g} in {source}, but the run in "
                    f"{directory} began with {float(before):g}: bring that back, or start another "
                    "run in another --run-dir"
                )

    def summary(self, rounds: int) -> dict[str, Any]:
        """Counts and extremes (private: computed from the list of budgets)."""
        spent = self.check(rounds)
        rates, stay = self.assignment.rates, np.minimum(self.assignment.stay, rounds)
        with np.errstate(divide="ignore", invalid="ignore"):
            used = np.nan_to_num(spent / self.budgets, posinf=np.inf)
        return {
            "policy": self.assignment.policy,
            "records": len(rates),
            "rounds": rounds,
            "over_budget": int((spent > self.budgets).sum()),
            "never_sampled": int(((rates == 0) | (stay == 0)).sum()),
            "left_early": int(((stay < rounds) & (rates > 0)).sum()),
            "budget": _spread(self.budgets),
            "rate": _spread(rates),
            "epsilon_spent": _spread(spent),
            "largest_share_of_budget": float(used.max(initial=0.0)),
            **self.assignment.facts,
        }

    def write(self, directory: pathlib.Path, rounds: int) -> dict[str, Any]:
        """Writes the table and its summary under ``private/`` (owner only); returns the summary."""
        summary = self.summary(rounds)
        spent, stay = self.spent(rounds), np.minimum(self.assignment.stay, rounds)
        columns = (self.silos, self.budgets, self.assignment.rates, stay, spent)
        text = csv_text([COLUMNS, *zip(self.names, *(c.tolist() for c in columns))])
        (directory / "private").mkdir(mode=0o700, exist_ok=True)
        write_atomically(directory / RECORDS, text, mode=0o600)
        told = json.dumps(_plain(summary), indent=2, allow_nan=False)
        write_atomically(directory / RECORDS_SUMMARY, told + "\n", mode=0o600)
        return summary


def _plain(values: Any) -> Any:
    """Infinities, which JSON lacks, become the string "inf"."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    return "inf" if values == math.inf else values


def _spread(values: np.ndarray) -> dict[str, float]:
    names = ("least", "median", "mean", "most")
    found = (values.min(), np.median(values), values.mean(), values.max())
    return {name: float(value) for name, value in zip(names, found)}


def read_records(directory: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The summary and the rows of a finished run.

    Raises:
      BadInputError: the run has no such table.
    """
    if not (directory / RECORDS).exists():
        raise BadInputError(
            f"{directory} holds no table of records: only runs with personal budgets "
            "(mechanism.kind=rpdp) that have written their report do"
        )
    summary = json.loads((directory / RECORDS_SUMMARY).read_text())
    with (directory / RECORDS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return summary, [row | {COLUMNS[0]: unquoted(row[COLUMNS[0]])} for row in rows]
