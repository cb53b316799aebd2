"""A federation's data: records sorted by silo, and within a silo by subject.

Positions count records in that order. A silo knows the subject of each of its records and nothing
about other silos: no identity is resolved across silos.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from dpfl_jax.data.store import fingerprint_of
from dpfl_jax.errors import BadInputError


class RecordSource(Protocol):
    """Random access to records."""

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the records at ``positions`` [m] as arrays [m, ...]."""


@dataclasses.dataclass(frozen=True, eq=False)
class Silo:
    """The records of one silo.

    Attributes:
      index: number of the silo in the federation.
      first: position of the silo's first record.
      subject_offsets: int64 [num_subjects + 1]; the s-th subject has the local records
        offsets[s]:offsets[s+1].
      rates: float64 [num_records], ``FederatedData.rates`` of the silo's records, or None.
      stay: int64 [num_records], ``FederatedData.stay`` of the silo's records, or None.
    """

    index: int
    first: int
    subject_offsets: np.ndarray
    rates: np.ndarray | None = None
    stay: np.ndarray | None = None

    @property
    def num_records(self) -> int:
        """Number of records of all subjects in the silo."""
        return int(self.subject_offsets[-1])

    @property
    def num_subjects(self) -> int:
        """Number of subjects with a record in the silo."""
        return len(self.subject_offsets) - 1

    @functools.cached_property
    def subject_of_record(self) -> np.ndarray:
        """The local subject of each local record, int64 [num_records], sorted."""
        return np.repeat(np.arange(self.num_subjects), np.diff(self.subject_offsets))

    def at_round(self, round_index: int) -> Silo:
        """Returns the silo in a round: records that have left have rate 0, and are not drawn."""
        if self.stay is None or self.rates is None or not (self.stay <= round_index).any():
            return self
        # proof: rpdp-leaving-1
        return dataclasses.replace(self, rates=np.where(self.stay > round_index, self.rates, 0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class FederatedData:
    """Records of subjects, spread over silos.

    Attributes:
      records: source that records are read from.
      order: int64 [num_records], place in ``records`` of each position.
      subjects: int64 [num_records], subject of each position, numbered over the federation.
      silo_offsets: int64 [num_silos + 1]; silo i has the positions offsets[i]:offsets[i+1].
      num_subjects: number of subjects in the federation, before caps.
      rates: float64 [num_records], sampling rate q_j of each position with personal budgets (rPDP),
        else None. Each silo's secret.
      stay: int64 [num_records], number of rounds after which each record leaves; None: all stay.
        Each silo's secret.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.federation import ArrayRecords, FederatedData
      >>> records = ArrayRecords({"x": np.eye(4, dtype="float32")})
      >>> people, hospitals = np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1])
      >>> data = FederatedData.from_assignment(records, people, hospitals, num_silos=2)
      >>> [silo.num_subjects for silo in data.silos]
      [2, 2]
    """

    records: RecordSource
    order: np.ndarray
    subjects: np.ndarray
    silo_offsets: np.ndarray
    num_subjects: int
    rates: np.ndarray | None = None
    stay: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Checks rates, and that records are sorted by subject within each silo.

        Raises:
          BadInputError: records are not sorted, or there is not one rate from 0 to 1 for each.
        """
        if self.rates is not None:
            rates = np.asarray(self.rates, np.float64)
            if rates.shape != (self.num_records,) or not ((rates >= 0) & (rates <= 1)).all():
                raise BadInputError(
                    f"there are {rates.size} sampling rates for {self.num_records} records: give "
                    "one from 0 to 1 for each"
                )
            object.__setattr__(self, "rates", rates)
        if self.stay is not None and np.shape(self.stay) != (self.num_records,):
            raise BadInputError("give one number of rounds to stay for each record")
        inside = np.ones(max(len(self.subjects) - 1, 0), bool)
        starts = np.asarray(self.silo_offsets)[1:-1]
        inside[starts[(starts > 0) & (starts < len(self.subjects))] - 1] = False
        if (np.diff(self.subjects)[inside] < 0).any():
            raise BadInputError(
                "the records of a silo are not sorted by subject, so that one subject would count "
                "as several: make the data with FederatedData.from_assignment"
            )

    @classmethod
    def from_assignment(
        cls,
        records: RecordSource,
        subjects: np.ndarray,
        silos: np.ndarray,
        num_silos: int,
        keep: np.ndarray | None = None,
    ) -> FederatedData:
        """Returns the data of a federation, with records sorted by silo and subject.

        Args:
          records: source that records are read from.
          subjects: int [n], subject of each record.
          silos: int [n], silo of each record, in 0..num_silos-1.
          num_silos: number of silos, some of which may be empty.
          keep: bool [n], records that may be used; None: all.

        Raises:
          BadInputError: lengths differ, or a silo is out of range.
        """
        subjects, silos = np.asarray(subjects, np.int64), np.asarray(silos, np.int64)
        if subjects.shape != silos.shape or subjects.ndim != 1:
            raise BadInputError(
                f"there are {subjects.shape} subjects but {silos.shape} silos: give one of each "
                "for every record"
            )
        if len(silos) and not 0 <= silos.min() <= silos.max() < num_silos:
            raise BadInputError(
                f"a record is assigned to a silo outside 0..{num_silos - 1}: number the silos from "
                "0, or raise num_silos"
            )
        order = np.lexsort((subjects, silos))
        if keep is not None:
            order = order[np.asarray(keep, bool)[order]]
        counts = np.bincount(silos[order], minlength=num_silos)
        return cls(
            records=records,
            order=order,
            subjects=subjects[order],
            silo_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            num_subjects=int(subjects.max()) + 1 if len(subjects) else 0,
        )

    @property
    def num_silos(self) -> int:
        """Number of silos, empty ones included."""
        return len(self.silo_offsets) - 1

    @property
    def num_records(self) -> int:
        """Number of records in all silos, after caps."""
        return int(self.silo_offsets[-1])

    @functools.cached_property
    def silos(self) -> tuple[Silo, ...]:
        """All silos, empty ones included."""
        return tuple(self._silo(i) for i in range(self.num_silos))

    def _silo(self, index: int) -> Silo:
        first, stop = int(self.silo_offsets[index]), int(self.silo_offsets[index + 1])
        mine = self.subjects[first:stop]
        starts = np.flatnonzero(np.diff(mine, prepend=-1))
        offsets = np.concatenate([starts, [len(mine)]]).astype(np.int64)
        secrets = [None if x is None else x[first:stop] for x in (self.rates, self.stay)]
        return Silo(index, first, offsets, *secrets)

    def with_rates(self, rates: np.ndarray, stay: np.ndarray | None = None) -> FederatedData:
        """Returns a copy whose records have these rates and numbers of rounds to stay."""
        return dataclasses.replace(self, rates=rates, stay=stay)

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the records at ``positions`` [m] as arrays [m, ...]."""
        return self.records.read(self.order[positions])

    @property
    def fingerprint(self) -> str:
        """Hex digest of the records, of which silo holds which, and of rates.

        Computed afresh at each call, because arrays in memory may have been changed.
        """
        most = int(self.order.max(initial=-1)) + 1
        digest = hashlib.sha256(fingerprint_of(self.records, most).encode())
        for array in (self.order, self.subjects, self.silo_offsets):
            digest.update(np.ascontiguousarray(array, np.int64).tobytes())
        for secret in (self.rates, self.stay):
            digest.update(b"" if secret is None else np.ascontiguousarray(secret).tobytes())
        return digest.hexdigest()

    def largest_counts(self) -> np.ndarray:
        """Returns the most records of one subject in each silo, int64 [num_silos]. Private."""
        return np.array(
            [int(np.diff(s.subject_offsets).max(initial=0)) for s in self.silos], np.int64
        )

    def silos_of_subjects(self) -> np.ndarray:
        """Returns in how many silos each subject has a record, int64 [num_subjects]. Private."""
        counts = np.zeros(self.num_subjects, np.int64)
        for i in range(self.num_silos):
            mine = self.subjects[self.silo_offsets[i] : self.silo_offsets[i + 1]]
            counts[np.unique(mine)] += 1
        return counts


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayRecords(RecordSource):
    """Records in memory: ``arrays`` with a common leading axis.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.federation import ArrayRecords
      >>> ArrayRecords({"x": np.eye(3)}).read(np.array([0, 2]))["x"].shape
      (2, 3)
    """

    arrays: Mapping[str, np.ndarray]

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[positions] for name, array in self.arrays.items()}
