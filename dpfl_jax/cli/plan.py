"""``dpfl plan``: finds the best algorithm and group sizes for a compute budget."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
from typing import Annotated, Any, ClassVar

from rich.table import Table

from dpfl_jax.cli.options import Configured, Flag
from dpfl_jax.config.load import load_config, write_config
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.run.console import Console

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

DESCRIPTION = """\
Price every way to spend a compute budget (expected gradient evaluations per step): ELS at each
group size; ULS at each split into M users of G examples; at the same splits BandMF, BLT and banded
inverse, with cyclic participation (sampled within a cycle, or not) and noise that is correlated
over steps; and allocation, where every user is in exactly one of every t steps, at ULS's best
split. The table compares the noise on the averaged gradient: sigma times the typical gradient norm
over the size. Correlated noise counts as the independent noise that leaves as much noise in sums of
gradients, which training follows.
Prints a table, the heuristics next to the best, and the reason; writes a heat map and a
configuration that `dpfl train` runs. --target-noise, --ask and the best split of a fit weigh ELS
and ULS.

With a `population` section in the configuration no data are read, and gradient norms are assumed to
fall as G^-DECAY (0: all examples of a user alike; 0.5: orthogonal). Otherwise norms are the medians
over a sample of users at the starting model: computed from private data without noise, for your own
eyes or on public data.

--chip adds a bill to each cell: FLOPs of the train step's products and convolutions (as traced;
every position of a sequence counts, padding too) over peak times MFU. --memory also compiles the
steps of the best cells, as `dpfl compile` does (seconds each, larger models longer), and the table
says what a device needs and whether it fits. That depends on one microbatch
(execution.microbatch_size): cells of one algorithm and group size need the same.

--fit runs short proxy trainings on PUBLIC data (noise is added, and not accounted for), fits the
loss as a function of steps, noise and batch, and draws it; interrupted, the same command resumes.
--with a fit, every cell gets a predicted loss with its band (90 % of runs), the table shows the
best split of the compute over batch and steps, and --ask answers:
{questions}
Without a fit, all but feasible, variants and size are answered by noise alone.

For a federation of people (subjects) it compares LocalGroupDP, HiGradAvgDP, subject_uls and
UserLDP, at caps up to the configuration's and at a quarter to four times its steps, by the noise of
the whole run over the largest possible signal. It reads the data. --epsilon, --out and --png work
as above; the others are for central runs.

examples:
  dpfl plan configs/subject/quickstart.yaml --out planned.yaml
  dpfl plan PUBLIC_CONFIG --fit FIT.json --runs 24 --jobs 2
  dpfl plan CONFIG --with FIT.json --epsilon 4 --target-loss 3.2
  dpfl plan CONFIG --with FIT.json --ask epsilon --png epsilon.png
  dpfl plan CONFIG --with FLAT.json LAYERS.json LORA.json --ask variants
  dpfl plan CONFIG --with SMALL.json LARGE.json --ask size --png sizes.png
  dpfl plan CONFIG --with FIT.json --chip-hours 2000 --chip v5e --epsilon 4   # least loss
  dpfl plan configs/quickstart.yaml --compute-budget 256 --out planned.yaml
  dpfl plan configs/userlevel/stackoverflow_uls.yaml --compute-budget 4096 --png heat.png
  dpfl plan CONFIG --compute-budget 1024 --epsilon 2 --target-noise 0.01
  dpfl plan CONFIG --compute-budget 1024 --private-median 0.1 --overtake 32
  dpfl plan CONFIG --compute-budget 1024 --chip v5e --price 1.2 --watts 200
  dpfl plan CONFIG --compute-budget 1024 --chip v5e --memory v5e:4x4
  dpfl plan CONFIG --chip-hours 2000 --chip v5e --epsilon 4   # least noise that they pay for
""".replace("{questions}", "\n".join(f"  {n:<10} {text}" for n, text in QUESTIONS.items()))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(x) for x in text.split(","))


class Options(Configured):
    """A plan.

    Attributes:
      compute_budget: gradient evaluations per step (default: the configuration's).
      decay: assumed exponent by which gradient norms fall with the group size.
      max_group_size: largest group size G.
      users: users sampled for gradient norms.
      private_median: release the median group size with this additional epsilon (default: the
        exact one).
      target_noise: also print the smallest epsilon and budget that reach this noise.
      fit: run proxies on PUBLIC data, and fit.
      runs: number of runs of --fit.
      jobs: processes of --fit.
      rates: learning rates of --fit, relative to the configuration's (default: 1).
      public: with --fit, confirms that the data are public.
      fits: fits to use.
      target_loss: also print the smallest epsilon that reaches this loss.
      ask: answer a question; --png draws the answer.
      html: with --ask, draw for a browser, which shows the cell under the pointer.
      chip: v5e, h100, ..., its FLOP/s (2e14), or here (this machine, timed); prices every cell.
      mfu: share of the chip's peak reached (default: 0.4).
      price: price of a chip-hour, in any currency.
      watts: power of a chip.
      chip_hours: instead of --compute-budget, the largest power of two that they pay for.
      memory: say whether the best cells fit a device of v5e:4x4, ... (needs libtpu), or of cpu:1,
        by this machine's compiler (an estimate for GPUs).
      vocab_size: size of the vocabulary, if the tokeniser is not at hand.
      overtake: also print from how many users, of G examples each, drawing examples is ahead.
      png: draw a heat map over G and M.
      out: write the best configuration.
    """

    keys: ClassVar[dict[str, Any]] = {"privacy.epsilon": None}
    lists_keys = True

    compute_budget: int | None = None
    decay: float = 0.5
    max_group_size: int = 256
    users: int = 128
    private_median: Annotated[float | None, Flag("EPSILON")] = None
    target_noise: float | None = None
    fit: Annotated[pathlib.Path | None, Flag("FIT.json")] = None
    runs: int = 24
    jobs: int = 1
    rates: Annotated[tuple[float, ...] | None, Flag("X,Y", parse=_numbers)] = None
    public: bool = False
    fits: Annotated[tuple[pathlib.Path, ...] | None, Flag("FIT.json", name="with")] = None
    target_loss: float | None = None
    ask: Annotated[str | None, Flag(choices=QUESTIONS)] = None
    html: Annotated[pathlib.Path | None, Flag("FILE.html")] = None
    chip: str | None = None
    mfu: float | None = None
    price: float | None = None
    watts: float | None = None
    chip_hours: float | None = None
    memory: Annotated[str | None, Flag("TOPOLOGY")] = None
    vocab_size: int | None = None
    overtake: Annotated[int | None, Flag("G")] = None
    png: Annotated[pathlib.Path | None, Flag("FILE.png")] = None
    out: Annotated[pathlib.Path | None, Flag("FILE.yaml")] = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plans, prints the table and answers, and writes files that options ask for."""
    from dpfl_jax.planning.costs import LazyStart, add_bills, add_memory, prices
    from dpfl_jax.planning.questions import Scenario, predict

    console = Console(stderr=args.json)
    config = load_config(args.config, args.overrides, args.allow_code)
    if config.variant != "central":
        return _plan_federation(args, config, console)
    budget = args.compute_budget or int(config.mechanism.compute_budget)
    epsilon = args.epsilon if args.epsilon is not None else config.privacy.epsilon
    if epsilon is None:
        raise BadInputError("the target is not set: give --epsilon, or privacy.epsilon")
    if args.fit is not None:
        _check_public(args, config, console)
    laws = _laws(args.fits)
    _check_costs(args)
    if args.html is not None and args.ask is None:
        raise BadInputError("--html draws an answer: add --ask QUESTION")
    start = LazyStart(config, console)
    price: Any = None
    if args.fit is None and args.chip is not None:
        price = prices(
            start,
            args.chip,
            console,
            mfu=args.mfu,
            price=args.price,
            watts=args.watts,
            vocab=args.vocab_size,
        )
    steps = config.train.steps
    paid: dict[str, float] = {}
    if args.chip_hours is not None:
        chips, each = price
        most = [chips[k].largest_budget(args.chip_hours, each[k], steps) for k in each]
        budget = min(most)
        for name, law in laws.items():
            flops = law.about["flops_per_gradient"] or max(each.values())
            paid[name] = args.chip_hours / max(
                chip.bill(flops)["chip_hours"] for chip in chips.values()
            )
    planner = _planner(config, args, epsilon, start, console, next(iter(laws.values()), None))
    if args.fit is not None:
        return _fit(args, config, planner, console)
    gradients = float(budget * steps)
    scenarios = {
        name: Scenario(planner, paid.get(name, gradients), law) for name, law in laws.items()
    }
    if args.ask is not None:
        return _answer(args, scenarios or {"noise": Scenario(planner, gradients)}, console)
    with console.status("calibrating noise"):
        # Example-level sampling cannot make user updates.
        alone = () if config.mechanism.clips_user_updates else None
        plan = planner.recommend(budget, example_groups=alone, every=True)
    result: dict[str, Any] = {
        "status": "planned",
        "sensitivities": planner.sensitivities.source,
        "notes": _notes(config.mechanism, budget),
        **plan.to_json(),
    }
    if scenarios:
        scenario = next(iter(scenarios.values()))
        with console.status("weighing steps against batch"):
            prediction = predict(result, plan, scenario, args.target_loss)
        result["prediction"] = prediction
    elif args.target_loss is not None:
        raise BadInputError("--target-loss needs a fit: give --with FIT.json")
    if price is not None:
        add_bills(result, price, config.execution.microbatch_size)
    if args.memory is not None:
        add_memory(result, config, args.memory, console, chip_name=args.chip, vocab=args.vocab_size)
    if args.target_noise is not None:
        result["inverse"] = _inverse(planner, args.target_noise, budget)
    if args.overtake is not None:
        at_least("--overtake", args.overtake, 1)
        with console.status("calibrating larger populations"):
            users = planner.users_at_overtake(budget, args.overtake)
        result["overtake"] = {"examples_per_user": args.overtake, "users": users}
    _print(console, result)
    if args.png is not None:
        from dpfl_jax.planning.figures import draw_heat_map  # and Matplotlib, which takes a second

        with console.status("calibrating the heat map"):
            draw_heat_map(planner, plan, args.png)
        console.print(f"drawn: {args.png}")
    if args.out is not None:
        chosen = result.get("prediction", {}).get("best_split") or {
            **result["best"],
            "steps": steps,
        }
        _write(args, chosen, plan.reason, epsilon)
        train = ["dpfl", "train", str(args.out)]
        console.print(f"written: {args.out}; run it with: {shlex.join(train)}")
    return result


def _check_costs(args: argparse.Namespace) -> None:
    """Refuses options of the bill that do not fit together, before anything is computed."""
    from dpfl_jax.training.slices import HBM, kind_of

    needs = ("mfu", "price", "watts", "chip_hours")
    if args.chip is None and (given := [n for n in needs if getattr(args, n) is not None]):
        raise BadInputError(f"--{given[0].replace('_', '-')} needs --chip, e.g. --chip v5e")
    if args.memory is not None:
        kind = kind_of(args.memory)
        if args.chip in HBM and kind not in (args.chip, "cpu"):
            raise BadInputError(
                f"--memory is of {kind}, but --chip is {args.chip}: give a topology of that chip, "
                f"e.g. --memory {args.chip}:2x2"
            )


def _planner(
    config: Any, args: argparse.Namespace, epsilon: float, start: Any, console: Any, law: Any = None
) -> Any:
    import numpy as np

    from dpfl_jax.noise import workload_of
    from dpfl_jax.planning import (
        Planner,
        Sensitivities,
        UserStatistics,
        estimate_sensitivities,
        private_median_group_size,
    )
    from dpfl_jax.randomness import RootKey
    from dpfl_jax.training.optimizers import make_optimizer

    declared = config.population
    largest = max(1, args.max_group_size)
    if declared is not None:
        if args.fit is not None:
            raise BadInputError(
                "--fit trains, but this configuration has statistics instead of data: give "
                "one of a public proxy, and use its fit here (--with)"
            )
        users = UserStatistics(declared.num_users, limited=declared.limited_examples or None)
        examples = declared.num_examples
        groups = [2**k for k in range(largest.bit_length())]
        sensitivities = Sensitivities.assumed(args.decay, groups)
    else:
        from dpfl_jax.training.start import trained_by_name

        data, model = start.data
        sizes = np.diff(data.train.user_offsets)
        users = UserStatistics(len(sizes), sizes=sizes)
        examples = int(sizes.sum())
        largest = min(largest, int(sizes.max()))
        groups = [2**k for k in range(largest.bit_length())]
        if law is None:
            params = start.params
            with console.status("gradient norms of sampled users"):
                sensitivities = estimate_sensitivities(
                    model.loss,
                    params,
                    data.train,
                    groups,
                    users=args.users,
                    trainable=trained_by_name(config.model, model),
                )
    median = None
    if args.private_median is not None:
        if users.sizes is None:
            raise BadInputError("--private-median needs data: this configuration has statistics")
        rng = RootKey.generate().numpy("planning-median")
        median = private_median_group_size(users.sizes, args.private_median, 1 << 20, rng)
        console.print(
            f"median group size {median} (power of two), released with epsilon "
            f"{args.private_median:g} for a user, to be added to the run's"
        )
    delta = config.privacy.delta
    delta = float(examples) ** -1.1 if delta is None else delta
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    return Planner(
        users,
        sensitivities if law is None else law.sensitivities,
        epsilon=epsilon,
        delta=delta,
        steps=config.train.steps,
        example_group=median,
        workload=workload_of(optimizer, config.train.steps),
    )


def _inverse(planner: Any, noise: float, budget: int) -> dict[str, Any]:
    answers: dict[str, Any] = {"target_noise": noise}
    for name, question in (
        ("smallest_epsilon", lambda: planner.smallest_epsilon(noise, budget)),
        ("smallest_budget", lambda: planner.smallest_budget(noise)),
    ):
        try:
            value, option = question()
            answers[name] = {"value": value, "option": option.to_json()}
        except BadInputError as error:
            answers[name] = {"value": None, "reason": str(error)}
    return answers


def _notes(mechanism: Any, budget: int) -> list[str]:
    """Sentences on what the table has no number for."""
    floor = ""
    if mechanism.budget is not None and mechanism.budget.least_steps is not None:
        floor = f" ({mechanism.budget.least_steps} here)"
    notes = [
        "personal budgets are not priced: how long users stay follows from private gradients; "
        f"everybody takes part in the first mechanism.least_steps{floor} steps, at the noise that "
        "the same mechanism without such budgets has in a run of about as many steps",
        "mechanism.clipping=per_layer has the noise of these rows: parameters share the clip norm, "
        "so that more of a gradient is clipped away for the same noise; only runs show what that "
        "costs (--ask variants, with fits of both)",
    ]
    if mechanism.clips_user_updates:
        passes = mechanism.update.passes
        notes.append(
            f"a user update takes {passes} epochs over a user's examples: the "
            f"budget counts examples, and a round evaluates {budget * passes} gradients; "
            "noise is compared for updates as large as one step on the mean gradient"
        )
    return notes


def _print(console: Any, result: dict[str, Any]) -> None:
    from dpfl_jax.planning.candidates import CANDIDATES, plain
    from dpfl_jax.planning.costs import in_order

    lossy = ["loss", "90 % band"] if "prediction" in result else []
    billed = [name for name in result["best"].get("bill", ()) if name != "flops"]
    sized = ["GiB", "fits"] if any("memory" in option for option in result["options"]) else []
    # What a narrow terminal has no room for is in the JSON.
    how = [] if lossy or billed else ["probability", "noise multiplier"]
    table = Table(
        "algorithm" if how else "",
        "G",
        "size",
        *how,
        "noise",
        *lossy,
        *(name.replace("_", "-") for name in billed),
        *sized,
        "",
        title=f"budget {result['budget']}, epsilon {result['epsilon']:g}, {result['steps']} steps",
    )
    marks = {"best": "least noise", "median": "median", "doubling": "double"}
    keys = set(result["doubling"])
    for option in in_order(result):
        cell = {key: value for key, value in option.items() if key in keys}
        notes = [
            words
            for name, words in marks.items()
            if result[name] and {k: result[name][k] for k in keys} == cell
        ]
        table.add_row(
            CANDIDATES[option["kind"]].name
            + (f", {option['bands']} bands" if option["bands"] > 1 else ""),
            str(option["group_size"]),
            str(option["size"]),
            *(
                [f"{option['sampling_prob']:.4g}", f"{option['noise_multiplier']:.5g}"]
                if how
                else []
            ),
            f"{option['noise']:.4g}",
            *(
                [f"{option['loss']:.3f}", f"{option['low']:.2f}-{option['high']:.2f}"]
                if lossy
                else []
            ),
            *(f"{option['bill'][name]:.4g}" for name in billed),
            *(_memory_words(option) if sized else ()),
            ", ".join(notes),
        )
    console.print(table)
    console.print(result["reason"])
    corrected, literal = result["doubling"], result["doubling_as_printed"]
    console.print(
        f"Estimate-and-Double: G={corrected['group_size']}, M={corrected['size']} (noise "
        f"{corrected['noise']:.4g}); as printed in the paper: G={literal['group_size']}, "
        f"M={literal['size']} (noise {literal['noise']:.4g})"
    )
    console.print(f"gradient norms: {result['sensitivities']}")
    for note in result["notes"]:
        console.print(note, highlight=False)
    if lossy:
        _print_prediction(console, result["prediction"])
    if "overtake" in result:
        each, users = result["overtake"]["examples_per_user"], result["overtake"]["users"]
        ahead, other = (CANDIDATES[plain(examples)].name for examples in (False, True))
        answer = f"{ahead} stays ahead"
        if users is not None:
            answer = f"{other} has less noise from {users} users on"
        console.print(f"with {each} examples of every user, {answer}")
    for name, answer in result.get("inverse", {}).items():
        console.print(f"{name.replace('_', ' ')}: {answer}")


def _memory_words(option: dict[str, Any]) -> tuple[str, str]:
    """GiB that a device needs, and whether it has them; dashes if nothing was compiled."""
    if "memory" not in option:
        return "-", "-"
    memory = option["memory"]
    fits = {True: "yes", False: "NO", None: "unknown"}[memory["fits"]]
    return f"{memory['peak_bytes'] / 2**30:.2f}", fits


def _write(args: argparse.Namespace, cell: dict[str, Any], reason: str, epsilon: float) -> None:
    from dpfl_jax.planning.candidates import at_budget

    base: Any = load_config(args.config, args.overrides, args.allow_code)
    budget = cell["size"] * cell["gradients"]
    sizes = (cell["kind"], budget, cell["group_size"])
    mechanism = at_budget(base.mechanism, *sizes, bands=cell["bands"])
    overrides = [
        *args.overrides,
        f"mechanism={json.dumps(mechanism.to_section())}",
        f"privacy.epsilon={epsilon}",
        f"train.steps={cell['steps']}",
        f"optimizer.learning_rate={base.optimizer.learning_rate * cell.get('rate', 1.0)}",
    ]
    if "loss" in cell:
        band = f"{cell['low']:.3f} to {cell['high']:.3f}"
        reason = f"predicted loss {cell['loss']:.3f} ({band}), the least for its compute"
    write_config(args.out, load_config(args.config, overrides, args.allow_code), reason)


# ---- fits of the loss to proxy runs --------------------------------------------------------------


def _check_public(args: argparse.Namespace, config: Any, console: Any) -> None:
    """Warns that proxy runs protect nobody, and requires --public unless the data are shipped."""
    from dpfl_jax.data.sets import SETS

    console.print(PUBLIC, style="bold red", highlight=False, soft_wrap=True)
    embedded = config.data.path is None and config.data.source in (*SETS, "python_source")
    if not (embedded or args.public):
        raise BadInputError(
            f"data.source={config.data.source} is not known to be public, and proxy runs protect "
            "nobody: give public data, and say so with --public"
        )


def _fit(args: argparse.Namespace, config: Any, planner: Any, console: Any) -> dict[str, Any]:
    """Runs the missing proxies, and fits, writes and draws the scaling law."""
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


def _laws(files: list[pathlib.Path] | None) -> dict[str, Any]:
    """The fits, by the names of their files."""
    from dpfl_jax.planning.scaling_law import ScalingLaw

    return {file.stem: ScalingLaw.load(file) for file in files or []}


def _answer(args: argparse.Namespace, scenarios: dict[str, Any], console: Any) -> dict[str, Any]:
    """Answers ``--ask``, and draws."""
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


def _print_prediction(console: Any, prediction: dict[str, Any]) -> None:
    """Prints the best cell of the budget, the best split, and the least epsilon."""
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


# ---- of a federation: mechanism, steps and cap, by noise over signal ----------------------------


_CENTRAL = (
    "compute_budget", "private_median", "target_noise", "fit", "fits", "target_loss", "ask", "html",
    "chip", "chip_hours", "memory", "overtake",
)  # fmt: skip


def _plan_federation(args: argparse.Namespace, config: Any, console: Any) -> dict[str, Any]:
    """Plans a federation, prints the table, and writes the best configuration if asked.

    Raises:
      BadInputError: an ISRL configuration, arguments for central runs, or no mechanism that meets
        the target.
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
        # Among equal noise, the one that keeps the most records comes first.
        choices = sorted(
            federated_options(prepared), key=lambda c: (float(f"{c.ratio:.3g}"), -c.kept)
        )
        if not choices:
            raise BadInputError(
                f"no mechanism meets epsilon {config.privacy.epsilon:g}: raise privacy.epsilon, or "
                "lower mechanism.max_records_per_subject or federation.max_silos_per_subject"
            )
        of_kind: dict[str, Any] = {}
        for choice in choices:
            of_kind.setdefault(choice.kind, choice)
        paced = [sorted([c, *other_steps(prepared, c)], key=_steps) for c in of_kind.values()]
        best, reason = choices[0], "at the configuration's steps"
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
        "options": [choice.to_json() for choice in choices],
        "by_steps": {each[0].kind: {str(_steps(c)): c.ratio for c in each} for each in paced},
        "by_reach": {str(silos): ratio for silos, ratio in reach.items()},
        "reason": reason,
    }
    _print_federation(console, result, prepared)
    if args.png is not None:
        from dpfl_jax.planning.figures import draw_caps  # and Matplotlib, which takes a second

        draw_caps(choices, args.png)
        console.print(f"drawn: {args.png}")
    if args.out is not None:
        # With the target as asked for: a delta that follows from the data is not written.
        chosen = best.config.model_copy(update={"privacy": config.privacy})
        write_config(args.out, chosen, reason)
        train = ["dpfl", "train", str(args.out)]
        console.print(f"written: {args.out}; run it with: {shlex.join(train)}")
    return result


def _steps(choice: Any) -> int:
    return int(choice.rounds * choice.local_steps)


def _print_federation(console: Any, result: dict[str, Any], prepared: Any) -> None:
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
        f"if each person were in at most so many silos (max_silos_per_subject): "
        f"{ratios_text(result['by_reach'])}"
    )
