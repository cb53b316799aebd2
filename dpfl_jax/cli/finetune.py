"""``dpfl finetune``: trains a checkpoint on people's texts, and exports the model."""

from __future__ import annotations

import argparse
import pathlib
import shlex
from typing import Annotated, Any, ClassVar

from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.data.sections import CONVERSATION
from dpfl_jax.errors import BadInputError

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

Usual choices: user-level sampling (ULS), epsilon 8 for each person; adapters of rank 16 on the
attention's projections, the rest frozen in bfloat16 (float32 on a CPU); short texts packed into
shared rows; Adam; one person in twenty held out. Any key of the configuration can be given, too.

examples:
  dpfl finetune checkpoints/llama posts.jsonl --user-column author --dry-run
  dpfl finetune checkpoints/llama posts.jsonl --user-column author --out finetuned
  dpfl finetune hf:org/name chats.jsonl --messages-column messages --epsilon 4
  dpfl finetune checkpoints/gpt2 stores/posts --full execution.mesh.fsdp=8 mechanism.cohort_size=512

exit status: 0 done; 2 bad input (one sentence on stderr); 1 anything else, interruption included.
"""
SEQ_LEN = 512  # tokens of an example, or fewer if the model takes fewer
SHAPES = 8  # shapes of packed rows
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
    data: Annotated[str, Flag("DATA", is_positional=True)]
    overrides: Annotated[tuple[str, ...], Flag("key=value", is_positional=True)] = ()
    full: bool = False
    out: Annotated[str, Flag("OUT")] = "finetuned"
    dry_run: bool = False
    synthesize: Annotated[int | None, Flag("ROWS")] = None


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Makes the configuration, trains and exports."""
    from dpfl_jax.cli.train import train_or_price
    from dpfl_jax.config.load import make_config, write_yaml
    from dpfl_jax.run import processes
    from dpfl_jax.run.console import RunConsole
    from dpfl_jax.synthesis import synthesize
    from dpfl_jax.training.export import export

    out = pathlib.Path(args.out)
    raw = configuration(args)
    # This also writes the overrides into `raw`.
    config = make_config(raw, args.overrides, out / "config.yaml", args.allow_code)
    text = write_yaml(raw)
    console = RunConsole(stderr=args.json)
    if processes.is_primary():
        console.print(text, highlight=False, soft_wrap=True, markup=False)
        if not args.dry_run:
            _write(out / "config.yaml", text)
    report = train_or_price(config, out / "run", args.dry_run, console)
    if report is None or args.dry_run:
        return report
    made = export(out / "run", out / "model")
    console.print(f"the model is in {out / 'model'}, and its guarantee in guarantee.json there")
    if args.synthesize is None:
        return report | {"model": str(made["out"])}
    written = synthesize(
        out / "run", out / "synthetic" / "rows.jsonl", args.synthesize, console=console
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
        model["lora"] = {"rank": 16, "alpha": 32, "targets": ["*/attention/*"]}
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
            "cohort_size": 256,
            "clip_norm": 0.1,
            "clipping": "normalized",
        },
        "privacy": {"epsilon": args.epsilon},
        "optimizer": {
            "name": "adam",
            "learning_rate": 2e-4 if args.full else 1e-3,
            "schedule": "linear",
            "warmup_steps": min(20, args.steps // 10),
        },
        "train": {"steps": args.steps, "checkpoint_every": 50},
        # Preference pairs are two rows each, which are not packed.
        "execution": {"microbatch_size": 4, "packing": 0 if pairs else SHAPES},
        # Of many people this is enough, and evaluating all may take longer than training.
        "eval": {"split": "validation", "max_users": 1000, "max_examples_per_user": 8},
    }


def source_of(data: str) -> str:
    """The ``data.source`` of a path."""
    from dpfl_jax.data.rows import guess_format

    if data.startswith("hf:"):
        return "huggingface"
    path = pathlib.Path(data)
    return "store" if (path / "manifest.json").exists() else guess_format(path)


def _write(path: pathlib.Path, text: str) -> None:
    """Writes the configuration, but never over another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        if path.is_symlink() or path.read_text() != text:
            again = ["dpfl", "train", str(path), "--run-dir", str(path.parent / "run")]
            raise BadInputError(
                f"{path} is of another run (or was changed): name another folder with --out, or "
                f"resume it with `{shlex.join(again)}`"
            ) from None
