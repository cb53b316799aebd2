"""What all parties of a run must have alike: the study they agreed on, and the plan made of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any

from dpfl_jax.config import RunConfig, config_to_dict
from dpfl_jax.config.load import differing_key
from dpfl_jax.data.sets import SETS
from dpfl_jax.errors import BadInputError
from dpfl_jax.flower.wire import MessageError
from dpfl_jax.mechanisms.calibrated import check_noise_multiplier

_MOST_NAME = 300
_NAME = re.compile(r"[^/\\.\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*")

# What each party has for itself: where its data lie, what it keeps, its ledger.
_OWN_DATA = (
    "source", "path", "user_column", "text_column", "target_column", "input_columns", "silo_column",
    "delimiter", "encoding", "decimal", "on_bad_row", "tokenizer", "public_fraction",
)  # fmt: skip
_OWN = ("name", "seed", "train", "processes", "metrics", "eval")
_OWN_PRIVACY = ("ledger", "account", "budget")


def is_name(value: Any) -> bool:
    """Whether it may name a run or a silo: it becomes part of a path and of a log."""
    if not isinstance(value, str) or len(value) > _MOST_NAME or not value.isprintable():
        return False
    return _NAME.fullmatch(value) is not None


def study_of(config: Any) -> dict[str, Any]:
    """The part of a configuration that is the same at all parties.

    Raises:
      BadInputError: a configuration that cannot be run by silos that are elsewhere.
    """
    _check(config)
    found = json.loads(json.dumps(config_to_dict(config), sort_keys=True))
    study = {name: section for name, section in found.items() if name not in _OWN}
    for section, own in (("data", _OWN_DATA), ("privacy", _OWN_PRIVACY)):
        study[section] = {k: v for k, v in study[section].items() if k not in own}
    return study


def _check(config: Any) -> None:
    if config.variant == "central":
        raise BadInputError(
            f"mechanism.kind is {config.mechanism.kind}, which trains in one place: silos "
            "elsewhere add noise of their own (hi_grad_avg, minibatch_sgd, ...), while users of "
            "central training, devices with local steps too, trust a server that has their updates "
            "before noise, which is simulated alone (dpfl train)"
        )
    if config.seed is not None:
        raise BadInputError(
            "seed is set, but a silo's key is secret and its own: leave seed unset in the "
            "configuration of a federation"
        )
    if config.eval.baseline:
        raise BadInputError(
            "eval.baseline trains without privacy, which no silo elsewhere does: set it to false"
        )
    if config.variant == "isrl":
        _check_isrl(config)
        return
    section, privacy = config.federation, config.privacy
    wrong = None
    if config.model.module is not None:
        wrong = (
            "model.module is code, and no silo could tell whether the others run the same: set "
            "model.kind"
        )
    elif section.partition != "natural":
        wrong = f"federation.partition is {section.partition}: silos hold their own, set natural"
    elif section.silos_per_round is not None:
        wrong = (
            "federation.silos_per_round is drawn by a server, which a silo cannot check: set "
            "federation.participation_prob, by which every silo draws for itself"
        )
    elif privacy.delta is None:
        wrong = "privacy.delta is not set: nobody knows how many subjects all silos hold together"
    elif not config.mechanism.private:
        wrong = f"mechanism.kind is {config.mechanism.kind}, as configured without any guarantee"
    elif config.data.split != "by_user":
        wrong = "data.split is within_user: silos hold out subjects, set by_user"
    elif config.mechanism.participation.personal and privacy.unreachable != "exclude":
        wrong = (
            "privacy.unreachable is error, but a silo that refuses would tell the server of its "
            "people's least budget: set exclude"
        )
    elif section.max_silos_per_subject is None:
        wrong = (
            "federation.max_silos_per_subject is not set: state in how many silos a person may "
            "have records"
        )
    if wrong:
        raise BadInputError(wrong)


def _check_isrl(config: RunConfig) -> None:
    data, section, wrong = config.data, config.federation, None
    task = SETS[data.source].task if data.source in SETS else None
    known = task is not None and task.scaled  # by constants that no record moves
    if section.partition != "natural":
        wrong = f"federation.partition is {section.partition}: silos hold their own, set natural"
    elif not data.scale and not known:
        wrong = (
            "data.scale is not set, and no public records of all silos can be set aside: declare "
            "the middle and half width of each column"
        )
    elif section.answering is not None:
        key = "silos_law" if section.silos_law is not None else "silos_per_round"
        wrong = f"federation.{key} is set, but who answers is found out: remove it"
    elif config.privacy.epsilon is None:
        wrong = "privacy.epsilon is null: silos run with privacy"
    if wrong:
        raise BadInputError(wrong)


def first_difference(mine: Any, theirs: Any) -> str | None:
    """Where two studies differ, in words; None if nowhere.

    Without the values: who hears of it may not be who knows them.
    """
    key = differing_key(mine, theirs)
    return None if key is None else f"{key} is another here than there"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: public, and the same at all parties to the last digit.

    Attributes:
      run: name of the run, unlike any other's.
      study: what was agreed on (``study_of``).
      silos: of each its ``name`` and public sizes, in order.
      noise: noise multiplier of each silo.

    Examples:
      >>> from dpfl_jax.flower import Plan
      >>> rows = [{"name": "aarau", "records": 23}, {"name": "bern", "records": 17}]
      >>> plan = Plan("run 1", study={}, silos=rows, noise=[1.2, 1.4])
      >>> len(plan.silos)
      2
    """

    run: str
    study: dict[str, Any]
    silos: list[dict[str, Any]]
    noise: list[float]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON, which all parties hash."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Any) -> Plan:
        """From plain JSON.

        Raises:
          MessageError: it is none.
          BadInputError: noise that is no noise multiplier.
        """
        try:
            plan = cls(**plain)
            names = [row["name"] for row in plan.silos]
            whole = is_name(plan.run) and isinstance(plan.study, dict)
            whole &= all(map(is_name, names))
            sizes = [v for row in plan.silos for key, v in row.items() if key != "name"]
            whole &= all(type(size) is int and 0 < size < 2**31 for size in sizes)
            whole &= len(plan.noise) == len(names) == len(set(names))
            whole &= all(isinstance(sigma, float) for sigma in plan.noise)
        except (TypeError, KeyError, AttributeError):
            whole = False
        if not whole:
            raise MessageError("what the server sent is no plan")
        for sigma in plan.noise:
            check_noise_multiplier(sigma)
        return plan

    @property
    def digest(self) -> str:
        """Identifies it: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def names(self) -> list[str]:
        """Names of the silos, in order."""
        return [row["name"] for row in self.silos]
