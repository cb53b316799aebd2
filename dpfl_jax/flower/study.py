"""What all parties of a run agree on: the study, and the plan made of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
from typing import Any

from dpfl_jax.config import RunConfig, config_to_dict, validate_config
from dpfl_jax.config.load import differing_key, read_sections, refuse_code
from dpfl_jax.data.sets import SETS
from dpfl_jax.errors import BadInputError
from dpfl_jax.flower.wire import MessageError
from dpfl_jax.mechanisms.calibrated import check_noise_multiplier

NO_CODE = "a silo runs what is installed with it: name a column, or a data set of the library"
_MOST_NAME = 300
_NAME = re.compile(r"[^/\\.\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*")

# Left out of the study, as each party sets it: where its data lie, what it keeps, its ledger.
_LOCAL_DATA = (
    "source", "path", "user_column", "text_column", "target_column", "input_columns", "silo_column",
    "delimiter", "encoding", "decimal", "on_bad_row", "tokenizer", "public_fraction",
)  # fmt: skip
_LOCAL = ("name", "seed", "train", "processes", "metrics", "eval")
_LOCAL_PRIVACY = ("ledger", "account", "budget")


def is_name(value: Any) -> bool:
    """Whether it may name a run or a silo: it becomes part of a path and of a log."""
    if not isinstance(value, str) or len(value) > _MOST_NAME or not value.isprintable():
        return False
    return _NAME.fullmatch(value) is not None


def study_of(config: Any) -> dict[str, Any]:
    """The part of a configuration that is the same at all parties.

    Raises:
      BadInputError: a configuration that remote silos cannot run.
    """
    _check(config)
    sections = json.loads(json.dumps(config_to_dict(config), sort_keys=True))
    study = {name: section for name, section in sections.items() if name not in _LOCAL}
    for section, local in (("data", _LOCAL_DATA), ("privacy", _LOCAL_PRIVACY)):
        study[section] = {k: v for k, v in study[section].items() if k not in local}
    return study


def digest_of(config: Any) -> str:
    """16 hexadecimal digits by which parties can compare their studies."""
    text = json.dumps(study_of(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(config: RunConfig) -> None:
    if config.variant == "central":
        raise BadInputError(
            f"mechanism.kind is {config.mechanism.kind}, which trains in one place: silos "
            "elsewhere add noise of their own (hi_grad_avg, minibatch_sgd, ...), while users of "
            "central training, devices with local steps too, trust a server that has their updates "
            "before noise, which is simulated alone (dpfl train)"
        )
    wrong = None
    if config.seed is not None:
        wrong = (
            "seed is set, but a silo's key is secret and its own: leave seed unset in the "
            "configuration of a federation"
        )
    elif config.eval.baseline:
        wrong = (
            "eval.baseline trains without privacy, which no silo elsewhere does: set it to false"
        )
    elif config.federation.partition != "natural":
        wrong = (
            f"federation.partition is {config.federation.partition}: silos hold their own, set "
            "natural"
        )
    wrong = wrong or (_wrong_isrl(config) if config.variant == "isrl" else _wrong_silos(config))
    if wrong:
        raise BadInputError(wrong)


def _wrong_silos(config: RunConfig) -> str | None:
    """What remote silos cannot run of a study with a server rule, in a sentence."""
    section, privacy = config.federation, config.privacy
    if config.model.module is not None:
        return (
            "model.module is code, and no silo could tell whether the others run the same: set "
            "model.kind"
        )
    if section.silos_per_round is not None:
        return (
            "federation.silos_per_round is drawn by a server, which a silo cannot check: set "
            "federation.participation_prob, by which every silo draws for itself"
        )
    if privacy.delta is None:
        return (
            "privacy.delta is not set, and it is not known how many subjects all silos hold "
            "together: set it"
        )
    if not config.mechanism.private:
        return f"mechanism.kind is {config.mechanism.kind}, as configured without any guarantee"
    if config.data.split != "by_user":
        return "data.split is within_user: silos hold out subjects, set by_user"
    if config.mechanism.participation.personal and privacy.unreachable != "exclude":
        return (
            "privacy.unreachable is error, but a silo that refuses would tell the server of its "
            "people's least budget: set exclude"
        )
    if section.max_silos_per_subject is None:
        return (
            "federation.max_silos_per_subject is not set: state in how many silos a person may "
            "have records"
        )
    return None


def _wrong_isrl(config: RunConfig) -> str | None:
    """What remote silos cannot run of a study without a trusted server, in a sentence."""
    data, section = config.data, config.federation
    task = SETS[data.source].task if data.source in SETS else None
    if not data.scale and not (task is not None and task.scaled):  # by constants
        return (
            "data.scale is not set, and no public records of all silos can be set aside: declare "
            "the middle and half width of each column"
        )
    if section.answering is not None:
        key = "silos_law" if section.silos_law is not None else "silos_per_round"
        return f"federation.{key} is set, but who answers shows in the run: remove it"
    if config.privacy.epsilon is None:
        return "privacy.epsilon is null: silos run with privacy"
    return None


def read_study(path: pathlib.Path) -> RunConfig:
    """Reads a study, which a server may have sent, without expanding environment variables.

    Otherwise a server could name a variable, and learn its value from how the studies differ.

    Raises:
      BadInputError: it is wrong, or names code.
    """
    raw = read_sections(path)
    refuse_code(raw, str(path), NO_CODE)
    return validate_config(raw, str(path))


def first_difference(mine: Any, theirs: Any) -> str | None:
    """Where two studies differ, in words; None if nowhere.

    Without the values, which the reader may not be allowed to know.
    """
    key = differing_key(mine, theirs)
    return None if key is None else f"{key} is another here than there"


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """The plan of one run: public, and the same at all parties to the last digit.

    Attributes:
      run: name of the run, unlike any other's.
      study: what was agreed on (``study_of``).
      silos: of each its ``name`` and public sizes, in order.
      noise: noise multiplier of each silo.

    Examples:
      >>> from dpfl_jax.flower import StudyPlan
      >>> rows = [{"name": "aarau", "records": 23}, {"name": "bern", "records": 17}]
      >>> plan = StudyPlan("run 1", study={}, silos=rows, noise=[1.2, 1.4])
      >>> len(plan.silos)
      2
    """

    run: str
    study: dict[str, Any]
    silos: list[dict[str, Any]]
    noise: list[float]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Any) -> StudyPlan:
        """The inverse of ``to_json``.

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
        """Identifies the plan: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def names(self) -> list[str]:
        return [row["name"] for row in self.silos]
