"""``dpfl finetune``: trains a checkpoint on people's texts, and exports the model."""

from __future__ import annotations

import argparse
import math
import pathlib
import shlex
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from dpfl_jax import buckets
from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.data.rows import FORMATS
from dpfl_jax.data.sections import CONVERSATION
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import on_disk

DESCRIPTION = """\
Fine-tune a language model on texts of people, with a guarantee for each of them. Writes a
configuration with the usual choices, prints it, trains, and exports:

  OUT/config.yaml   the configuration, for `dpfl train` once you want to change more
  OUT/run/          the run, as `dpfl train` leaves it; the same command resumes it
  OUT/model/        the model, for `transformers`, with guarantee.json
  OUT/synthetic/    with --synthesize: rows that the model wrote (`dpfl synthesize`)

CHECKPOINT is a folder in the Hugging Face layout, hf:org/name of the local cache, or
bundled:quickstart. DATA is a JSONL, CSV, TSV or Parquet file (or a pattern), hf:org/name/FILES, or
a store of `dpfl data build`. Every row belongs to the person in --user-column.

Usual choices: user-level sampling (ULS), epsilon 8 for each person; adapters of rank 4 on all
linear layers, the rest frozen in bfloat16 (float32 on a CPU); short texts packed into shared rows;
DP-AdamBC with a learning rate that falls with the number of steps; as many people in a step as
lower the noise, within a compute budget of 76,800 people over all steps (or 256 a step); one person
in twenty held out. Any key of the configuration can be given, too. `dpfl sweep OUT/config.yaml
--private` tries other choices on the same people, with one epsilon for all.

examples:
  dpfl finetune checkpoints/llama posts.jsonl --user-column author --dry-run
  dpfl finetune checkpoints/llama posts.jsonl --user-column author --out finetuned
  dpfl finetune hf:org/name chats.jsonl --messages-column messages --epsilon 4
  dpfl finetune checkpoints/gpt2 stores/posts --full execution.mesh.fsdp=8 mechanism.cohort_size=512

exit status: 0 done; 2 bad input (one sentence on stderr); 1 anything else, interruption included.
"""
SEQ_LEN = 512  # tokens of an example, or fewer if the model takes fewer
SHAPES = 8  # shapes of packed rows
# Compute budget: people in a step, and in all steps if that is more.
COHORT, VISITS = 256, 300 * 256
# Adam's learning rate times the square root of the number of steps: how far noise moves a parameter
# in all. Found at 12 steps of a small model (docs/results/quality.md).
REACH, REACH_OF_ADAPTERS = 0.026, 0.07
ADAMS = ("adam", "adamw", "dp_adam_bc")
COLUMNS = ("text", *CONVERSATION)


class Options(options.MayRunCode):
    """Fine-tuning.

    Attributes:
      checkpoint: the model to start from.
      data: texts, with a column that says whose each is.
      overrides: any key of the configuration.
      full: train all parameters instead of adapters.
      out: folder of configuration, run and model.
      dry_run: print and price the configuration; train nothing.
      synthesize: number of synthetic rows to write once it is trained.
    """

    keys: ClassVar[dict[str, Any]] = {
        "data.user_column": options.SCHEMA,
        **dict.fromkeys(f"data.{kind}_column" for kind in COLUMNS),
        "privacy.epsilon": 8.0,
        "train.steps": 300,
    }
    lists_keys = True

    checkpoint: Annotated[str, Flag("CHECKPOINT", is_positional=True)]
    data: Annotated[str, Flag("DATA", is_positional=True, in_buckets=True)]
    overrides: Annotated[tuple[str, ...], Flag("key=value", is_positional=True)] = ()
    full: bool = False
    out: Annotated[str, Flag("OUT", in_buckets=True)] = "finetuned"
    dry_run: bool = False
    synthesize: Annotated[int | None, Flag("ROWS")] = None


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Makes the configuration, trains and exports."""
    from dpfl_jax.cli.train import train_or_price
    from dpfl_jax.config.load import make_config, write_yaml
    from dpfl_jax.run import processes
    from dpfl_jax.run.console import RunConsole
    from dpfl_jax.training.export import export

    out, bucket = pathlib.Path(args.out), buckets.address(args.out)
    if args.synthesize is not None:
        on_disk(args.out)
    raw, console = configuration(args), RunConsole(stderr=args.json)
    # A relative ledger is beside the configuration.
    place = pathlib.Path("config.yaml") if bucket else out / "config.yaml"
    # This also writes the overrides into `raw`.
    config = make_config(raw, args.overrides, place, args.allow_code)
    chosen = choose(raw, config, args.overrides)
    config = make_config(raw, (), place, args.allow_code)
    text = "".join(f"# {sentence}\n" for sentence in chosen) + write_yaml(raw)
    if processes.is_primary():
        console.print(text, highlight=False, soft_wrap=True, markup=False)
        if not args.dry_run:
            _write(out / "config.yaml", text)
    run_dir = f"{bucket}/run" if bucket else out / "run"
    report = train_or_price(config, run_dir, args.dry_run, console)
    if report is None or args.dry_run:
        return report
    made = export(run_dir, out / "model")
    console.print(f"the model is in {made['out']}, and its guarantee in guarantee.json there")
    rate = config.optimizer.learning_rate
    if not bucket:
        console.print(
            f"to try other choices with one epsilon for all: dpfl sweep {out / 'config.yaml'} "
            f"eval.max_users=null --grid learning_rate={rate / 2:g},{rate:g},{2 * rate:g} "
            "--private",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if args.synthesize is None:
        return report | {"model": str(made["out"])}
    from dpfl_jax.synthesis import synthesize

    written = synthesize(
        run_dir, out / "synthetic" / "rows.jsonl", args.synthesize, console=console
    )
    console.print(f"{written['rows']:,} synthetic rows are in {written['out']}", highlight=False)
    return report | {"model": str(made["out"]), "synthetic": written["out"]}


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """The sections of the configuration: the usual choices for these arguments."""
    import jax

    from dpfl_jax.models.checkpoint import read_config

    on_cpu = jax.default_backend() == "cpu"
    source = source_of(args.data)
    data: dict[str, Any] = {"source": source, "path": args.data, "tokenizer": "checkpoint"}
    if source != "store":  # a store already has them
        data["seq_len"] = min(SEQ_LEN, read_config(args.checkpoint).max_seq_len)
        data["user_column"] = args.user_column
        for kind in COLUMNS:
            if (column := getattr(args, f"{kind}_column")) is not None:
                data[f"{kind}_column"] = column
    pairs = args.chosen_column is not None
    model: dict[str, Any] = {"checkpoint": args.checkpoint}
    if not args.full:
        model["lora"] = {"rank": 4, "alpha": 8, "targets": ["*/attention/*", "*/mlp/*"]}
        model |= {} if on_cpu else {"frozen_dtype": "bfloat16"}
    model |= {} if on_cpu else {"overrides": {"dtype": "bfloat16"}}
    model |= {"dpo": {"beta": 0.1}} if pairs else {}
    return {
        "name": "finetune",
        "data": data | {"validation_fraction": 0.05, "test_fraction": 0.0},
        "model": model,
        "mechanism": {
            "kind": "uls",
            "group_size": 4,
            "cohort_size": COHORT,  # until the people are counted
            "clip_norm": 0.1,
            "clipping": "normalized",
        },
        "privacy": {"epsilon": args.epsilon},
        "optimizer": {"name": "dp_adam_bc"},
        "train": {"steps": args.steps, "checkpoint_every": 50},
        # Preference pairs are two rows each, which are not packed.
        "execution": {"microbatch_size": 4, "packing": 0 if pairs else SHAPES},
        # Of many people this is enough, and evaluating all may take longer than training.
        "eval": {"split": "validation", "max_users": 1000, "max_examples_per_user": 8},
    }


def choose(raw: dict[str, Any], config: Any, overrides: Sequence[str]) -> list[str]:
    """Sets the learning rate and the cohort in ``raw`` if not given; returns sentences about them.

    Raises:
      BadInputError: the optimiser is none that a learning rate is known for, or the people cannot
        be counted.
    """
    given, said = {override.partition("=")[0] for override in overrides}, []
    name, steps = config.optimizer.name, config.train.steps
    if given.isdisjoint({"optimizer", "optimizer.learning_rate"}):
        if name not in ADAMS:
            raise BadInputError(
                f"dpfl finetune knows learning rates of {', '.join(ADAMS)}, but optimizer.name is "
                f"{name}: give optimizer.learning_rate, too"
            )
        reach = REACH if config.model.lora is None else REACH_OF_ADAPTERS
        rate = float(f"{reach / math.sqrt(steps):.2g}")
        raw["optimizer"]["learning_rate"] = rate
        what = "all parameters" if config.model.lora is None else "adapters"
        said.append(f"the learning rate is {rate:g}, the usual one for {steps} steps of {what}")
    if name in ADAMS and given.isdisjoint({"optimizer", "optimizer.options"}):
        # Momentum over at most a fifth of the steps.
        raw["optimizer"]["options"] = {"b1": round(max(0.0, min(0.9, 1 - 5 / steps)), 2)}
    is_counted = config.data.source in ("store", *FORMATS) or config.population is not None
    is_open = given.isdisjoint({"mechanism", "mechanism.cohort_size"})
    if is_counted and is_open and config.mechanism.kind == "uls":
        said.append(_choose_cohort(raw, config))
    return said


def _choose_cohort(raw: dict[str, Any], config: Any) -> str:
    from dpfl_jax.data.load import count_users
    from dpfl_jax.mechanisms import Population
    from dpfl_jax.planning.candidates import sufficient_cohort
    from dpfl_jax.training.start import data_section

    steps, privacy, declared = config.train.steps, config.privacy, config.population
    if declared is None:
        users, texts = count_users(data_section(config))
        kept = 1 - config.data.validation_fraction - config.data.test_fraction
        trained = max(1, round(kept * users))
    else:
        trained, texts = declared.num_users, declared.num_examples
    most = max(COHORT, VISITS // steps)
    cohort = sufficient_cohort(
        config.mechanism, Population(trained, texts, trained), steps, most,
        epsilon=privacy.epsilon, noise_multiplier=privacy.noise_multiplier, delta=privacy.delta,
    )  # fmt: skip
    raw["mechanism"]["cohort_size"] = cohort
    why = "more would lower the noise by less than a tenth"
    if 2 * cohort > min(most, trained // 2):
        why = "more would lower the noise further, and take longer"
    return f"a step draws {cohort} of about {trained:,} people: {why} (mechanism.cohort_size)"


def source_of(data: str) -> str:
    """The ``data.source`` of a path."""
    from dpfl_jax.data.rows import guess_format

    if data.startswith("hf:"):
        return "huggingface"
    path = pathlib.Path(data)
    is_store = buckets.address(data) or (path / "manifest.json").exists()
    return "store" if is_store else guess_format(path)


def _write(path: pathlib.Path, text: str) -> None:
    """Writes the configuration, but never over another one."""
    taken = "is of another run (or was changed): name another folder with --out"
    if where := buckets.address(path):
        try:
            return buckets.create(where, text.encode())
        except FileExistsError:
            raise BadInputError(f"{where} {taken}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        if path.is_symlink() or path.read_text() != text:
            again = ["dpfl", "train", str(path), "--run-dir", str(path.parent / "run")]
            raise BadInputError(
                f"{path} {taken}, or resume it with `{shlex.join(again)}`"
            ) from None
