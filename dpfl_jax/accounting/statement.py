"""``guarantee.json``: what a run promises, and all that is needed to check it.

It names the mechanism and the public numbers of the data (``basis``), the events that follow from
them, and the epsilon of these events. ``differences`` derives and accounts for the events again, as
any reader can. The file cannot show that the mechanism ran, nor that the data are as declared.

Nothing in it is computed from private data, except numbers that the guarantee's assumptions name as
public.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import dp_accounting
from dp_accounting import NeighboringRelation
from pydantic import BaseModel, ConfigDict, ValidationError

from dpfl_jax.accounting import event_types
from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    REPLACE,
    epsilon_or_inf,
    rough_epsilon,
)
from dpfl_jax.accounting.attacks import Meaning, meaning_of_bound, meaning_of_cases
from dpfl_jax.accounting.drawn import IDEALISED_FLOAT
from dpfl_jax.accounting.guarantee import Guarantee
from dpfl_jax.accounting.versions import library
from dpfl_jax.errors import BadInputError, one_line, require, unrepeated
from dpfl_jax.files import on_disk, read_text

VERSION = 2
_READ = (1, 2)  # version 1 has no digests, no unit key and no public inputs
NAME = "guarantee.json"
# Relative difference that rounding may cause between two machines.
_ROUNDING = 1e-6
# Fields of a guarantee that depend on the run's data and configuration, not on the mechanism.
_OF_THE_RUN = ("unit_key", "public_inputs")
# Words in files of earlier versions -> the words used now.
_EARLIER_WORDS = {" (mechanism.noise=exact)": ""}
# These keep an explanation within about a second.
_MOST_EVENTS, _COARSE = 8, 0.1
_MOST_DEPTH = 50
# The errors that values of unexpected types cause.
_UNUSABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
Cases = Sequence[Sequence[dp_accounting.DpEvent]]
_T = TypeVar("_T", bound=BaseModel)


class Part(BaseModel, abc.ABC):
    """A JSON object in the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DrawnNoise(Part):
    """How the noise of the run was drawn."""

    drawn: Literal["exact", "float"]
    """``exact``: integers, whose distance from rounded Gaussian noise the assumptions state.
    ``float``: sums of two float32 normals, accounted as real-valued Gaussian noise."""


class Group(Part):
    """Units with a smaller epsilon than the run's."""

    of: str
    """Which units, in words."""
    epsilon: float
    """Epsilon of each of these units, at the run's delta."""
    event: dict[str, Any]
    """What the run does to one of these units."""


class Digests(Part):
    """SHA-256 of the files that a guarantee belongs to (``accounting.digests``)."""

    run: dict[str, str] = {}
    """Files of the run's directory: the configuration, and checkpoints that may be exported."""
    exported: dict[str, str] = {}
    """Files of an export, except guarantee.json."""


class Statement(Part):
    """The content of guarantee.json."""

    version: Literal[1, 2]
    """Version of this schema."""
    library: str
    """The versions of dpfl_jax that took the steps and wrote the file (``versions.library``)."""
    privacy: Guarantee
    """The guarantee, as in report.json: unit, adjacency, trust, epsilon, delta, assumptions."""
    text: str
    """The guarantee as a paragraph."""
    noise: DrawnNoise
    """How noise was drawn."""
    basis: dict[str, Any]
    """Mechanism and public numbers from which the events follow; ``system`` says how."""
    events: list[list[dict[str, Any]]]
    """Each list bounds a unit's epsilon by its costliest event, so the cheapest list counts. No
    list: there is no guarantee."""
    groups: list[Group] = []
    """Kinds of units that spend less than the run's epsilon."""
    digests: Digests | None = None
    """Digests that tie the file to a run and a model, or None."""

    @classmethod
    def of(
        cls,
        guarantee: Guarantee,
        basis: dict[str, Any],
        cases: Cases,
        groups: Iterable[tuple[str, dp_accounting.DpEvent]] = (),
    ) -> Statement:
        """Returns the statement of a guarantee.

        Args:
          guarantee: the run's guarantee.
          basis: JSON values; NumPy numbers are converted.
          cases: events that bound what the run does to a unit, in the form of ``events``.
          groups: pairs (which units, what the run does to one of them).
        """
        relation = _relation(guarantee)
        return cls(
            version=VERSION,
            library=library(),
            privacy=guarantee,
            text=str(guarantee),
            noise=DrawnNoise(
                drawn="float" if IDEALISED_FLOAT in guarantee.assumptions else "exact"
            ),
            basis=json.loads(json.dumps(basis, default=lambda number: number.item())),
            events=[
                [event_types.to_json(event) for event in case]
                for case in (cases if guarantee.private else ())
            ],
            groups=[
                Group(
                    of=who,
                    epsilon=cost([[event]], guarantee.delta, relation),
                    event=event_types.to_json(event),
                )
                for who, event in groups
            ],
        )

    def about(self, guarantee: Guarantee) -> Statement:
        """Returns a copy with this guarantee, which may add the unit key and public inputs."""
        return self.model_copy(update={"privacy": guarantee, "text": str(guarantee)})

    def tied(self, **files: dict[str, str]) -> Statement:
        """Returns a copy with these digests added; the keywords are fields of ``Digests``."""
        known = {} if self.digests is None else self.digests.model_dump()
        return self.model_copy(update={"version": VERSION, "digests": Digests(**known | files)})

    def made_by(self, versions: Sequence[str]) -> Statement:
        """Returns a copy for a run whose steps were taken by these versions of dpfl_jax."""
        return self.model_copy(update={"library": library(versions)})

    @property
    def cases(self) -> list[list[dp_accounting.DpEvent]]:
        """``events`` as dp-accounting's objects, which ``dpfl verify`` accounts again."""
        return [[event_types.from_json(values) for values in case] for case in self.events]

    @property
    def relation(self) -> NeighboringRelation:
        """The adjacency under which the events are accounted."""
        return _relation(self.privacy)

    def meaning(self) -> Meaning | None:
        """Returns what an adversary can find out about one unit; None without a guarantee.

        It is computed on a coarse grid, which makes bounds larger by about a thousandth, and for
        runs of many events from epsilon and delta alone.
        """
        privacy = self.privacy
        if not privacy.private:
            return None
        cases = [case for case in self.cases if 0 < len(case) <= _MOST_EVENTS]
        with contextlib.suppress(BadInputError):  # losses too large for a table
            if cases:
                return meaning_of_cases(
                    cases, privacy.delta, relation=self.relation, resolution=_COARSE
                )
        return meaning_of_bound(privacy.epsilon, privacy.delta, self.relation)

    def in_words(self) -> list[str] | None:
        """Returns the sentences of ``meaning``; None without a guarantee."""
        meaning = self.meaning()
        return None if meaning is None else meaning.sentences()

    def to_json(self) -> dict[str, Any]:
        """Returns the statement as JSON values."""
        return {**self.model_dump(), "privacy": self.privacy.to_json()}

    def dumps(self) -> str:
        """Returns the text of the file."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


def read(path: str | os.PathLike[str]) -> Statement:
    """Reads a guarantee.json.

    Raises:
      BadInputError: the file is not a guarantee.json, or has a version that is not known here.
    """
    values = read_values(path, NAME)
    if not isinstance(values, dict) or "version" not in values:
        raise BadInputError(f"{path} is no {NAME}: it has no version")
    if type(values["version"]) is not int or values["version"] not in _READ:
        raise BadInputError(
            f"{path} has version {values['version']!r}, but {library()} reads versions up to "
            f"{VERSION}: install a newer release"
        )
    return parsed(Statement, values, path)


def read_values(path: str | os.PathLike[str], what: str) -> Any:
    """Reads the values of an untrusted JSON file, with limits on numbers, nesting and characters.

    Args:
      path: the file.
      what: what the file should be, in words.

    Raises:
      BadInputError: the file cannot be read, or exceeds a limit.
    """
    path = on_disk(path)
    try:
        values = json.loads(
            read_text(path), object_pairs_hook=unrepeated, parse_constant=_no_number
        )
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path} cannot be read: {error}") from error
    for value, depth in _walk(values):
        if depth > _MOST_DEPTH or (isinstance(value, int) and abs(value) >= 2**63):
            raise BadInputError(
                f"{path} holds an integer of more than 64 bits, or is nested deeper than "
                f"{_MOST_DEPTH} levels, unlike any {what}: ask whoever made it for a new copy"
            )
        if isinstance(value, str) and one_line(value) != value:
            raise BadInputError(
                f"{path} holds a line break or an invisible character in {one_line(value)[:60]!r}, "
                f"unlike any {what}: its text could be mistaken for output of `dpfl verify`"
            )
    return values


def parsed(kind: type[_T], values: Any, path: str | os.PathLike[str]) -> _T:
    """Returns the ``values`` of a file as a Pydantic model.

    Raises:
      BadInputError: they do not fit the model; the message says where.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInputError(f"{path}: {where}: {first['msg']}") from error


def _walk(values: Any) -> Iterator[tuple[Any, int]]:
    """Yields all values, including keys, each with its depth."""
    left = [(values, 0)]
    while left:
        value, depth = left.pop()
        yield value, depth
        if isinstance(value, dict):
            left += [(inner, depth + 1) for inner in (*value, *value.values())]
        elif isinstance(value, list):
            left += [(inner, depth + 1) for inner in value]


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number in JSON")


def whole_number(basis: dict[str, Any], name: str, least: int = 0, most: int | None = None) -> int:
    """Returns ``basis[name]``; raises BadInputError unless a whole number in the range."""
    value = basis[name]
    good = type(value) is int and least <= value <= (1 << 60 if most is None else most)
    wanted = f"at least {least}" if most is None else f"from {least} to {most}"
    require(good, name, value, f"a whole number {wanted}")
    return int(value)


def _relation(guarantee: Guarantee) -> NeighboringRelation:
    return REPLACE if guarantee.adjacency.startswith("replace") else ADD_OR_REMOVE


def cost(cases: Cases, delta: float, relation: NeighboringRelation) -> float:
    """Returns the epsilon that ``cases`` (``Statement.events``) bound; ``inf`` without cases."""
    return min(
        (max(epsilon_or_inf(event, delta, relation) for event in case) for case in cases if case),
        default=math.inf,
    )


def read_report(folder: pathlib.Path, stated: Statement) -> tuple[dict[str, Any], str]:
    """Reads a run's report.json and compares it with the run's guarantee.json.

    Args:
      folder: the run's directory.
      stated: the content of its guarantee.json.

    Returns:
      The report; and a sentence if it states another guarantee than guarantee.json, else "".

    Raises:
      BadInputError: the file is not a report.
    """
    file = folder / "report.json"
    try:
        report = json.loads(read_text(file))
        reported = (Guarantee.from_json(report["privacy"]), report["guarantee"])
        summary = stated.privacy.summary()
        same = reported == (stated.privacy, stated.text)
        same = same and report.get("summary", summary).startswith(summary)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(f"{file} is not the report of a run: {error}") from error
    return report, "" if same else f"{file} states another guarantee than the run's {NAME}"


def differences(
    stated: Statement, restate: Callable[[dict[str, Any]], Statement]
) -> tuple[list[str], list[str]]:
    """Returns what is wrong in a statement, and what cannot be checked.

    Args:
      stated: the content of the file.
      restate: derives a run's statement from its ``basis``.

    Returns:
      Sentences about what is wrong; and the caveats that do not follow from the mechanism, whose
      completeness the file cannot show.
    """
    privacy, problems = stated.privacy, []
    unchecked = list(privacy.caveats)
    if stated.text != str(privacy):
        problems.append(
            f"the text is not what the fields say: {_unlike(stated.text, str(privacy))}"
        )
    if not privacy.private:
        if stated.events or stated.groups:
            problems.append("privacy.epsilon is infinite, but the file has events or groups")
        return problems, unchecked
    try:
        again = restate(stated.basis)
    except _UNUSABLE as error:
        why = error if isinstance(error, BadInputError) else f"{type(error).__name__} {error}"
        again = None
        problems.append(f"no mechanism can be built from `basis`: {why}")
    if again is not None:
        problems += _unlike_the_basis(stated, again)
        unchecked = [caveat for caveat in unchecked if caveat not in again.privacy.caveats]
    try:
        real = cost(stated.cases, privacy.delta, stated.relation)
        of_groups = [
            cost([[event_types.from_json(group.event)]], privacy.delta, stated.relation)
            for group in stated.groups
        ]
    except _UNUSABLE as error:
        return [*problems, f"the file's events cannot be accounted: {error}"], unchecked
    if not real <= privacy.epsilon * (1 + _ROUNDING):
        problems.append(
            f"privacy.epsilon is {privacy.epsilon:.7g}, but the events cost {real:.7g} at delta "
            f"{privacy.delta:g}"
        )
    for group, real in zip(stated.groups, of_groups):
        if not real <= group.epsilon * (1 + _ROUNDING):
            problems.append(
                f"the group {group.of!r} has epsilon {group.epsilon:.7g}, but its event costs "
                f"{real:.7g}"
            )
    return problems, unchecked


# ---- a second opinion: dp_accounting's own privacy-loss distributions ----------------------------

_MOST_KINDS = 4
# dp_accounting's compositions lose deltas below about 1e-15 times the number of steps.
_LEAST_COMPARED = 1e-12
# It weighs losses by e^-loss, which underflows at 745, so that the lower bound becomes useless.
_MOST_EPSILON = 500.0


def dp_accounting_bounds(
    event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation = ADD_OR_REMOVE
) -> tuple[float, float] | None:
    """Returns lower and upper bounds on an event's epsilon by dp_accounting's own PLDs.

    Returns:
      (lower bound, upper bound); or None if the event is not made of a few kinds of (sampled)
      Gaussians (dp_accounting takes minutes for mixtures), if delta is lost in rounding, or if
      epsilon is above about 500.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    steps = _gaussians(event, 1)
    total = sum((steps or {}).values())
    if not steps or len(steps) > _MOST_KINDS or delta < _LEAST_COMPARED * total:
        return None
    if not rough_epsilon(event, delta, relation) < _MOST_EPSILON:
        return None
    bounds = []
    for pessimistic in (False, True):
        whole = None
        for (sigma, prob), count in steps.items():
            part = pld.from_gaussian_mechanism(
                sigma,
                sampling_prob=prob,
                neighboring_relation=relation,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
                # A finer interval takes minutes; the lower bound loses half an interval per step.
                value_discretization_interval=1e-3 if total <= 100 else 3e-4,
            ).self_compose(count)
            whole = part if whole is None else whole.compose(part)
        assert whole is not None
        bounds.append(float(whole.get_epsilon_for_delta(delta)))
    return bounds[0], bounds[1]


def _gaussians(event: Any, times: int) -> dict[tuple[float, float], int] | None:
    """{(noise multiplier, sampling probability): number of steps}; None for other events."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return _gaussians(event.event, times * event.count)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        counts: dict[tuple[float, float], int] = {}
        for part in event.events:
            inner = _gaussians(part, times)
            if inner is None:
                return None
            for step, count in inner.items():
                counts[step] = counts.get(step, 0) + count
        return counts
    prob = 1.0
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        event, prob = event.event, event.sampling_probability
    if isinstance(event, dp_accounting.GaussianDpEvent) and prob > 0 < event.noise_multiplier:
        return {(event.noise_multiplier, prob): times}
    return None


def second_opinion(stated: Statement) -> tuple[tuple[float, float] | None, list[str]]:
    """Checks the stated epsilon by dp_accounting's own bounds (``dp_accounting_bounds``).

    Returns:
      The bounds or None; and a list with a sentence if the stated epsilon is below the lower bound.
    """
    delta, relation = stated.privacy.delta, stated.relation

    def one(event: dp_accounting.DpEvent) -> float:
        return cost([[event]], delta, relation)

    # The costliest event of the cheapest case determines epsilon.
    decides = min((max(case, key=one) for case in stated.cases if case), key=one)
    bounds = dp_accounting_bounds(decides, delta, relation)
    if bounds is None or bounds[0] <= stated.privacy.epsilon * (1 + _ROUNDING):
        return bounds, []
    return bounds, [
        f"privacy.epsilon is {stated.privacy.epsilon:.7g}, but according to dp_accounting the "
        f"events cost at least {bounds[0]:.7g}"
    ]


def _unlike_the_basis(stated: Statement, again: Statement) -> list[str]:
    """Sentences about where the file differs from what the mechanism in its basis would state."""
    problems = []
    mine, theirs = stated.to_json(), again.to_json()
    said, made = mine.pop("privacy"), theirs.pop("privacy")
    for earlier, now in _EARLIER_WORDS.items():
        said["assumptions"] = [text.replace(earlier, now) for text in said["assumptions"]]
    for group in (*mine["groups"], *theirs["groups"]):  # ``differences`` recomputes their epsilons
        del group["epsilon"]
    missing = [caveat for caveat in made.pop("caveats") if caveat not in said["caveats"]]
    for caveat in missing:
        problems.append(f"a caveat of the mechanism is missing: {caveat[:80]}...")
    # All that a client of somebody else's federation states follows from its settings.
    of_the_run = () if stated.basis["system"] == "client" else _OF_THE_RUN
    for name in made.keys() - {"epsilon", *of_the_run}:
        if (place := _unequal(said[name], made[name], f"privacy.{name}")) is not None:
            problems.append(f"{place} by the mechanism in `basis`")
    problems += _public_inputs_unlike(said["public_inputs"], made["public_inputs"])
    for name in ("noise", "basis", "events", "groups"):
        if (place := _unequal(mine[name], theirs[name], name)) is not None:
            problems.append(f"{place} by the mechanism in `basis`")
    if problems and stated.library != library():
        problems[-1] += f" ({stated.library} wrote the file, this is {library()}: words may differ)"
    return sorted(problems)


def _public_inputs_unlike(said: list[str], made: list[str]) -> Iterator[str]:
    """Sentences about public inputs, if the file lists any, that differ from the mechanism's.

    The mechanism knows few of them, and may know only the beginning of one ("counts: 3 silos").
    """
    if not said:
        return
    for name in dict.fromkeys(entry.partition(":")[0] for entry in made):
        listed = [given for given in said if given.partition(":")[0] == name]
        for entry in (entry for entry in made if entry.partition(":")[0] == name):
            same = [given for given in listed if given == entry or given.startswith(f"{entry}, ")]
            if not same:
                yield f"privacy.public_inputs leaves out {entry!r}, which follows from `basis`"
            listed = [given for given in listed if given not in same]
        for given in listed:
            yield f"privacy.public_inputs says {given[:60]!r}, which does not follow from `basis`"


def _unequal(said: Any, made: Any, place: str) -> str | None:
    """The first place where two JSON values differ, in words; None if they are equal."""
    if isinstance(said, dict) and isinstance(made, dict):
        for name in sorted(said.keys() | made.keys()):
            if name not in said or name not in made:
                return f"{place}.{name} is {'missing' if name in made else 'unexpected'}"
            if (difference := _unequal(said[name], made[name], f"{place}.{name}")) is not None:
                return difference
        return None
    if isinstance(said, (list, tuple)) and isinstance(made, (list, tuple)):
        if len(said) != len(made):
            return f"{place} has {len(said)} entries, and should have {len(made)}"
        pairs = enumerate(zip(said, made))
        unequal = (_unequal(a, b, f"{place}[{i}]") for i, (a, b) in pairs)
        return next((words for words in unequal if words is not None), None)
    numbers = [type(x) in (int, float) for x in (said, made)]
    if all(numbers) and math.isclose(said, made, rel_tol=1e-9):
        return None
    if type(said) is type(made) and said == made:
        return None
    if isinstance(said, str) and isinstance(made, str) and len(said) > 40:
        return f"{place} {_unlike(said, made)}"
    return f"{place} is {said!r}, and should be {made!r}"


def _unlike(said: str, made: str) -> str:
    """Says how two texts differ, with the words around the first difference."""
    a, b = said.split(), made.split()
    i = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    shown = [" ".join(words[max(i - 3, 0) : i + 3]) for words in (a, b)]
    return f"says '...{shown[0]}...', and should say '...{shown[1]}...'"
