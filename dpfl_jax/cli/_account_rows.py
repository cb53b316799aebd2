"""What ``dpfl account`` knows: a row for each name, whose parameters are those of its parts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from dp_accounting import DpEvent, NeighboringRelation

from dpfl_jax import matrices
from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE, closed_forms, epsilon, events
from dpfl_jax.accounting.cells import (
    INDEPENDENT,
    AveragedUnits,
    Contribution,
    Everyone,
    NoisedSums,
    Sensitivity,
    SeveralUnits,
    StrategyMatrix,
    TwoStagePoisson,
)
from dpfl_jax.sampling import schemes

Values = dict[str, Any]
_OWN = "most examples of a user (of the whole run), or records of a subject"
_CAP = "most units (truncated Poisson), or records of a subject, in a batch"
# By field, or keyword of a matrix: the option and its help.
OPTIONS = {
    "sampling_prob": (
        "sampling_prob",
        "of each unit in a step (at which it may be drawn)",
    ),
    "period": ("period", "steps of which each unit may take part in one"),
    "size": ("batch_size", "units in every batch"),
    "cap": ("batch_cap", _CAP),
    "per_step_cap": ("batch_cap", _CAP),
    "participation_prob": ("participation_prob", "probability that the silo takes part in a round"),
    "local_steps": ("local_steps", "local steps in a round"),
    "max_units": ("group_size", _OWN),
    "sensitivity": ("group_size", _OWN),
    "population": ("dataset_size", "units in the data set (public)"),
    "bands": ("bands", "bands of the noise's matrix, or of its inverse, at their best"),
    "buffers": ("buffers", "buffers of the noise, at their best for these steps"),
    "silos": ("silos", "silos that may hold records of one subject (horizontal composition)"),
    "steps": ("steps", "steps (or rounds) of the whole run"),
}
OPTION_HELP = dict(OPTIONS.values())
_ALL_IN_STEP = functools.partial(SeveralUnits, per_step_cap=None)


@dataclasses.dataclass(frozen=True)
class Row:
    """One sub-command. Its parameters are those that its parts take.

    Attributes:
      help: one line.
      unit: whom it protects.
      scheme: makes the sampling scheme.
      several: makes what a privacy unit has in a draw; None: it is itself what is drawn.
      matrix: makes that of the noise, ``(steps, separation, *, ...)``; None: independent noise.
      drawn: what is drawn; "": the unit.
      is_sized: whether the size of the data set is a parameter.
      adjacency, trust: as in ``Guarantee``.
      assumptions: besides those of the cell, and that all parameters are public.
      event: of the sums, where no cell has it; None: the cell's.
      others: (noise multiplier, values, delta) -> {other accounting: (epsilon, is it a bound?)}.
    """

    help: str
    unit: str
    scheme: Callable[..., Any] = schemes.Poisson
    several: Callable[..., Contribution] | None = None
    matrix: Callable[..., StrategyMatrix] | None = None
    drawn: str = ""
    is_sized: bool = False
    adjacency: str = "add-or-remove"
    trust: str = "central"
    assumptions: tuple[str, ...] = ()
    event: Callable[[NoisedSums], DpEvent] | None = None
    others: Callable[[float, Values, float], dict[str, tuple[float, bool]]] | None = None

    @property
    def relation(self) -> NeighboringRelation:
        """The adjacency for the accountant."""
        return REPLACE if self.adjacency == "replace" else ADD_OR_REMOVE

    @property
    def neighbours(self) -> str:
        """Adjacency in words, e.g. "add-or-remove one user"."""
        return f"{self.adjacency} one {self.unit}"

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """By the names of their options: all but the noise multiplier, steps last."""
        result = _taken_by(self.scheme, always=True)
        for maker in (self.several, self.matrix):
            result |= {} if maker is None else _taken_by(maker)
        more = {"silos": 1} if self.unit == "subject" else {}
        more |= {"population": _REQUIRED} if self.is_sized else {}
        for field, default in (*more.items(), ("steps", _REQUIRED)):
            result[field] = _parameter(field, int, default)
        return {parameter.name: parameter for parameter in result.values()}

    def sums(self, noise: float, values: Values) -> NoisedSums:
        """What is accounted, in one silo."""
        steps = events.check_count(values["steps"], "number of steps", 1)
        steps *= values.get("local_steps", 1)  # in rounds of these
        matrix, contribution = INDEPENDENT, None
        scheme = self.scheme(**_arguments(self.scheme, values))
        if self.matrix is not None:
            matrix = self.matrix(steps, scheme.separation, **_arguments(self.matrix, values))
        if self.several is not None:
            contribution = self.several(**_arguments(self.several, values))
        population = values.get("dataset_size", 0)
        return NoisedSums(scheme, noise, steps, population, matrix, contribution, self.relation)

    def event_of(self, noise: float, values: Values) -> DpEvent:
        """The event of the whole run for one privacy unit."""
        sums = self.sums(noise, values)
        event = sums.event() if self.event is None else self.event(sums)
        return events.horizontal([event] * values.get("silos", 1))

    def describe(self, noise: float, values: Values) -> tuple[str, tuple[str, ...]]:
        """The sampling in words, and what must hold."""
        sums, drawn = self.sums(noise, values), self.drawn or self.unit
        constants = f"public constants: {', '.join(self.parameters)}, clip norm, divisor"
        cell = sums.cell.assumptions if self.event is None else ()
        return sums.scheme.describe(f"the {drawn}s", drawn), (constants, *self.assumptions, *cell)

    def alternatives(
        self, noise: float, values: Values, delta: float
    ) -> dict[str, tuple[float, bool]]:
        """Epsilon by other ways of accounting, and whether each is a bound."""
        if self.others is not None:
            return self.others(noise, values, delta)
        if self.several is None or self.scheme is not schemes.Poisson:
            return {}
        run = noise, values["sampling_prob"], values["steps"] * values.get("silos", 1)
        size, one = values["group_size"], events.poisson(*run[:2], values["steps"])
        forms: tuple[closed_forms.Form, ...] = ("geometric", "vadhan")
        result = {
            f"black-box group privacy ({form}, RDP in log space)": (
                closed_forms.black_box_epsilon(events.poisson(*run), size, delta, form=form),
                True,
            )
            for form in forms
        }
        return result | {
            f"epsilon of one {self.drawn} (protects no {self.unit})": (epsilon(one, delta), False)
        }


_REQUIRED: Any = inspect.Parameter.empty


def _parameter(field: str, kind: type, default: Any) -> inspect.Parameter:
    name, _ = OPTIONS.get(field, (field, ""))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _taken_by(maker: Callable[..., Any], always: bool = False) -> dict[str, inspect.Parameter]:
    """By field, what a class or function takes that is not settled; ``always``: has no default."""
    settled = {"steps", "separation", *getattr(maker, "keywords", ())}
    hints = typing.get_type_hints(getattr(maker, "func", maker))
    return {
        name: _parameter(
            name,
            (typing.get_args(hints[name]) or (hints[name],))[0],
            _REQUIRED if always else given.default,
        )
        for name, given in inspect.signature(maker).parameters.items()
        if name not in settled
    }


def _arguments(maker: Callable[..., Any], values: Values) -> Values:
    return {field: values[parameter.name] for field, parameter in _taken_by(maker).items()}


def _two_stage(noise: float, v: Values, delta: float) -> dict[str, tuple[float, bool]]:
    names = ("local_steps", "steps", "participation_prob")
    given = (v["sampling_prob"], noise, *(v[name] for name in names), delta)
    theorem = functools.partial(closed_forms.epsilon_two_stage, *given)
    return {
        "Theorem 3 (clients), conversion of the paper": (theorem(conversion="mironov")[0], True),
        "Theorem 3 (clients), conversion of the authors' code": (theorem()[0], True),
        "Theorem 3 (server): not a bound": (theorem(adversary="server")[0], False),
    }


def _isrl(noise: float, v: Values, delta: float) -> dict[str, tuple[float, bool]]:
    """The epsilon for which the paper's formulas ask for this noise (both fall as 1 / epsilon)."""
    per_unit = noise / v["sampling_prob"]  # sigma n / L
    valid = closed_forms.minibatch_noise(v["steps"], 1, 1e-9, delta) * 1e-9 / per_unit
    shown = closed_forms.experiment_noise(v["steps"], 1, 1.0, delta) / per_unit
    return {
        "Theorem D.1 (sampling with replacement)": (valid, True),
        "Appendix I (experiments): not a bound": (shown, False),
    }


def _fixed_size(sums: NoisedSums) -> DpEvent:
    given = sums.noise_multiplier, sums.num_units, sums.scheme.size
    return events.fixed_size(*given, sums.steps)


_ONE_USER = ("each example belongs to one user",)
_SILO = "a subject has records in at most the given number of silos, which silos cannot check"

ROWS = {
    "els": Row(
        "example-level sampling, user-level guarantee (mixture of Gaussians)", "user",
        several=_ALL_IN_STEP, drawn="example",
        assumptions=("each example belongs to one user, who has at most group_size",),
    ),
    "uls": Row("user-level sampling, user-level guarantee", "user", assumptions=_ONE_USER),
    "allocation": Row(
        "each user in one of every period steps, user-level guarantee", "user",
        schemes.RandomAllocation, assumptions=_ONE_USER,
    ),
    "bandmf": Row(
        "groups of users in turns, sampled in theirs, banded noise, user-level guarantee", "user",
        schemes.CyclicPoisson, matrix=matrices.best_banded, assumptions=_ONE_USER,
    ),
    "blt": Row(
        "users in turns without sampling, buffered Toeplitz noise, user-level guarantee", "user",
        schemes.Cyclic, matrix=matrices.best_buffered, assumptions=_ONE_USER,
    ),
    "banded-inverse": Row(
        "users in turns without sampling, noise of few bands, user-level guarantee", "user",
        schemes.Cyclic, matrix=matrices.best_banded_inverse, assumptions=_ONE_USER,
    ),
    "poisson": Row("plain DP-SGD, record-level guarantee", "record"),
    "gaussian": Row(
        "every unit in every step", "record", Everyone,
        several=functools.partial(Sensitivity, sensitivity=1),
    ),
    "fixed-size": Row(
        "batches of fixed size without replacement", "record", schemes.FixedSize,
        is_sized=True, adjacency="replace", event=_fixed_size,
    ),
    "truncated-poisson": Row(
        "Poisson sampling cut to a batch cap", "record", schemes.TruncatedPoisson, is_sized=True,
    ),
    "two-stage": Row(
        "silo first, then records (rPDP-FL); sampling_prob is the record's own rate", "record",
        TwoStagePoisson, trust="silo-local", others=_two_stage,
        assumptions=("who took part in a round is drawn at random and visible to all",),
    ),
    "local-group-dp": Row(
        "LocalGroupDP per silo, soundly (mixture of Gaussians), and over silos", "subject",
        several=SeveralUnits, drawn="record", trust="silo-local", assumptions=(_SILO,),
    ),
    "hi-grad-avg-dp": Row(
        "HiGradAvgDP per silo, and over silos", "subject",
        several=AveragedUnits, drawn="record", trust="silo-local", assumptions=(_SILO,),
    ),
    "user-ldp": Row(
        "UserLDP: one clipped gradient of the whole batch per step (sensitivity 2C)", "subject",
        Everyone, several=functools.partial(Sensitivity, sensitivity=2), trust="silo-local",
        assumptions=(_SILO,),
    ),
    "isrl-dp": Row(
        "ISRL-DP: a silo's own noisy minibatches, record-level, replace-one", "record",
        adjacency="replace", trust="silo-local", others=_isrl,
        assumptions=("the silo's size and who took part are public",),
    ),
    "shuffled": Row(
        "batches cut from shuffled passes: no amplification; steps are passes", "user", Everyone,
        several=Sensitivity, adjacency="zero-out",
        assumptions=("a user's slots stay in place, with zero gradients",),
    ),
}  # fmt: skip
