"""``dpfl bench accounting``: calibration against dp-accounting's own, and against group privacy."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
from dp_accounting.pld import PLDAccountant

from dpfl_jax import accounting
from dpfl_jax.accounting import closed_forms, events
from dpfl_jax.accounting.accountant import FINEST

HELP = "time and answers of noise calibration, beside dp-accounting's"
DESCRIPTION = """\
Calibrates the noise multiplier of five settings with this library and with
dp_accounting.calibrate_dp_mechanism (its defaults: PLD, grid 1e-4), without any cache, and checks
each answer on the finest grid. Seconds are CPU seconds of this process. The baseline takes minutes
in all; --no-baseline leaves it out. --group-table adds how many times smaller the noise is than
under black-box group privacy, for users of 2 to 128 examples. --planner times what a planner asks
for instead: single calibrations of rare and large losses, all cells of a compute budget (Stack
Overflow's size), federations of 42 and 1,000 unequal silos by each mechanism, and `dpfl plan` in a
process of its own, imports and all. Put another checkout first in PYTHONPATH to time that one.

examples:
  dpfl bench accounting
  dpfl bench accounting --no-baseline --group-table --json
  dpfl bench accounting --planner --repeats 5
  dpfl bench accounting --planner --cases 10 11 12 13      # local_group, 42 and 1,000 silos
"""

MakeEvent = Callable[[float], dp_accounting.DpEvent]


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting to calibrate."""

    name: str
    make_event: MakeEvent
    epsilon: float
    delta: float


CASES = (
    Case("ELS K=32 T=1000", lambda s: events.els(s, 64 / 32768, 32, 1000), 1.0, 1e-6),
    Case("ELS K=1 T=1000", lambda s: events.els(s, 1 / 16, 1, 1000), 1.0, 1e-6),
    Case("ULS q=1/64 T=1000", lambda s: events.uls(s, 1 / 64, 1000), 1.0, 1e-6),
    Case("ELS K=16 T=256", lambda s: events.els(s, 1 / 64, 16, 256), 1.0, 1e-6),
    Case(
        "Stack Overflow size: ELS K=128 T=10000",
        lambda s: events.els(s, 4096 / 30e6, 128, 10_000),
        4.0,
        1.13e-9,
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from dpfl_jax.cli.options import Options, add_options

    parser.add_argument("--no-baseline", action="store_true", help="skip dp-accounting's search")
    parser.add_argument("--group-table", action="store_true", help="noise against group privacy")
    parser.add_argument("--planner", action="store_true", help="what planning takes, instead")
    parser.add_argument("--repeats", type=int, default=3, help="of ours; the median is printed")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases to run, from 0")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the cases and prints a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=args.json)
    if args.planner:
        found = planner_rows(args.repeats, args.cases)
        table = Table("what", "CPU seconds", "seconds")
        for row in found:
            table.add_row(row["what"], f"{row['cpu_seconds']:.2f}", f"{row['seconds']:.2f}")
        console.print(table)
        return {"planner_rows": found}
    chosen = CASES if not args.cases else tuple(CASES[i] for i in args.cases)
    rows = [_row(case, args.repeats, not args.no_baseline) for case in chosen]
    table = Table(
        "case", "seconds", "baseline s", "speedup", "noise", "baseline noise", "certified"
    )
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['seconds']:.3f}",
            _text(row["baseline_seconds"], ".1f"),
            _text(row["speedup"], ".0f"),
            f"{row['noise_multiplier']:.6g}",
            _text(row["baseline_noise_multiplier"], ".6g"),
            "yes" if row["certified"] else "NO",
        )
    console.print(table)
    result: dict[str, Any] = {
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "rows": rows,
    }
    if args.group_table:
        result["group_rows"] = group_rows()
        table = Table("K", "mixture noise", "group-privacy noise", "times smaller")
        for row in result["group_rows"]:
            table.add_row(
                str(row["group_size"]),
                f"{row['noise_multiplier']:.5g}",
                f"{row['black_box_noise_multiplier']:.5g}",
                f"{row['ratio']:.3f}",
            )
        console.print(table)
    return result


def _text(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _row(case: Case, repeats: int, baseline: bool) -> dict[str, Any]:
    times, sigma = [], 0.0
    for _ in range(max(1, repeats)):
        start = time.process_time()
        sigma = accounting.calibrate_noise_multiplier(
            case.make_event, case.epsilon, case.delta, use_cache=False
        )
        times.append(time.process_time() - start)
    seconds = sorted(times)[len(times) // 2]
    reached = accounting.epsilon(case.make_event(sigma), case.delta, resolution=FINEST)
    row: dict[str, Any] = {
        "case": case.name,
        "seconds": seconds,
        "baseline_seconds": None,
        "speedup": None,
        "noise_multiplier": sigma,
        "baseline_noise_multiplier": None,
        "epsilon": reached,
        "certified": reached <= case.epsilon,
    }
    if baseline:
        start = time.process_time()
        other = dp_accounting.calibrate_dp_mechanism(
            PLDAccountant, case.make_event, case.epsilon, case.delta
        )
        row["baseline_seconds"] = time.process_time() - start
        row["baseline_noise_multiplier"] = other
        row["speedup"] = row["baseline_seconds"] / seconds
    return row


MECHANISMS = ("local_item", "local_group", "hi_grad_avg", "subject_uls", "user_ldp")


def _unequal(kind: str, count: int, reach: int) -> Any:
    from dpfl_jax.federation import mechanisms
    from dpfl_jax.federation.federation import Federation, SiloPlan
    from dpfl_jax.federation.participation import SiloFacts

    options = {"group_size": 2} if kind == "subject_uls" else {}
    mechanism = getattr(mechanisms, kind)(batch_size=32, max_records_per_subject=2, **options)
    sizes = range(200, 200 + count * 97, 97)
    facts = [SiloFacts(n, n // 3) for n in sizes]
    return Federation(tuple(SiloPlan(mechanism, f, 5) for f in facts), 20, reach, None)


def _plan(budget: int) -> Any:
    from dpfl_jax.planning import Planner, Sensitivities, UserStatistics

    users = UserStatistics(342_477, limited={128: 30_000_000})
    norms = Sensitivities.assumed(0.5, [2**k for k in range(9)])
    return Planner(users, norms, epsilon=4.0, delta=1.13e-9, steps=10_000).recommend(budget)


def planner_rows(repeats: int, chosen: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Medians of CPU seconds (children included) and seconds, without any cache on disk.

    Args:
      repeats: of each row.
      chosen: numbers of rows; None: all.
    """
    from dpfl_jax.accounting import accountant
    from dpfl_jax.federation.accountant import calibrate_federation

    os.environ["DPFL_CACHE_DIR"] = "off"

    def calibrate(prob: float, steps: int) -> Any:
        return accounting.calibrate_noise_multiplier(
            lambda s: events.uls(s, prob, steps), 1.0, 1e-6, use_cache=False
        )

    def command(budget: int) -> None:
        config = pathlib.Path(__file__).parents[1] / "configs/userlevel/stackoverflow_uls.yaml"
        words = ["plan", str(config), "--compute-budget", str(budget), "--json"]
        subprocess.run([sys.executable, "-m", "dpfl_jax", *words], check=True, capture_output=True)

    cases: dict[str, Callable[[], Any]] = {
        "calibration, q = 0.01, 1 step": lambda: calibrate(0.01, 1),
        "calibration, q = 0.001, 25 steps": lambda: calibrate(0.001, 25),
        "cells of budget 1,024": lambda: _plan(1024),
        "cells of budget 4,096": lambda: _plan(4096),
        "dpfl plan, budget 1,024, cold": lambda: command(1024),
        "dpfl plan, budget 4,096, cold": lambda: command(4096),
    }
    for kind, count, everywhere in itertools.product(MECHANISMS, (42, 1000), (False, True)):
        name = f"{kind}, {count:,} unequal silos, a person in {'all' if everywhere else 'one'}"
        federation = _unequal(kind, count, count if everywhere else 1)
        cases[name] = functools.partial(calibrate_federation, federation, 4.0, 1e-5)
    rows, names = [], list(cases)
    for name in names if not chosen else [names[i] for i in chosen]:
        times = []
        for _ in range(max(1, repeats)):
            if hasattr(accountant, "_flat_epsilon"):
                accountant._flat_epsilon.cache_clear()
            start, used = time.perf_counter(), sum(os.times()[:4])
            cases[name]()
            times.append((sum(os.times()[:4]) - used, time.perf_counter() - start))
        cpu, wall = (sorted(column)[len(times) // 2] for column in zip(*times))
        rows.append({"what": name, "cpu_seconds": cpu, "seconds": wall})
    return rows


def black_box_noise(
    group_size: int, sampling_prob: float, steps: int, epsilon: float, delta: float
) -> float:
    """Noise that black-box group privacy asks for (geometric form, RDP in log space), to 0.1 %."""

    def spent(sigma: float) -> float:
        event = events.poisson(sigma, sampling_prob, steps)
        return closed_forms.black_box_epsilon(event, group_size, delta)

    low = accounting.calibrate_noise_multiplier(
        lambda s: events.els(s, sampling_prob, group_size, steps), epsilon, delta
    )
    high = low
    while spent(high) > epsilon:
        low, high = high, 1.3 * high
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


def group_rows(sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128)) -> list[dict[str, Any]]:
    """Noise by the mixture and by group privacy at Figure 2's setting: N=1024, B=64, T=1000."""
    rows = []
    for size in sizes:
        prob = 64 / (size * 1024)
        make_event = functools.partial(events.els, sampling_prob=prob, group_size=size, steps=1000)
        ours = accounting.calibrate_noise_multiplier(make_event, 1.0, 1e-6)
        other = black_box_noise(size, prob, 1000, 1.0, 1e-6)
        rows.append(
            {
                "group_size": size,
                "noise_multiplier": ours,
                "black_box_noise_multiplier": other,
                "ratio": other / ours,
            }
        )
    return rows
