"""``dpfl sample``: text from a run's model, or from a checkpoint."""

from __future__ import annotations

import argparse
import pathlib
from typing import Annotated, Any

from dpfl_jax import buckets
from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, plain

DESCRIPTION = """\
Continue a prompt with a language model: that of a finished run, or a checkpoint in the
Hugging Face layout (an exported one, or the one that fine-tuning started from).

What is sampled is post-processing of the model: the guarantee of the run covers it.

examples:
  dpfl sample runs/mine --prompt "First Citizen:"
  dpfl sample exported --prompt "Dear" --max-tokens 100 --temperature 0.7 --top-k 40
  dpfl sample checkpoints/gpt2 --prompt "Dear" --temperature 0
  dpfl sample bundled:quickstart --prompt "Return the"
"""


class Options(options.Options):
    """Sampling text.

    Attributes:
      run: run directory, or a checkpoint's.
      prompt: what the text begins with.
      max_tokens: most tokens to sample.
      temperature: temperature of sampling; 0 takes the most likely token.
      top_k: draw from the k most likely tokens.
      top_p: draw from the most likely tokens that together have this probability.
      seed: seed of the draws.
      tokenizer: a tokeniser's file, or bytes; default the run's or checkpoint's.
    """

    run: Annotated[str, Flag("RUN", is_positional=True, in_buckets=True)]
    prompt: Annotated[str, Flag(is_prose=True)] = ""
    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    tokenizer: str | None = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Samples a text, and prints it as it grows."""
    import sys

    import jax

    from dpfl_jax.data import prompt_ids
    from dpfl_jax.models.checkpoint import checkpoint_dir
    from dpfl_jax.models.generate import generate

    folder = buckets.folder if buckets.address(args.run) else checkpoint_dir
    model, params, tokenizer = _load(folder(args.run), args.tokenizer)
    out = sys.stderr if args.json else sys.stdout
    tokens: list[int] = []
    shown = ""
    print(args.prompt, end="", file=out, flush=True)
    for token in generate(
        model,
        params,
        prompt_ids(tokenizer, args.prompt),
        max_tokens=args.max_tokens,
        key=jax.random.key(args.seed),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop_ids=tokenizer.stop_ids,
    ):
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if text.startswith(shown) and not text.endswith("\ufffd"):  # half a character may follow
            print(plain(text[len(shown) :]), end="", file=out, flush=True)
            shown = text
    text = tokenizer.decode(tokens)
    print(plain(text[len(shown) :]), file=out)
    return {"prompt": args.prompt, "text": text, "tokens": tokens}


def _load(path: pathlib.Path, tokenizer: str | None) -> tuple[Any, Any, Any]:
    from dpfl_jax.data import load_tokenizer
    from dpfl_jax.models import LanguageModel
    from dpfl_jax.models.checkpoint import load_model, tokenizer_file
    from dpfl_jax.training.export import load_trained
    from dpfl_jax.training.exported import STRUCTURE, load_exported

    if (path / STRUCTURE).exists():  # such an export has no tokeniser
        exported = load_exported(path)
        if not isinstance(exported.model, LanguageModel):
            raise BadInputError(f"{path} holds no language model: give the run of one")
        return exported.model, exported.params, load_tokenizer(tokenizer or "bytes")
    if not (path / "config.json").exists():
        trained = load_trained(path)
        named = load_tokenizer(tokenizer) if tokenizer else trained.tokenizer
        return trained.model, trained.params, named
    named = load_tokenizer(tokenizer or tokenizer_file(path))
    return *load_model(path), named
