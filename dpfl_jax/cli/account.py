"""``dpfl account``: what a mechanism guarantees, or the parameter a guarantee needs."""

from __future__ import annotations

import argparse
import contextlib
import math
import pathlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

from dpfl_jax import accounting
from dpfl_jax.cli import options
from dpfl_jax.cli._account_rows import OPTION_HELP, ROWS, Row, Values
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import save_figure

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
  # epsilon of a noise multiplier, beside looser ways to account for the same run
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
    """What every mechanism is asked.

    Attributes:
      epsilon: target (or leave out to compute it).
      delta: between 0 and 1.
      noise_multiplier: noise over the clip norm.
      accountant: of epsilon.
      compare: add looser ways of accounting.
      explain: what an attacker may find out, in words.
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
    """Adds one sub-command per row, whose parameters are those of the row's parts."""
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
    found = accounting.epsilon(event, delta, relation=row.relation, accountant=args.accountant)
    sampling, assumptions = row.describe(noise, values)
    guarantee = accounting.Guarantee(
        unit=row.unit,
        adjacency=row.neighbours,
        trust=row.trust,
        epsilon=found,
        delta=delta,
        noise_multiplier=noise,
        accountant=ACCOUNTANTS[args.accountant],
        sampling=sampling,
        assumptions=(
            *assumptions,
            *accounting.noise_assumptions("exact", found, delta, values["steps"]),
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
        result["comparison"] = _compare(row, noise, values, delta, found)
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
    row: Row, noise: float, values: Values, delta: float, found: float
) -> list[dict[str, Any]]:
    rows: dict[str, tuple[float, bool]] = {"this event, PLD": (found, True)}
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
    from rich.table import Table

    from dpfl_jax.accounting.guarantee import rounded_up
    from dpfl_jax.run.console import Console

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
