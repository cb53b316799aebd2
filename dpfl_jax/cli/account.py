"""``dpfl account``: what a mechanism guarantees, or the parameter a guarantee needs."""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Callable
from typing import Any

from dpfl_jax.cli._account_mechanisms import MECHANISMS, PARAMETERS, Mechanism, Values
from dpfl_jax.cli._outputs import save_figure
from dpfl_jax.errors import BadInputError

HELP = "what a mechanism guarantees, or the noise a guarantee needs"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command per mechanism."""
    from dpfl_jax.cli.main import add_json_flag

    commands = parser.add_subparsers(dest="mechanism", metavar="MECHANISM", required=True)
    for name, mechanism in MECHANISMS.items():
        sub = commands.add_parser(
            name,
            help=mechanism.help,
            description=f"{mechanism.help}. Protects each {mechanism.unit}; adjacency: "
            f"{mechanism.neighbours}; trust: {mechanism.trust}. Leave out exactly one parameter.",
        )
        sub.add_argument("--epsilon", type=float, help="target (or leave out to compute it)")
        sub.add_argument("--delta", type=float, required=True, help="between 0 and 1")
        sub.add_argument("--noise-multiplier", type=float, help="noise over the clip norm")
        for parameter in (*mechanism.needs, *mechanism.optional):
            kind, words = PARAMETERS[parameter]
            sub.add_argument(f"--{parameter.replace('_', '-')}", type=kind, help=words)
        sub.add_argument(
            "--accountant", choices=("pld", "rdp", "zcdp"), default="pld", help="default: pld"
        )
        sub.add_argument("--compare", action="store_true", help="add looser ways of accounting")
        if "group_size" in mechanism.needs:
            sub.add_argument(
                "--contributions",
                type=_counts,
                metavar="N,N,...",
                help="declared numbers of examples: the epsilon of a user (subject) of each",
            )
        sub.add_argument(
            "--explain", action="store_true", help="what an attacker may find out, in words"
        )
        sub.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="draw to a file")
        sub.add_argument(
            "--plot-against",
            choices=("steps", "delta", "attacks"),
            default="steps",
            help="epsilon against steps (default) or delta; or right against false accusations",
        )
        add_json_flag(sub)


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
    from dpfl_jax import accounting

    mechanism = MECHANISMS[args.mechanism]
    values: Values = {n: getattr(args, n) for n in (*mechanism.needs, *mechanism.optional)}
    noise, epsilon = args.noise_multiplier, args.epsilon
    missing = [n for n in mechanism.needs if values[n] is None]
    missing += [n for n, v in (("noise_multiplier", noise), ("epsilon", epsilon)) if v is None]
    if len(missing) != 1:
        options = ", ".join("--" + n.replace("_", "-") for n in missing) or "nothing"
        raise BadInputError(
            f"exactly one parameter must be left out, to be computed; missing here: {options}"
        )
    solved = missing[0]
    if args.accountant != "pld" and solved != "epsilon":
        raise BadInputError(
            f"--accountant {args.accountant} only computes epsilon: give --noise-multiplier and "
            "leave out --epsilon"
        )
    if solved == "noise_multiplier":
        noise = accounting.calibrate_noise_multiplier(
            lambda s: mechanism.event(s, values), epsilon, args.delta, relation=mechanism.relation
        )
    elif solved != "epsilon":
        values[solved] = _solve(mechanism, solved, noise, values, epsilon, args.delta)
    event = mechanism.event(noise, values)
    found = accounting.epsilon(
        event, args.delta, relation=mechanism.relation, accountant=args.accountant
    )
    names = {
        "pld": "PLD (privacy-loss distributions, rounded upwards)",
        "rdp": "RDP (Renyi divergences, converted)",
        "zcdp": "zCDP (no amplification by sampling)",
    }
    guarantee = accounting.Guarantee(
        unit=mechanism.unit,
        adjacency=mechanism.neighbours,
        trust=mechanism.trust,
        epsilon=found,
        delta=args.delta,
        noise_multiplier=noise,
        accountant=names[args.accountant],
        sampling=mechanism.sampling,
        assumptions=(
            *mechanism.assumptions,
            *accounting.noise_assumptions("exact", found, args.delta, values.get("steps")),
        ),
        caveats=("this is a calculation, not the report of a run",),
        steps=values.get("steps"),
    )
    result: dict[str, Any] = {
        "mechanism": args.mechanism,
        "solved_for": solved,
        **guarantee.to_json(),
        **{name: value for name, value in values.items() if value is not None},
        "target_epsilon": epsilon,
    }
    if args.compare:
        result["comparison"] = _compare(mechanism, noise, values, args.delta, found)
    if getattr(args, "contributions", None):
        result["epsilon_by_contribution"] = _by_contribution(mechanism, noise, values, args)
    told = None
    if args.explain or (args.plot is not None and args.plot_against == "attacks"):
        told = accounting.meaning(event, args.delta, relation=mechanism.relation)
        if args.explain:
            result["meaning"] = told.to_json()
    if args.plot is not None:
        result["plot"] = str(_plot(mechanism, noise, values, args, told))
    _print(args, guarantee, result, told)
    return result


def _solve(
    mechanism: Mechanism, name: str, noise: float, values: Values, epsilon: float, delta: float
) -> Any:
    from dpfl_jax import accounting

    solvers: dict[str, Callable[..., Any]] = {
        "steps": accounting.calibrate_steps,
        "sampling_prob": accounting.calibrate_sampling_prob,
        "group_size": accounting.calibrate_group_size,
    }
    if name not in solvers:
        raise BadInputError(f"--{name.replace('_', '-')} cannot be solved for: give it")
    return solvers[name](
        lambda value: mechanism.event(noise, {**values, name: value}),
        epsilon,
        delta,
        relation=mechanism.relation,
    )


def _compare(
    mechanism: Mechanism, noise: float, values: Values, delta: float, found: float
) -> list[dict[str, Any]]:
    from dpfl_jax import accounting

    rows: list[dict[str, Any]] = [
        {"accounting": "this event, PLD", "epsilon": found, "bound": True}
    ]
    event = mechanism.event(noise, values)
    for accountant in ("rdp", "zcdp"):
        try:
            value = accounting.epsilon(
                event, delta, relation=mechanism.relation, accountant=accountant
            )
        except BadInputError:
            continue
        rows.append(
            {"accounting": f"this event, {accountant.upper()}", "epsilon": value, "bound": True}
        )
    if mechanism.others is not None:
        for name, (value, bound) in mechanism.others(noise, values, delta).items():
            rows.append({"accounting": name, "epsilon": value, "bound": bound})
    for row in rows:
        if not math.isfinite(row["epsilon"]):
            row["epsilon"] = "inf"
    return rows


def _by_contribution(
    mechanism: Mechanism, noise: float, values: Values, args: argparse.Namespace
) -> dict[str, float]:
    from dpfl_jax import accounting

    if max(args.contributions) > values["group_size"]:
        raise BadInputError(
            f"--contributions names {max(args.contributions)}, more than the group size "
            f"{values['group_size']}, which nobody may exceed"
        )
    table = accounting.epsilon_table(
        lambda count: mechanism.event(noise, {**values, "group_size": count}),
        args.contributions,
        args.delta,
        relation=mechanism.relation,
    )
    return {str(count): value for count, value in table.items()}


def _plot(
    mechanism: Mechanism, noise: float, values: Values, args: argparse.Namespace, told: Any
) -> pathlib.Path:
    import numpy as np
    from matplotlib.figure import Figure

    from dpfl_jax import accounting

    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    if args.plot_against == "attacks":
        accounting.plot_attacks(axes, told)
    else:
        if args.plot_against == "steps":
            x = np.unique(np.geomspace(1, max(values["steps"], 2), 24).astype(int))
            y = accounting.epsilon_curve(
                mechanism.event(noise, {**values, "steps": 1}),
                [int(t) for t in x],
                args.delta,
                relation=mechanism.relation,
            )
        else:
            x = np.geomspace(1e-12, 1e-2, 24)
            event = mechanism.event(noise, values)
            y = [accounting.epsilon(event, float(d), relation=mechanism.relation) for d in x]
            axes.set_xscale("log")
        axes.set(xlabel=args.plot_against, ylabel="epsilon (upper bound)")
        axes.plot(x, y, marker=".")
    axes.set_title(f"{args.mechanism}: each {mechanism.unit}, noise multiplier {noise:.5g}")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    save_figure(figure, args.plot)
    return args.plot


def _print(args: argparse.Namespace, guarantee: Any, result: dict[str, Any], told: Any) -> None:
    from rich.table import Table

    from dpfl_jax.accounting.guarantee import rounded_up
    from dpfl_jax.run.console import Console

    console = Console(stderr=args.json)
    solved = result["solved_for"]
    console.print(f"{solved.replace('_', ' ')}: {result[solved]}")
    console.print(guarantee.paragraph(), soft_wrap=True, highlight=False)
    if "meaning" in result:
        console.print("\nWhat an attacker may find out, at most:")
        for sentence in told.sentences():
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
