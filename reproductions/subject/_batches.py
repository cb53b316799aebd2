"""What random batches of a silo look like: how many people, and how many records of one of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from dpfl_jax.federation.data import Silo
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Poisson


@dataclasses.dataclass(frozen=True)
class BatchStatistics:
    """Of random batches of one silo. Computed from private data: never publish it.

    Attributes:
      largest_group: int64 [draws], Z: most records of one subject in each batch.
      distinct_subjects: int64 [draws], subjects in each batch.
      records: int64 [draws], records in each batch.
    """

    largest_group: np.ndarray
    distinct_subjects: np.ndarray
    records: np.ndarray

    @property
    def dominant_group(self) -> int:
        """The most frequent Z."""
        return int(np.bincount(self.largest_group).argmax())


def batch_statistics(silo: Silo, prob: float, draws: int, key: RootKey) -> BatchStatistics:
    """Simulates Poisson batches of one silo.

    Args:
      silo: whose batches.
      prob: q, probability of each record.
      draws: batches.
      key: root key of the simulation (not of a run).
    """
    scheme = Poisson(prob)
    largest, distinct, records = (np.zeros(draws, np.int64) for _ in range(3))
    for i in range(draws):
        counts = np.bincount(silo.subject_of_record[scheme.indices(key, i, silo.num_records)])
        largest[i] = counts.max(initial=0)
        distinct[i] = np.count_nonzero(counts)
        records[i] = counts.sum()
    return BatchStatistics(largest, distinct, records)
