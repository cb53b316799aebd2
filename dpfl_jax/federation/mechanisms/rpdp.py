"""rPDP-FL: DP-SGD inside each silo in which every record has a sampling rate of its own.

Source: Liu et al. 2024 (CCS), "Cross-silo federated learning with record-level personalized
differential privacy", Algorithms 1 and 3, section 6.2.

    S   = each record j of the silo independently with probability q_j
    g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / b

Departures. b is a public constant: the paper divides by |S|, which tells the size of the secret
batch and is 0 when it is empty. Records whose budget is used up
leave: the authors' code only logs it. The round after which a record leaves depends on its own rate
and budget alone, and what it then spent is its rate's epsilon after that many rounds. Rounds in
which the silo sits out are charged like all others, which is what makes the amplification by
participation true.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpfl_jax.accounting.cells import NoisedSums, TwoStagePoisson
from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.config.kinds import DERIVED
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import Silo
from dpfl_jax.federation.mechanisms.base import SiloFacts, SiloMechanism
from dpfl_jax.mechanisms.participation import require_positive
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import PersonalizedPoisson, Poisson
from dpfl_jax.sampling.base import binomial_bound


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RPDP(SiloMechanism):
    """Local DP-SGD with personal sampling rates. ``sampling_prob`` bounds them; it is public.

    Attributes:
      rates: float64 [num_records], q_j of the silo's records in order. Secret: the silo's own.
      stay: int64 [num_records], rounds after which each record leaves; None: all stay. Secret.
      setting: what is accounted, the same for all silos.
      expected_batch: b, public; never computed from the records or their budgets. None until
        personalised: then by default from the public distribution of budgets.
    """

    batch_size: float | None = dataclasses.field(default=None, metadata=DERIVED)
    sampling_prob: float | None = dataclasses.field(default=1.0, metadata=DERIVED)
    rates: np.ndarray | None = dataclasses.field(default=None, metadata=DERIVED)
    stay: np.ndarray | None = dataclasses.field(default=None, metadata=DERIVED)
    setting: TwoStage | None = dataclasses.field(default=None, metadata=DERIVED)
    expected_batch: float | None = None

    kind: ClassVar[str] = "rpdp"
    unit: ClassVar[str] = "record"

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        if self.expected_batch is not None:
            require_positive("expected_batch", self.expected_batch)
        if self.max_items_per_subject != 1:  # a subject of several costs what no event here says
            raise BadInputError("rpdp protects records: set max_items_per_subject to 1")
        if self.rates is None:
            return
        rates = np.asarray(self.rates, np.float64)
        object.__setattr__(self, "rates", rates)
        assert self.sampling_prob is not None
        if len(rates) and not (rates.min() >= 0 and rates.max() <= self.sampling_prob):
            raise BadInputError(
                f"every personal sampling rate must lie between 0 and {self.sampling_prob:g}"
            )
        if self.stay is not None and np.shape(self.stay) != rates.shape:
            raise BadInputError("give one number of rounds to stay for each sampling rate")

    def at_round(self, round_index: int) -> RPDP:
        """The mechanism in a round: records that have left are drawn no more."""
        if self.stay is None or self.rates is None or not (self.stay <= round_index).any():
            return self
        # proof: rpdp-leaving-1
        return dataclasses.replace(self, rates=np.where(self.stay > round_index, self.rates, 0.0))

    def select(self, silo: Silo, key: RootKey, step: int) -> np.ndarray:
        """Each record by its own coin."""
        if silo.num_records == 0:
            return np.zeros(0, np.int64)
        return PersonalizedPoisson(self._rates(silo)).indices(key, step, silo.num_records)

    def usual_size(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        """By the public expected batch; the rates are the silo's own."""
        rate = min(1.0, self.divisor(facts) / max(facts.num_records, 1))
        return binomial_bound(facts.num_records, rate, tail)

    def most_units(self, facts: SiloFacts) -> int:
        """All records: what the silo's own rates allow is nobody else's to know."""
        return facts.num_records

    def size_bound(self, silo: Silo, tail: float = 1e-15) -> int:
        """A batch size that a draw exceeds with probability at most ``tail``."""
        if silo.num_records == 0:
            return 0
        return PersonalizedPoisson(self._rates(silo)).size_bound(silo.num_records, tail)

    def expected_records(self, facts: SiloFacts) -> float:
        """The declared number."""
        return min(self.divisor(facts), facts.num_records)

    def divisor(self, facts: SiloFacts) -> float:
        """The public constant b."""
        del facts
        if self.expected_batch is None:
            raise BadInputError("this rpdp mechanism has no expected batch: personalise it")
        # proof: rpdp-divisor-1
        return self.expected_batch

    def _rates(self, silo: Silo) -> np.ndarray:
        if self.rates is None or len(self.rates) != silo.num_records:
            have = 0 if self.rates is None else len(self.rates)
            raise BadInputError(
                f"silo {silo.index} has {silo.num_records} records but {have} sampling rates"
            )
        return self.rates

    def to_json(self) -> dict[str, Any]:
        """Without what belongs to the silo: its records' rates and stays."""
        secret = ("rates", "stay", "setting")
        return {k: v for k, v in super().to_json().items() if k not in secret}

    def contribution(self, unit: str) -> None:
        """Records are drawn, and a subject has one in a silo."""

    def scheme(self, facts: SiloFacts) -> TwoStagePoisson:
        """Of a record at the public bound of the rates; other records spend less."""
        del facts
        if self.setting is None:
            raise BadInputError("this rpdp mechanism has no accounting setting: personalise it")
        assert self.sampling_prob is not None
        return self.setting.scheme(self.sampling_prob)

    def subject_event(self, facts: SiloFacts, steps: int) -> Any:
        """Of a subject in several silos, which may take part together: that amplifies nothing."""
        scheme = Poisson(self.probability(facts))
        return NoisedSums(scheme, self.sigma, steps, facts.num_records).event()
