"""``dpfl plan`` of a federation: mechanism, steps and cap, by noise over signal."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from dpfl_jax.config.load import load_config, write_config
from dpfl_jax.errors import BadInputError

_CENTRAL = (
    "compute_budget", "private_median", "target_noise", "fit", "fits", "target_loss", "ask", "html",
    "chip", "chip_hours", "memory", "overtake",
)  # fmt: skip


def run(args: argparse.Namespace, config: Any, console: Any) -> dict[str, Any]:
    """Plans a federation, prints the table, and writes the best configuration if asked.

    Raises:
      BadInputError: nobody trusted, arguments for central runs, or no way meets the target.
    """
    from dpfl_jax.federation.choice import by_reach, federated_options, other_steps
    from dpfl_jax.federation.federated_run import prepare

    if config.variant == "isrl":
        raise BadInputError(
            "an ISRL configuration has one mechanism: `dpfl train CONFIG --dry-run` says how noise "
            "and signal compare, and which key would help"
        )
    for name in _CENTRAL:
        if getattr(args, name) is not None:
            flag = "with" if name == "fits" else name.replace("_", "-")
            raise BadInputError(f"--{flag} is for central runs: leave it out for a federation")
    if args.epsilon is not None:
        overrides = [*args.overrides, f"privacy.epsilon={args.epsilon}"]
        config = load_config(args.config, overrides, args.allow_code)
    prepared = prepare(config, console)
    with console.status("calibrating noise"):
        # Of equal noise, what leaves out the fewest records.
        found = sorted(
            federated_options(prepared), key=lambda c: (float(f"{c.ratio:.3g}"), -c.kept)
        )
        if not found:
            raise BadInputError(
                f"no mechanism meets epsilon {config.privacy.epsilon:g}: raise privacy.epsilon, or "
                "lower mechanism.max_records_per_subject or federation.max_silos_per_subject"
            )
        of_kind: dict[str, Any] = {}
        for choice in found:
            of_kind.setdefault(choice.kind, choice)
        paced = [sorted([c, *other_steps(prepared, c)], key=_steps) for c in of_kind.values()]
        best, reason = found[0], "at the configuration's steps"
        if best.ratio > 1:
            best, reason = min(paced[0], key=lambda c: c.ratio), "as noise swamps signal"
        reach = by_reach(prepared, best)
    reason = (
        f"{best.kind}, {reason}: least noise, {best.ratio:.3g} times the largest that the signal "
        "of the whole run can be"
    )
    if best.ratio > 1:
        reason += "; that is too much: raise epsilon, or take more people or a smaller model"
    result = {
        "status": "planned",
        "epsilon": config.privacy.epsilon,
        "delta": prepared.delta,
        "parameters": prepared.model.num_params,
        "best": best.to_json(),
        "options": [choice.to_json() for choice in found],
        "by_steps": {each[0].kind: {str(_steps(c)): c.ratio for c in each} for each in paced},
        "by_reach": {str(silos): ratio for silos, ratio in reach.items()},
        "reason": reason,
    }
    _print(console, result, prepared)
    if args.png is not None:
        from dpfl_jax.planning.figures import draw_caps  # and Matplotlib, which takes a second

        draw_caps(found, args.png)
        console.print(f"drawn: {args.png}")
    if args.out is not None:
        # With the target as it was asked for: a delta that follows from the data is left to them.
        chosen = best.config.model_copy(update={"privacy": config.privacy})
        write_config(args.out, chosen, reason)
        train = ["dpfl", "train", str(args.out)]
        console.print(f"written: {args.out}; run it with: {shlex.join(train)}")
    return result


def _steps(choice: Any) -> int:
    return int(choice.rounds * choice.local_steps)


def _print(console: Any, result: dict[str, Any], prepared: Any) -> None:
    from rich.table import Table

    section = prepared.config.federation
    table = Table(
        "mechanism", "cap", "records kept", "noise multiplier", "noise / signal",
        title=f"epsilon {result['epsilon']:g} for each person; {section.rounds} rounds of "
        f"{section.local_steps} local steps of {result['options'][0]['batch']:.4g} records",
    )  # fmt: skip
    for option in result["options"]:
        table.add_row(
            option["kind"],
            str(option["cap"]),
            f"{option['kept']:.0%}",
            f"{option['noise_multiplier']:.4g}",
            f"{option['ratio']:.3g}",
        )
    console.print(table)
    console.print(result["reason"])

    def ratios_text(ratios: dict[str, float]) -> str:
        return ", ".join(f"{number}: {ratio:.3g}" for number, ratio in ratios.items())

    console.print(
        "by rounds x local steps, at equal gradients (noise depends on the product alone; few "
        f"rounds send less): {ratios_text(result['by_steps'][result['best']['kind']])}"
    )
    console.print(
        f"were each person in at most so many silos (max_silos_per_subject): "
        f"{ratios_text(result['by_reach'])}"
    )
