"""``dpfl plan --chip`` and ``--memory``: what each cell costs, and whether it fits."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from typing import Any

from dpfl_jax.errors import BadInputError

_COMPILED = 3  # rows of the table, from the top, that --memory compiles


@dataclasses.dataclass(frozen=True)
class Start:
    """Data, model and starting parameters of a configuration, read once and only if asked for."""

    config: Any
    console: Any

    @functools.cached_property
    def data(self) -> Any:
        """(data set, model)."""
        from dpfl_jax.training.central_run import read_data

        return read_data(self.config, self.console)

    @functools.cached_property
    def params(self) -> Any:
        """Parameters before the first step."""
        from dpfl_jax.mesh import make_mesh
        from dpfl_jax.training.start import starting_params

        data, model = self.data
        return starting_params(self.config, data, model, make_mesh(), self.console)[0]


def check(args: argparse.Namespace) -> None:
    """Refuses what cannot be billed, before anything is computed."""
    from dpfl_jax.training.slices import HBM, kind_of

    if args.memory is not None:
        kind = kind_of(args.memory)
        if args.chip in HBM and kind not in (args.chip, "cpu"):
            raise BadInputError(
                f"--memory is of {kind}, but --chip is {args.chip}: give a topology of that chip, "
                f"e.g. --memory {args.chip}:2x2"
            )


def priced(config: Any, args: argparse.Namespace, start: Start, console: Any) -> Any:
    """By plain candidate, the chip and a gradient evaluation's FLOPs; None without ``--chip``."""
    from dpfl_jax.mechanisms.candidates import CANDIDATES, plain
    from dpfl_jax.planning.bill import Chip

    if args.chip is None:
        given = [n for n in ("mfu", "price", "watts", "chip_hours") if getattr(args, n) is not None]
        if given:
            raise BadInputError(f"--{given[0].replace('_', '-')} needs --chip, e.g. --chip v5e")
        return None
    if args.chip == "here" and config.population is not None:
        raise BadInputError("--chip here takes steps, but this configuration has statistics alone")
    from dpfl_jax.planning.clock import this_machine  # which imports all of training
    from dpfl_jax.training.slices import gradient_cost

    found, chips, more = {}, {}, {"price": args.price, "watts": args.watts}
    if args.chip == "here":
        (data, model), params = start.data, start.params
    else:
        chip = Chip.named(args.chip, mfu=args.mfu, **more)
    with console.status("counting the operations of a step"):
        for kind in (plain(examples=False), plain(examples=True)):
            group = getattr(config.mechanism, "group_size", 1)
            cell = _cell_config(args, config, kind, group)
            found[kind] = gradient_cost(cell, args.vocab_size)["flops_per_gradient"]
            if args.chip == "here":  # what is reached depends on the algorithm
                chip = this_machine(cell, data, model, params, found[kind], **more)
                console.print(
                    f"this machine, {CANDIDATES[kind].name}: {chip.peak:.3g} FLOP/s reached, and "
                    f"{chip.step_seconds:.2g} s a step beside"
                )
            chips[kind] = chip
    return chips, found


def add_bills(result: dict[str, Any], price: Any, row: int) -> None:
    """Adds ``bill`` to each option of a plan's JSON; ``row`` is the microbatch size."""
    from dpfl_jax.mechanisms.candidates import draws_examples, plain
    from dpfl_jax.planning.bill import expected_rows

    chips, each = price
    for option in (result["best"], *result["options"]):
        kind = plain(draws_examples(option["kind"]))  # whose gradients are all the others'
        units = expected_rows(option["size"], row) * row
        flops = each[kind] * units * option["gradients"] * result["steps"]
        option["bill"] = chips[kind].bill(flops, result["steps"])


def add_memory(result: dict[str, Any], config: Any, args: argparse.Namespace, console: Any) -> None:
    """Adds ``memory`` to the options whose programs are those of the table's first rows.

    ``peak_bytes`` of a device, its ``limit_bytes`` (None: not known) and ``fits`` (likewise).
    """
    from dpfl_jax.planning.bill import GPU_BYTES
    from dpfl_jax.training.slices import measure, memory_of, slice_mesh, vocabulary

    mesh = slice_mesh(args.memory, config.execution.mesh.axes)
    limit = memory_of(args.memory) or GPU_BYTES.get(args.chip)
    wanted = dict.fromkeys(_program(option) for option in in_order(result)[:_COMPILED])
    known: dict[Any, dict[str, Any]] = {}
    for kind, group, bands in wanted:
        with console.status(f"compiling {kind} G={group}"):
            cell = _cell_config(args, config, kind, group, bands)
            vocab = vocabulary(cell, args.vocab_size)
            found = measure(cell, vocab, args.memory, mesh, baseline=False)
        fits = found["fits"]
        if fits is None and limit is not None:
            fits = found["peak_bytes"] <= limit
        known[kind, group, bands] = {
            "peak_bytes": found["peak_bytes"],
            "limit_bytes": limit,
            "fits": fits,
            "topology": args.memory,
        }
    for option in (result["best"], *result["options"]):
        if _program(option) in known:
            option["memory"] = known[_program(option)]


def in_order(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The options as they are listed: by predicted loss, else by noise."""
    by = "loss" if "prediction" in result else "noise"
    return sorted(result["options"], key=lambda option: option[by])


def memory_words(option: dict[str, Any]) -> tuple[str, str]:
    """GiB of a device, and whether they are there; dashes where nothing was compiled."""
    if "memory" not in option:
        return "-", "-"
    told = option["memory"]
    fits = {True: "yes", False: "NO", None: "unknown"}[told["fits"]]
    return f"{told['peak_bytes'] / 2**30:.2f}", fits


def _program(option: dict[str, Any]) -> tuple[str, int, int]:
    """Drawn examples compile to one program whatever the group size."""
    return option["kind"], option["gradients"], option["bands"]


def _cell_config(
    args: argparse.Namespace, config: Any, kind: str, group: int, bands: int = 1
) -> Any:
    from dpfl_jax.config import load_config
    from dpfl_jax.mechanisms.candidates import at_budget

    budget = max(config.mechanism.compute_budget, group)
    mechanism = at_budget(config.mechanism, kind, budget, group, bands=bands)
    section = f"mechanism={json.dumps(mechanism.to_section())}"
    return load_config(args.config, [*args.overrides, section], args.allow_code)
