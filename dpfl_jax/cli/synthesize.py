"""``dpfl synthesize``: synthetic rows, with the guarantee of the run whose model writes them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Annotated, Any

from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.console import RunConsole

DESCRIPTION = """\
Write synthetic rows with the language model of a finished run: as many as you like, under the
guarantee of the run, which covers all that follows from its model.

A run on texts writes texts. A run with data.template ("<label> | <text>") writes rows of those
columns, and a part that does not fit data.categories and data.ranges is drawn again. A run on
answers (chats, completions) answers public prompts.

FILE lies in a folder of its own, beside README.md (a dataset card) and guarantee.json, which
`dpfl verify FOLDER` checks. The same command resumes one that was stopped, with the same rows.

--label-epsilon counts the people of each label with noise, which costs more epsilon: the guarantee
has both. Decide on it before you look at the model. A run releases one such histogram.

--report says how useful the rows are (train on them, test on people held out), and whether they are
copies of what was trained on. It looks at private data without noise: keep it.

examples:
  dpfl synthesize runs/mine --rows 5000 --out synthetic/rows.jsonl
  dpfl synthesize runs/mine --label comedy=2000 --label tragedy=3000 --out synthetic/rows.parquet
  dpfl synthesize runs/mine --rows 5000 --label-epsilon 0.5 --out synthetic/rows.jsonl
  dpfl synthesize runs/chats --rows 1000 --prompts public.jsonl --out answers/rows.jsonl
"""


class Options(options.MayRunCode):
    """Synthetic rows.

    Attributes:
      run: directory of a finished run of a language model.
      out: a new file, .jsonl or .parquet, in a folder of its own.
      rows: number of rows (of persons, with data.rows_per_text).
      label: number of rows of a label, a word of the first column of data.template.
      label_epsilon: split the rows like a noisy histogram of people's labels, of this epsilon.
      prompts: file of public prompts, for a run on answers; each is answered in turn.
      temperature: temperature of sampling; 0 takes the most likely token.
      top_k: draw from the k most likely tokens.
      top_p: draw from the most likely tokens that together have this probability.
      max_tokens: most tokens of a row (default: as many as in training).
      seed: seed of the draws; it may be public.
      batch_size: rows that are drawn at once.
      report: folder for a report that compares the rows with real people's: not to be published.
    """

    run: Annotated[str, Flag("RUN", is_positional=True, in_buckets=True)]
    out: Annotated[str, Flag("FILE")]
    rows: int | None = None
    label: Annotated[tuple[str, ...], Flag("WORD=NUMBER", several=True)] = ()
    label_epsilon: float | None = None
    prompts: Annotated[str | None, Flag("FILE")] = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    batch_size: int = 64
    report: Annotated[str | None, Flag("DIR")] = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the rows."""
    from dpfl_jax.synthesis import Settings, synthesize

    console = RunConsole(stderr=args.json)
    made = synthesize(
        args.run,
        args.out,
        args.rows,
        Settings(args.seed, args.temperature, args.top_k, args.top_p, args.max_tokens),
        labels=_labels(args.label),
        label_epsilon=args.label_epsilon,
        prompts=args.prompts,
        batch_size=args.batch_size,
        report=args.report,
        allow_code=args.allow_code,
        console=console,
    )
    speed = "" if made["tokens_per_s"] is None else f", {made['tokens_per_s']:,.0f} tokens/s"
    console.print(
        f"{made['rows']:,} rows written to {made['out']} ({made['redraws']} parts drawn again, "
        f"{made['given_up']} rows left out{speed})",
        highlight=False,
    )
    if args.report is not None:
        console.print(f"warning: {made['report']} looks at private data: do not publish it")
    console.print(made["guarantee"], highlight=False)
    return made


def _labels(given: Sequence[str]) -> dict[str, int]:
    """WORD=NUMBER of each label, as numbers by word."""
    result: dict[str, int] = {}
    for text in given:
        word, _, number = text.rpartition("=")
        if not word or not (number.isascii() and number.isdecimal()):
            raise BadInputError(f"--label is {text!r}: write WORD=NUMBER, such as comedy=2000")
        if word in result:
            raise BadInputError(f"--label names {word!r} twice: give one number")
        result[word] = int(number)
    return result
