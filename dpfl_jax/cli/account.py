"""``dpfl account``: what a mechanism guarantees, or the parameter a guarantee needs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import math
import pathlib
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from dp_accounting import DpEvent, NeighboringRelation
from rich.table import Table

from dpfl_jax import accounting, matrices
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
from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, extra
from dpfl_jax.files import save_figure
from dpfl_jax.run.console import Console
from dpfl_jax.sampling import schemes

ACCOUNTANTS = {
    "pld": "PLD (privacy-loss distributions, rounded upwards)",
    "rdp": "RDP (Renyi divergences, converted)",
    "zcdp": "zCDP (no amplification by sampling)",
}
DESCRIPTION = """\
Say all parameters of a mechanism but one, and get that one: the epsilon of a noise multiplier, the
noise multiplier of an epsilon, or, with both given, the number of steps, the sampling probability
or the group size. Answers are upper bounds by privacy-loss distributions, certified on a fine grid.

examples:
  # noise for 1,000 steps of example-level sampling, users of at most 32 examples
  dpfl account els --epsilon 1 --delta 1e-6 --steps 1000 --group-size 32 \\
      --sampling-prob 0.001953125
  # epsilon of a noise multiplier, next to looser ways to account for the same run
  dpfl account els --noise-multiplier 4 --delta 1e-6 --steps 1000 --group-size 32 \\
      --sampling-prob 0.002 --compare
  # what users of 1, 4 and 32 examples spend in such a run
  dpfl account els --noise-multiplier 4 --delta 1e-6 --steps 1000 --group-size 32 \\
      --sampling-prob 0.002 --contributions 1,4,32
  # how many steps, with epsilon against steps drawn to a file
  dpfl account uls --noise-multiplier 1.2 --epsilon 4 --delta 1e-8 --sampling-prob 0.01 \\
      --plot epsilon.png
  # what that means: right accusations for false ones, beliefs before and after
  dpfl account uls --noise-multiplier 1.2 --delta 1e-8 --sampling-prob 0.01 --steps 1000 \\
      --explain --plot attacks.png --plot-against attacks
  # a subject with records in 16 hospitals
  dpfl account hi-grad-avg-dp --epsilon 4 --delta 1e-5 --steps 300 --group-size 9 \\
      --sampling-prob 0.0807 --silos 16 --json
"""


class Options(options.Options):
    """The options of all mechanisms.

    Attributes:
      epsilon: target (or leave out to compute it).
      delta: between 0 and 1.
      noise_multiplier: noise over the clip norm.
      accountant: how epsilon is computed.
      compare: add looser ways of accounting.
      explain: say in words what an attacker may find out.
      plot: draw to a file.
      plot_against: epsilon against steps or delta; or right against false accusations.
    """

    epsilon: float | None = None
    delta: float
    noise_multiplier: float | None = None
    accountant: Literal["pld", "rdp", "zcdp"] = "pld"
    compare: bool = False
    explain: bool = False
    plot: Annotated[pathlib.Path | None, Flag("FILE.png")] = None
    plot_against: Literal["steps", "delta", "attacks"] = "steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command for each row of ``ROWS``, with the parameters of its parts."""
    commands = parser.add_subparsers(dest="mechanism", metavar="MECHANISM", required=True)
    for name, row in ROWS.items():
        sub = commands.add_parser(
            name,
            help=row.help,
            description=f"{row.help}. Protects each {row.unit}; adjacency: {row.neighbours}; "
            f"trust: {row.trust}. Leave out exactly one parameter.",
        )
        options.add_options(sub, Options)
        for parameter in row.parameters.values():
            default = None if parameter.default is parameter.empty else parameter.default
            words = OPTION_HELP.get(parameter.name, "") + (
                f" (default: {default})" if default else ""
            )
            sub.add_argument(
                _option(parameter.name), type=parameter.annotation, default=default, help=words
            )
        if "group_size" in row.parameters:
            sub.add_argument(
                "--contributions",
                type=_counts,
                metavar="N,N,...",
                help="declared numbers of examples: the epsilon of a user (subject) of each",
            )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers >= 1, such as 1,4,32"
        )
    return counts


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Solves for the missing parameter, prints the guarantee, and returns it."""
    row, epsilon, delta = ROWS[args.mechanism], args.epsilon, args.delta
    values: Values = {name: getattr(args, name) for name in row.parameters}
    needed = [name for name, p in row.parameters.items() if p.default is p.empty]
    given = {**values, "noise_multiplier": args.noise_multiplier, "epsilon": epsilon}
    missing = [n for n in (*needed, "noise_multiplier", "epsilon") if given[n] is None]
    if len(missing) != 1:
        options = ", ".join(map(_option, missing)) or "nothing"
        raise BadInputError(
            f"exactly one parameter must be left out, to be computed; missing here: {options}"
        )
    (solved,) = missing
    if args.accountant != "pld" and solved != "epsilon":
        raise BadInputError(
            f"--accountant {args.accountant} only computes epsilon: give --noise-multiplier and "
            "leave out --epsilon"
        )
    noise = args.noise_multiplier
    if solved == "noise_multiplier":
        noise = accounting.calibrate_noise_multiplier(
            lambda s: row.event_of(s, values), epsilon, delta, relation=row.relation
        )
    elif solved != "epsilon":
        values[solved] = _solve(row, solved, noise, values, epsilon, delta)
    event = row.event_of(noise, values)
    bound = accounting.epsilon(event, delta, relation=row.relation, accountant=args.accountant)
    sampling, assumptions = row.describe(noise, values)
    guarantee = accounting.Guarantee(
        unit=row.unit,
        adjacency=row.neighbours,
        trust=row.trust,
        epsilon=bound,
        delta=delta,
        noise_multiplier=noise,
        accountant=ACCOUNTANTS[args.accountant],
        sampling=sampling,
        assumptions=(
            *assumptions,
            *accounting.noise_assumptions("exact", bound, delta, values["steps"]),
        ),
        caveats=("this is a calculation, not the report of a run",),
        steps=values["steps"],
    )
    result: dict[str, Any] = {
        "mechanism": args.mechanism,
        "solved_for": solved,
        **guarantee.to_json(),
        **{name: value for name, value in values.items() if value is not None},
        "target_epsilon": epsilon,
    }
    if args.compare:
        result["comparison"] = _compare(row, noise, values, delta, bound)
    if getattr(args, "contributions", None):
        result["epsilon_by_contribution"] = _by_contribution(row, noise, values, args)
    meaning = None
    if args.explain or (args.plot is not None and args.plot_against == "attacks"):
        meaning = accounting.meaning(event, delta, relation=row.relation)
        if args.explain:
            result["meaning"] = meaning.to_json()
    if args.plot is not None:
        result["plot"] = str(_plot(row, noise, values, args, meaning))
    _print(args, guarantee, result, meaning)
    return result


def _solve(row: Row, name: str, noise: float, values: Values, epsilon: float, delta: float) -> Any:
    solvers: dict[str, Callable[..., Any]] = {
        "steps": accounting.calibrate_steps,
        "sampling_prob": accounting.calibrate_sampling_prob,
        "group_size": accounting.calibrate_group_size,
    }
    if name not in solvers:
        raise BadInputError(f"{_option(name)} cannot be solved for: give it")
    return solvers[name](
        lambda value: row.event_of(noise, {**values, name: value}),
        epsilon,
        delta,
        relation=row.relation,
    )


def _compare(
    row: Row, noise: float, values: Values, delta: float, pld: float
) -> list[dict[str, Any]]:
    rows: dict[str, tuple[float, bool]] = {"this event, PLD": (pld, True)}
    event = row.event_of(noise, values)
    for accountant in ("rdp", "zcdp"):
        with contextlib.suppress(BadInputError):
            value = accounting.epsilon(event, delta, relation=row.relation, accountant=accountant)
            rows[f"this event, {accountant.upper()}"] = value, True
    rows |= row.alternatives(noise, values, delta)
    return [
        {"accounting": name, "epsilon": value if math.isfinite(value) else "inf", "bound": bound}
        for name, (value, bound) in rows.items()
    ]


def _by_contribution(
    row: Row, noise: float, values: Values, args: argparse.Namespace
) -> dict[str, float]:
    if max(args.contributions) > values["group_size"]:
        raise BadInputError(
            f"--contributions names {max(args.contributions)}, more than the group size "
            f"{values['group_size']}, which nobody may exceed"
        )
    table = accounting.epsilon_table(
        lambda count: row.event_of(noise, {**values, "group_size": count}),
        args.contributions,
        args.delta,
        relation=row.relation,
    )
    return {str(count): value for count, value in table.items()}


def _plot(
    row: Row, noise: float, values: Values, args: argparse.Namespace, meaning: Any
) -> pathlib.Path:
    import numpy as np

    with extra("plots", "--plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    if args.plot_against == "attacks":
        accounting.plot_attacks(axes, meaning)
    else:
        deltas, steps = np.full(24, args.delta), np.full(24, values["steps"])
        if args.plot_against == "steps":
            x = steps = np.unique(np.geomspace(1, max(values["steps"], 2), 24).astype(int))
        else:
            x = deltas = np.geomspace(1e-12, 1e-2, 24)
            axes.set_xscale("log")
        y = [
            accounting.epsilon(
                row.event_of(noise, {**values, "steps": int(t)}), float(d), relation=row.relation
            )
            for t, d in zip(steps, deltas, strict=False)
        ]
        axes.set(xlabel=args.plot_against, ylabel="epsilon (upper bound)")
        axes.plot(x, y, marker=".")
    axes.set_title(f"{args.mechanism}: each {row.unit}, noise multiplier {noise:.5g}")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    save_figure(figure, args.plot)
    return args.plot


def _print(args: argparse.Namespace, guarantee: Any, result: dict[str, Any], meaning: Any) -> None:
    from dpfl_jax.accounting.guarantee import rounded_up

    console = Console(stderr=args.json)
    solved = result["solved_for"]
    console.print(f"{solved.replace('_', ' ')}: {result[solved]}")
    console.print(guarantee.paragraph(), soft_wrap=True, highlight=False)
    if "meaning" in result:
        console.print("\nWhat an attacker may find out, at most:")
        for sentence in meaning.sentences():
            console.print(f"- {sentence}", soft_wrap=True, highlight=False)
    if "comparison" in result:
        table = Table("accounting", "epsilon", "a bound?")
        for row in result["comparison"]:
            value = row["epsilon"]
            shown = value if isinstance(value, str) else rounded_up(value, 6)
            table.add_row(row["accounting"], shown, "yes" if row["bound"] else "NO")
        console.print(table)
    if "epsilon_by_contribution" in result:
        table = Table("examples", "epsilon", title="what a user of so many examples spends")
        for count, value in result["epsilon_by_contribution"].items():
            table.add_row(count, rounded_up(value, 6))
        console.print(table)
    if "plot" in result:
        console.print(f"plot: {result['plot']}")


# ---- the mechanisms: one row for each name -------------------------------------------------------


Values = dict[str, Any]
_OWN = "most examples of a user (of the whole run), or records of a subject"
_CAP = "most units (truncated Poisson), or records of a subject, in a batch"
# By field, or keyword of a matrix: the option and its help.
OPTIONS = {
    "sampling_prob": ("sampling_prob", "of each unit in a step (at which it may be drawn)"),
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
    """One sub-command. Its parameters are those of its parts.

    Attributes:
      help: one line of help.
      unit: the privacy unit.
      scheme: makes the sampling scheme.
      several: makes the contribution of a privacy unit; None: what is drawn is the unit.
      matrix: makes the strategy matrix, ``(steps, separation, *, ...)``; None: independent noise.
      drawn: what is drawn; "": the unit.
      is_sized: whether the size of the data set is a parameter.
      adjacency, trust: as in ``Guarantee``.
      assumptions: further ones than the cell's, and that all parameters are public.
      event: makes the event of the sums, if no cell has it; None: the cell's.
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
        """All parameters but the noise multiplier, by the names of their options; steps last."""
        result = _taken_by(self.scheme, always=True)
        for maker in (self.several, self.matrix):
            result |= {} if maker is None else _taken_by(maker)
        more = {"silos": 1} if self.unit == "subject" else {}
        more |= {"population": _REQUIRED} if self.is_sized else {}
        for field, default in (*more.items(), ("steps", _REQUIRED)):
            result[field] = _parameter(field, int, default)
        return {parameter.name: parameter for parameter in result.values()}

    def sums(self, noise: float, values: Values) -> NoisedSums:
        """The noised sums of one silo, which are accounted."""
        steps = events.check_count(values["steps"], "number of steps", 1)
        steps *= values.get("local_steps", 1)  # steps counts rounds then
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
        """The sampling in words, and the assumptions of the guarantee."""
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
    """Parameters of ``maker`` that it is not given elsewhere; ``always``: without defaults."""
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
    """The epsilon for which the paper's formulas give this noise (both fall as 1 / epsilon)."""
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
        "cyclic Poisson sampling of users, banded noise (BandMF), user-level guarantee", "user",
        schemes.CyclicPoisson, matrix=matrices.best_banded, assumptions=_ONE_USER,
    ),
    "blt": Row(
        "cyclic participation of users, buffered noise (BLT), user-level guarantee", "user",
        schemes.Cyclic, matrix=matrices.best_buffered, assumptions=_ONE_USER,
    ),
    "banded-inverse": Row(
        "cyclic participation of users, banded-inverse noise, user-level guarantee", "user",
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
