"""``dpfl bench prediction``: the law of loss on held-out cells."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
from collections.abc import Collection
from typing import Any

import numpy as np

HELP = "predicted loss of runs that the law was not fitted to"
DESCRIPTION = """\
Trains a grid of 72 small runs of a configuration (ULS of 1 and of 4 examples, ELS of 4; three
budgets; four numbers of steps; noise as epsilon 2 and 8 ask for), fits the law of `dpfl plan --fit`
to half of them, and predicts the other half: median error, rank correlation, how many lie in their
90 % bands, and how far the planner's pick is from the best cell of the same epsilon and compute.
Repeated over ten halves; also fitted to fewer runs, and to runs on one side of a line (shorter,
smaller, ULS alone). Runs are kept in --out, and an interrupted grid goes on. Public data alone:
the noise is added, and not accounted for.

examples:
  dpfl bench prediction --out bench/quickstart --png prediction.png   # about 10 CPU minutes
  dpfl bench prediction data.source=python_source data.validation_fraction=.15 --out bench/python
  dpfl bench prediction data.path=PLAYS data.max_examples_per_user=64 --out bench/plays
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from dpfl_jax.cli.options import Options, add_options

    parser.add_argument("--config", default=None, help="default: configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of its keys")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--fit", type=pathlib.Path, help="a fit of dpfl plan --fit, to try too")
    parser.add_argument("--png", type=pathlib.Path, help="predicted over measured loss")
    parser.add_argument("--steps", type=int, default=48, help="of the longest runs")
    parser.add_argument("--budget", type=int, default=128, help="gradients a step of the largest")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains what is missing, fits, predicts, prints."""
    from rich.console import Console
    from rich.table import Table

    from dpfl_jax.planning.scaling_law import ScalingLaw

    console = Console(stderr=args.json)
    config = args.config or pathlib.Path(__file__).parents[1] / "configs/quickstart.yaml"
    args.out.mkdir(parents=True, exist_ok=True)
    cells, rows, norms = _grid(config, args, console)
    found = _halves(cells, rows, norms)
    if args.fit is not None:
        law = ScalingLaw.load(args.fit)
        found.append({"fitted_to": args.fit.name, **_score(cells, rows, law)})
    table = Table("fitted to", "runs", "median error", "largest", "rank", "in band", "pick: mean",
                  "pick: worst", "within 1 %")  # fmt: skip
    for row in found:
        numbers = ("median_error", "largest_error", "rank", "in_band", "regret", "worst_regret",
                   "picks_within_1_percent")  # fmt: skip
        table.add_row(row["fitted_to"], str(row["runs"]), *[_text(row[n]) for n in numbers])
    console.print(table)
    if args.png is not None:
        _draw(rows, norms, args.png)
        console.print(f"drawn: {args.png}")
    losses = [row["loss"] for row in rows]
    return {
        "runs": len(rows),
        "initial": rows[0]["initial"],
        "losses": [min(losses), max(losses)],
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
        "rows": found,
    }


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _grid(config: Any, args: argparse.Namespace, console: Any) -> Any:
    """((epsilon, compute) of each run, rows, gradient norms)."""
    from dpfl_jax.clipping import join
    from dpfl_jax.config import load_config
    from dpfl_jax.planning import Planner, Sensitivities, UserStatistics, estimate_sensitivities
    from dpfl_jax.planning.proxy import Proxy, Trial, run_trials
    from dpfl_jax.run.console import StepProgress

    loaded: Any = load_config(config, args.overrides)
    proxy = Proxy(loaded, args.budget)
    sizes = np.diff(proxy.data.train.user_offsets)
    users = UserStatistics(len(sizes), sizes=sizes)
    file = args.out / "norms.json"
    if file.exists():
        kept = json.loads(file.read_text())
        norms = Sensitivities(kept["example"], {int(k): v for k, v in kept["user"].items()}, {}, "")
    else:
        norms = estimate_sensitivities(
            proxy.model.loss,
            join(proxy.trained, proxy.frozen),
            proxy.data.train,
            [1, 2, 4, 8],
            trainable=proxy.trainable,
        )
        file.write_text(json.dumps({"example": norms.example, "user": norms.user}))
    trials: list[Trial] = []
    cells: list[tuple[float, int]] = []
    for steps in (args.steps // 8, args.steps // 4, args.steps // 2, args.steps):
        for epsilon in (2.0, 8.0):
            planner = Planner(users, norms, epsilon=epsilon, delta=1e-4, steps=steps)
            for budget in (args.budget // 4, args.budget // 2, args.budget):
                tried = (("uls", 1, budget), ("uls", 4, budget // 4), ("els", 4, budget))
                for option in itertools.starmap(planner.option, tried):
                    ratio = option.noise_multiplier / option.size
                    trials.append(
                        Trial(option.kind, option.group_size, option.size, steps, ratio,
                              seed=len(trials))
                    )  # fmt: skip
                    cells.append((epsilon, budget * steps))
    with StepProgress(console, "runs", len(trials), 0) as bar:
        rows = run_trials(
            os.fspath(config), args.overrides, trials, args.out / "runs.jsonl", jobs=args.jobs,
            done=lambda count, row: bar.update(count, f"loss {row['loss']}"),
        )  # fmt: skip
    return cells, rows, norms


def _halves(cells: Any, rows: Any, norms: Any) -> list[dict[str, Any]]:
    n, found = len(rows), []
    for share in (n // 2, n // 4, n // 6):
        parts = []
        for seed in range(10):
            order = np.random.default_rng(seed).permutation(n)
            parts.append(_fitted(cells, rows, norms, set(order[:share].tolist())))
        keys = parts[0].keys()
        mean = {key: float(np.mean([part[key] for part in parts])) for key in keys}
        mean["worst_regret"] = max(part["worst_regret"] for part in parts)
        mean["worst_median_error"] = max(part["median_error"] for part in parts)
        mean["worst_rank"] = min(part["rank"] for part in parts)
        found.append({"fitted_to": "random runs, 10 times", **mean, "runs": share})
    steps, budget = (
        max(r["steps"] for r in rows),
        max(c[1] / r["steps"] for c, r in zip(cells, rows)),
    )
    sides = {
        "half as many steps and fewer": lambda c, r: r["steps"] < steps,
        "half the budget and less": lambda c, r: c[1] / r["steps"] < budget,
        "ULS alone": lambda c, r: r["kind"] == "uls",
    }
    for name, side in sides.items():
        chosen = {i for i in range(n) if side(cells[i], rows[i])}
        found.append({"fitted_to": name, **_fitted(cells, rows, norms, chosen)})
    return found


def _fitted(cells: Any, rows: Any, norms: Any, some: set[int]) -> dict[str, Any]:
    from dpfl_jax.planning.scaling_law import fit_scaling_law

    law = fit_scaling_law([rows[i] for i in sorted(some)], norms)
    return _score(cells, rows, law, some)


def _score(
    cells: Any, rows: Any, law: Any, fitted: Collection[int] = frozenset()
) -> dict[str, Any]:
    from scipy.stats import spearmanr

    told = law.predict(rows)
    others = [i for i in range(len(rows)) if i not in fitted]
    measured = np.array([row["loss"] for row in rows])
    predicted = np.array([one["loss"] for one in told])
    errors = np.abs(predicted / measured - 1)[others]
    within = [told[i]["low"] <= measured[i] <= told[i]["high"] for i in others]
    regrets = []
    for question in sorted(set(cells)):
        same = [i for i in range(len(rows)) if cells[i] == question]
        pick = min(same, key=lambda i: predicted[i])
        regrets.append(measured[pick] / min(measured[same]) - 1)
    return {
        "runs": len(law.rows),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "rank": float(spearmanr(predicted[others], measured[others])[0]),
        "in_band": float(np.mean(within)),
        "regret": float(np.mean(regrets)),
        "worst_regret": float(max(regrets)),
        "picks_within_1_percent": float(np.mean([regret <= 0.01 for regret in regrets])),
    }


def _draw(rows: Any, norms: Any, file: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    from dpfl_jax.planning.scaling_law import fit_scaling_law

    order = np.random.default_rng(0).permutation(len(rows))
    half = set(order[: len(rows) // 2].tolist())
    law = fit_scaling_law([rows[i] for i in sorted(half)], norms)
    figure = Figure(figsize=(6, 5.5))
    ax = figure.subplots()
    for (kind, group), mark in {("uls", 1): "o", ("uls", 4): "s", ("els", 4): "^"}.items():
        arm = [r for i, r in enumerate(rows)
               if i not in half and (r["kind"], r["group_size"]) == (kind, group)]  # fmt: skip
        told = law.predict(arm)
        value = np.array([one["loss"] for one in told])
        bars = np.abs(np.array([[one["low"], one["high"]] for one in told]).T - value)
        x = [row["loss"] for row in arm]
        label = f"{kind.upper()} of {group}"
        ax.errorbar(x, value, bars, fmt=mark, ms=5, elinewidth=1, alpha=0.8, label=label)
    ends = [min(row["loss"] for row in rows), max(row["loss"] for row in rows)]
    ax.plot(ends, ends, color="grey", linewidth=1)
    ax.set(xlabel="measured held-out loss", ylabel="predicted, with 90 % band")
    ax.set_title(f"{len(rows) - len(half)} runs, law fitted to {len(half)} others", fontsize=10)
    ax.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
