"""``dpfl plan --fit``, ``--with`` and ``--ask``: proxy runs, and what their law says."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
from typing import Any

from dpfl_jax.errors import BadInputError

QUESTIONS = {
    "algorithm": "which algorithm, and where do examples overtake users as compute grows",
    "epsilon": "what does a smaller epsilon cost me",
    "users": "what would more users give, twice as many for example; how many do I need",
    "overtake": "from how many users on is drawing examples ahead of drawing users",
    "feasible": "is privacy feasible here: how much of the gain without it is kept",
    "variants": "which of several fits: flat or per-layer clipping, LoRA or full, model sizes",
    "size": "which model size, steps and batch, as compute grows (fits of two sizes or more)",
    "pareto": "epsilon, loss and compute against each other",
}
PUBLIC = (
    "--fit trains on these data without privacy: proxy runs add noise that is not accounted for, "
    "and their losses and the fit are a function of the data. Use public data alone."
)


def check_public(args: argparse.Namespace, config: Any, console: Any) -> None:
    """Says that proxy runs protect nobody, and wants it said that the data are public."""
    from dpfl_jax.data.sets import SETS

    console.print(PUBLIC, style="bold red", highlight=False, soft_wrap=True)
    embedded = config.data.path is None and config.data.source in (*SETS, "python_source")
    if not (embedded or args.public):
        raise BadInputError(
            f"data.source={config.data.source} is not known to be public, and proxy runs protect "
            "nobody: give public data, and say so with --public"
        )


def fit(args: argparse.Namespace, config: Any, planner: Any, console: Any) -> dict[str, Any]:
    """Runs the proxies that are missing, fits, writes and draws the law."""
    from dpfl_jax.planning.figures import draw_law
    from dpfl_jax.planning.planner import in_words
    from dpfl_jax.planning.proxy import design, run_trials
    from dpfl_jax.planning.scaling_law import fit_scaling_law
    from dpfl_jax.run.console import StepProgress
    from dpfl_jax.training.slices import gradient_cost

    budget = args.compute_budget or int(config.mechanism.compute_budget)
    with console.status("calibrating the range of noise"):
        trials = design(planner, budget, args.runs, args.rates or (1.0,))
    file = args.fit.with_suffix(".runs.jsonl")
    with StepProgress(console, "proxy runs", len(trials), 0) as bar:

        def done(count: int, row: dict[str, Any]) -> None:
            loss = "diverged" if row["loss"] is None else f"loss {row['loss']:.4f}"
            bar.update(count, f"{in_words(row)}, ratio {row['ratio']:g}: {loss}")

        rows = run_trials(
            args.config,
            args.overrides,
            trials,
            file,
            jobs=args.jobs,
            allow_code=args.allow_code,
            done=done,
        )
    about = {
        "config": os.fspath(args.config),
        "overrides": list(args.overrides),
        "initial": rows[0]["initial"],
        "learning_rate": config.optimizer.learning_rate,
        "flops_per_gradient": None,
    }
    if config.model.is_transformer:
        about |= gradient_cost(config, args.vocab_size)
    law = fit_scaling_law(rows, planner.sensitivities, about)
    law.save(args.fit)
    picture = args.png or args.fit.with_suffix(".png")
    draw_law(law, picture)
    finite = [row for row in rows if row["loss"] is not None]
    again = law.predict(finite)
    errors = sorted(abs(p["loss"] / r["loss"] - 1) for p, r in zip(again, finite))
    console.print(
        f"{len(finite)} runs fitted, median error {errors[len(errors) // 2]:.2%} on themselves; "
        f"written: {args.fit}, drawn: {picture}; use it: dpfl plan CONFIG --with "
        f"{shlex.quote(str(args.fit))}",
        highlight=False,
        soft_wrap=True,
    )
    return {
        "status": "fitted",
        "fit": os.fspath(args.fit),
        "picture": os.fspath(picture),
        "runs": len(finite),
        "diverged": len(rows) - len(finite),
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
        "median_error_on_itself": errors[len(errors) // 2],
        "public_data_only": PUBLIC,
    }


def laws(files: list[pathlib.Path] | None) -> dict[str, Any]:
    """The fits, by the names of their files."""
    from dpfl_jax.planning.scaling_law import ScalingLaw

    return {file.stem: ScalingLaw.load(file) for file in files or []}


def answer(args: argparse.Namespace, scenarios: dict[str, Any], console: Any) -> dict[str, Any]:
    """Answers ``--ask``, and draws."""
    from rich.table import Table

    from dpfl_jax.planning.figures import draw_answer
    from dpfl_jax.planning.questions import ask, to_svg

    with console.status("calibrating noise for every cell"):
        result = ask(args.ask, scenarios, args.target_loss)
    table = Table(result["x"], *result["series"], title=QUESTIONS[args.ask])
    for points in zip(*result["series"].values()):
        shown = ["-" if p["cell"] is None else f"{p['score']:.4g}" for p in points]
        table.add_row(f"{points[0]['x']:,.6g}", *shown)
    console.print(table)
    console.print(
        f"scores: {result['y']}", *[f"; {k}: {v:.4g}" for k, v in result["lines"].items()]
    )
    console.print(result["answer"], highlight=False, soft_wrap=True)
    if args.png is not None:
        draw_answer(result, QUESTIONS[args.ask], args.png)
        console.print(f"drawn: {args.png}")
    if args.html is not None:
        try:
            args.html.write_text(f"<!doctype html><meta charset='utf-8'>{to_svg(result)}")
        except OSError as error:
            raise BadInputError(f"cannot write {args.html}: {error.strerror}") from error
        console.print(f"drawn: {args.html}")
    return {"status": "answered", **result}


def print_prediction(console: Any, prediction: dict[str, Any]) -> None:
    """The best of the budget, the best split, the least epsilon."""
    from dpfl_jax.planning.planner import in_words

    def words(cell: dict[str, Any]) -> str:
        text = in_words(cell)
        if "loss" in cell:
            text += f": loss {cell['loss']:.3f} ({cell['low']:.3f} to {cell['high']:.3f})"
            text += "" if cell["rate"] == 1 else f" at {cell['rate']:g} times the learning rate"
            if cell["outside"] > 1.5:
                text += f", {cell['outside']:.2g} times beyond what was tried"
        return text

    console.print(f"least predicted loss at this budget: {words(prediction['best_of_budget'])}")
    if prediction["best_split"] is not None:
        console.print(
            f"best split of {prediction['gradients']:.4g} gradient evaluations over steps and "
            f"batch: {words(prediction['best_split'])}"
        )
    console.print(f"loss before training: {prediction['initial_loss']:.3f}")
    if (least := prediction.get("least_epsilon")) is not None:
        if least["cell"] is None:
            reached = "not reached with this compute, even without noise"
        else:
            reached = f"from epsilon {least['value']:.3g} on ({words(least['cell'])})"
        console.print(f"loss {least['target_loss']:g}: {reached}")
