"""``dpfl bench bill``: predicted against measured CPU time of five runs."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

HELP = "the bill of five runs, against their measured time"
DESCRIPTION = """\
Times a few steps of two models (the quickstart's, and one of another size) with one and with four
rows of units, for each algorithm and group size, as `dpfl plan --chip here` does; bills five runs
of other batches from the operations of their steps; and takes these steps. On a CPU seconds are CPU
seconds. Compiling is left out of both; medians of 3.

examples:
  dpfl bench bill
"""

LARGE = ()
SMALL = ("model={size: tiny}", "data.tokenizer=bytes", "data.seq_len=64", "pretrain=null")
uls = "mechanism={{kind: uls, group_size: {}, cohort_size: {}, clip_norm: 0.5}}"
els = "mechanism={{kind: els, group_size: {}, batch_size: {}, clip_norm: 0.5}}"
RUNS = (
    ("ULS of 1, 128 users, 12 steps", LARGE, uls.format(1, 128), 12),
    ("ELS of 8, 64 examples, 24 steps", LARGE, els.format(8, 64), 24),
    ("ULS of 4, 48 users, 10 steps", LARGE, uls.format(4, 48), 10),
    ("tiny, ULS of 2, 64 users, 12 steps", SMALL, uls.format(2, 64), 12),
    ("tiny, ELS of 4, 256 examples, 12 steps", SMALL, els.format(4, 256), 12),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from dpfl_jax.cli.options import Options, add_options

    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Times, bills, trains, prints."""
    from rich.console import Console
    from rich.table import Table

    from dpfl_jax.config import load_config
    from dpfl_jax.mesh import make_mesh
    from dpfl_jax.planning.costs import expected_rows, this_machine, time_steps
    from dpfl_jax.training.central_run import read_data
    from dpfl_jax.training.slices import gradient_cost
    from dpfl_jax.training.start import starting_params

    console, quiet = Console(stderr=args.json), Console(quiet=True)
    file = pathlib.Path(__file__).parents[1] / "configs/quickstart.yaml"
    chips: dict[Any, Any] = {}
    rows = []
    for name, model_is, mechanism_is, steps in RUNS:
        overrides = [*model_is, "eval.prompt=null", mechanism_is]
        if model_is:
            overrides.insert(0, "model.checkpoint=null")
        config: Any = load_config(file, overrides)
        kind = (model_is, config.mechanism.kind, config.mechanism.group_size)
        if kind not in chips:
            data, model = read_data(config, quiet)
            params, _ = starting_params(config, data, model, make_mesh(), quiet)
            flops = gradient_cost(config, model.config.vocab_size)["flops_per_gradient"]
            chips[kind] = (
                data,
                model,
                params,
                this_machine(config, data, model, params, flops),
            )
        data, model, params, chip = chips[kind]
        mechanism = config.mechanism
        size, row = mechanism.participation.divisor, config.execution.microbatch_size
        flops = gradient_cost(config, model.config.vocab_size)["flops_per_gradient"]
        flops *= (
            expected_rows(size, row) * row * (mechanism.participation.unit_examples or 1) * steps
        )
        billed = 3600 * chip.bill(flops, steps)["chip_hours"]
        times = [time_steps(config, data, model, params, mechanism, steps)[0] for _ in range(3)]
        seconds = sorted(times)[1]
        told = {"run": name, "flops": flops, "billed": billed, "measured": seconds}
        rows.append({**told, "error": billed / seconds - 1})
        console.print(f"{name}: {billed:.1f} s billed, {seconds:.1f} s measured", highlight=False)
    table = Table("run", "FLOPs", "billed s", "measured s", "error")
    for found in rows:
        numbers = [f"{found['flops']:.3g}", f"{found['billed']:.1f}", f"{found['measured']:.1f}"]
        table.add_row(found["run"], *numbers, f"{found['error']:+.1%}")
    console.print(table)
    reached = {
        f"{'tiny' if model else 'quickstart'} {kind} {group}": chip[3].peak
        for (model, kind, group), chip in chips.items()
    }
    console.print(f"FLOP/s reached: {json.dumps(reached)}")
    return {"flops_per_second": reached, "rows": rows}
