"""What all parties of a run agree on: the study, and the plan that is made from it."""

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

# Keys that each party sets for itself: where its data are, what it keeps, its ledger.
_LOCAL_DATA = (
    "source", "path", "user_column", "text_column", "target_column", "input_columns", "silo_column",
    "delimiter", "encoding", "decimal", "on_bad_row", "tokenizer", "public_fraction",
)  # fmt: skip
_LOCAL = ("name", "seed", "train", "processes", "metrics", "eval")
_LOCAL_PRIVACY = ("ledger", "account", "budget")


def is_name(value: Any) -> bool:
    """Returns whether a value may name a run or a silo, in a path and in a log."""
    if not isinstance(value, str) or len(value) > _MOST_NAME or not value.isprintable():
        return False
    return _NAME.fullmatch(value) is not None


def study_of(config: Any) -> dict[str, Any]:
    """Returns the part of a configuration that is the same for all parties.

    Raises:
      BadInputError: remote silos cannot run the configuration.
    """
    _check(config)
    sections = json.loads(json.dumps(config_to_dict(config), sort_keys=True))
    study = {name: section for name, section in sections.items() if name not in _LOCAL}
    for section, local in (("data", _LOCAL_DATA), ("privacy", _LOCAL_PRIVACY)):
        study[section] = {k: v for k, v in study[section].items() if k not in local}
    return study


def digest_of(config: Any) -> str:
    """Returns 16 hexadecimal digits with which parties can compare their studies."""
    text = json.dumps(study_of(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(config: RunConfig) -> None:
    if config.variant == "central":
        raise BadInputError(
            f"mechanism.kind is {config.mechanism.kind}, which needs a server that is trusted with "
            "users' gradients or updates before noise, and runs only in simulation (dpfl train): "
            "for remote silos take a mechanism in which silos add noise (hi_grad_avg, "
            "minibatch_sgd, ...)"
        )
    wrong = None
    if config.seed is not None:
        wrong = (
            "seed is set, but every silo has a secret key of its own: leave seed unset in the "
            "configuration of a study"
        )
    elif config.eval.baseline:
        wrong = (
            "eval.baseline trains without privacy, which remote silos do not do: set it to false"
        )
    elif config.federation.partition != "natural":
        wrong = (
            f"federation.partition is {config.federation.partition}, but remote silos already hold "
            "their own records: set it to natural"
        )
    wrong = wrong or (_wrong_isrl(config) if config.variant == "isrl" else _wrong_silos(config))
    if wrong:
        raise BadInputError(wrong)


def _wrong_silos(config: RunConfig) -> str | None:
    """Why remote silos cannot run this study with a server rule, in a sentence, or None."""
    section, privacy = config.federation, config.privacy
    if config.model.module is not None:
        return (
            "model.module is code, and no silo could tell whether the others run the same: set "
            "model.kind"
        )
    if section.silos_per_round is not None:
        return (
            "federation.silos_per_round is set, but silos cannot check a server's draw: set "
            "federation.participation_prob instead, with which every silo draws for itself"
        )
    if privacy.delta is None:
        return (
            "privacy.delta is not set, and has no default, because it is not known how many "
            "subjects all silos have together: set it"
        )
    if not config.mechanism.private:
        return (
            f"mechanism.kind is {config.mechanism.kind}, which as configured has no guarantee: "
            "remote silos run only with privacy"
        )
    if config.data.split != "by_user":
        return "data.split is within_user, but remote silos hold out subjects: set it to by_user"
    if config.mechanism.participation.personal and privacy.unreachable != "exclude":
        return (
            "privacy.unreachable is error, but a silo that refuses for this reason would reveal to "
            "the server its people's least budget: set it to exclude"
        )
    if section.max_silos_per_subject is None:
        return (
            "federation.max_silos_per_subject is not set: set it to the number of silos in which a "
            "person may have records"
        )
    return None


def _wrong_isrl(config: RunConfig) -> str | None:
    """Why remote silos cannot run this study without a trusted server, in a sentence, or None."""
    data, section = config.data, config.federation
    task = SETS[data.source].task if data.source in SETS else None
    if not data.scale and not (task is not None and task.scaled):  # scaled by public constants
        return (
            "data.scale is not set, but remote silos cannot set public records aside to learn it "
            "from: set it to the middle and half width of each column"
        )
    if section.answering is not None:
        key = "silos_law" if section.silos_law is not None else "silos_per_round"
        return f"federation.{key} is set, but only the run shows which silos answer: remove it"
    if config.privacy.epsilon is None:
        return "privacy.epsilon is null, but remote silos run only with privacy: set it"
    return None


def read_study(path: pathlib.Path) -> RunConfig:
    """Reads the configuration of a study, without expanding environment variables.

    A server may have sent it, and could name a variable to learn its value from how studies differ.

    Raises:
      BadInputError: the configuration is wrong, or names code.
    """
    raw = read_sections(path)
    refuse_code(raw, str(path), NO_CODE)
    return validate_config(raw, str(path))


def first_difference(mine: Any, theirs: Any) -> str | None:
    """Returns in words which key differs between two studies; None if they are equal.

    The words hold no values, which the reader may not be allowed to know.
    """
    key = differing_key(mine, theirs)
    return None if key is None else f"{key} is not the same here and there"


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """The plan of one run: public, and the same for all parties to the last digit.

    Attributes:
      run: unique name of the run.
      study: the study that all parties agreed on (``study_of``).
      silos: ``name`` and public sizes of each silo, in order.
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
        """Returns the plan that ``to_json`` wrote.

        Raises:
          MessageError: ``plain`` is not a plan.
          BadInputError: a noise multiplier is out of range.
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
