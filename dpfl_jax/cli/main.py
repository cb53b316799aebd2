"""``dpfl``: runs a sub-command, and turns errors into exit codes.

A sub-command is a module with ``run(args) -> dict | None``, the constant ``DESCRIPTION`` (the
manual page with examples) and a class ``Options`` (``cli.options``), or ``VERBS`` with such a class
for each verb, or a function ``add_arguments(parser)``. ``run`` returns the JSON object
that ``--json`` prints as the last line of stdout; what a person reads goes through ``rich`` to
stdout without ``--json`` and to stderr with it.
"""

from __future__ import annotations

import argparse
import difflib
import glob
import importlib
import importlib.util
import json
import logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from dpfl_jax import __version__
from dpfl_jax.buckets import as_given
from dpfl_jax.errors import (
    FULL_DISK,
    BadInputError,
    StoppedError,
    UnreachableError,
    ignore_matplotlibrc,
    plain,
    too_little_memory,
)

# Modules are imported only when asked for, so that `dpfl --help` does not load JAX.
COMMANDS = {
    "init": "write a configuration to start from",
    "train": "train a model privately (or resume a run)",
    "finetune": "fine-tune a language model in one command: configure, train, export",
    "account": "what a mechanism guarantees, or the noise a guarantee needs",
    "verify": "check that the guarantee of a run is what it says",
    "audit": "attack a mechanism or a run, and compare the result with the claimed epsilon",
    "data": "build, inspect and verify data stores grouped by user",
    "bench": "benchmark clipping, accounting and data pipelines",
    "compile": "compile the train step for a TPU slice, without one",
    "silo": "train with silos in separate processes, on Flower",
    "plan": "choose algorithm and group sizes for a compute budget",
    "sweep": "run a grid of configurations and tabulate the best",
    "reproduce": "reproduce a paper's figure or table, with a verdict on each claim",
    "show": "print the report of a run",
    "export": "write a run's model for `transformers`, with its guarantee",
    "predict": "predict for new rows with the model of a run",
    "sample": "continue a prompt with the model of a run",
    "synthesize": "write synthetic rows with the model of a run, under its guarantee",
    "completion": "print a script for shell completion",
}


class _Parser(argparse.ArgumentParser):
    """A parser that raises BadInputError for bad arguments."""

    lists_keys = False

    def format_help(self) -> str:
        """Adds the keys of a configuration, if the command lists them."""
        if self.lists_keys:
            from dpfl_jax.cli.options import keys_in_words

            self.epilog = keys_in_words()
        return super().format_help()

    def error(self, message: str) -> None:  # type: ignore[override]
        if match := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            hint = _suggestion(match[1], self._option_string_actions)
            if not hint and any(action.dest == "overrides" for action in self._actions):
                hint = ": settings of the configuration are given as section.key=value"
            message += hint
        elif match := re.search(r"invalid choice: '([^']*)' \((.*)\)", message):
            hint = _suggestion(match[1], re.findall(r"[\w-]+", match[2]))
            message = message[: match.start(2) - 2] + hint if hint else message
        raise BadInputError(f"{self.prog}: {message} (see `{self.prog} --help`)")


def _suggestion(given: str, known: Iterable[str]) -> str:
    names = {name.lstrip("-"): name for name in known}  # dashes would make all options similar
    near = [names[n] for n in difflib.get_close_matches(given.lstrip("-"), names, 1, cutoff=0.7)]
    return f": did you mean {near[0]!r}?" if near else ""


def build_parser(*needed: str | None) -> argparse.ArgumentParser:
    """Returns the parser; only the modules of the commands ``needed`` are imported."""
    parser = _Parser(
        prog="dpfl",
        description="Training with differential privacy for people.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dpfl_jax {__version__}")
    parser.add_argument(
        "--verbose", action="store_true", help="of any command: tracebacks, and debug logging"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name in needed:
            module = importlib.import_module(f"dpfl_jax.cli.{name}")
            sub = commands.add_parser(
                name,
                help=summary,
                description=module.DESCRIPTION,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            _add_arguments(sub, module)
            sub.set_defaults(handler=module.run)
        else:
            commands.add_parser(name, help=summary)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, module: Any) -> None:
    from dpfl_jax.cli.options import add_options

    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    elif hasattr(module, "VERBS"):
        verbs = parser.add_subparsers(dest="verb", metavar="|".join(module.VERBS), required=True)
        for verb, (options, words) in module.VERBS.items():
            add_options(verbs.add_parser(verb, help=words), options)
    else:
        add_options(parser, module.Options)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses; overrides may stand anywhere, which argparse allows only before the first option."""
    args, rest = parser.parse_known_args(argv)
    if rest and hasattr(args, "overrides") and not any(a.startswith("-") for a in rest):
        args.overrides = [*args.overrides, *rest]
    elif rest:
        commands = parser._subparsers._group_actions[0].choices  # type: ignore[union-attr]
        commands[args.command].error(f"unrecognized arguments: {' '.join(rest)}")  # type: ignore[index]
    return args


def _ignore_code_in_current_folder() -> None:
    """Keeps code in the current folder, which may come from somebody else, from being imported.

    Only a module that a configuration names is looked for there, if its code may run.
    """
    if getattr(sys.modules["__main__"], "__spec__", None) and not sys.flags.safe_path:
        del sys.path[0]  # where `python -m dpfl_jax` puts the folder
    os.environ["PYTHONSAFEPATH"] = "1"  # for processes that this one starts
    ignore_matplotlibrc()


def _of_a_file(error: OSError) -> str:
    """The sentence for an error of a file or a disk."""
    advice = "check who may read and write there"
    if error.errno in FULL_DISK:
        advice = "free space, and repeat the command; a run resumes with its --run-dir"
    return f"{error.filename or 'a file'} cannot be used ({error.strerror}): {advice}"


def _use_no_tpu_that_is_not_here() -> None:
    """Where libtpu is installed (for ``dpfl compile``) without a TPU, JAX would warn: use CPUs."""
    has = importlib.util.find_spec
    signs = ("/dev/accel*", "/dev/vfio/*", "/sys/bus/pci/devices/*/vendor")
    files = [file for sign in signs for file in glob.glob(sign)]
    google = [f for f in files if f.startswith("/dev") or "0x1ae0" in pathlib.Path(f).read_text()]
    chosen = [n for n in os.environ if n.startswith(("TPU_", "CLOUD_TPU", "JAX_PLATFORM"))]
    if has("libtpu") and not (has("jax_plugins") or google or chosen):  # nor a GPU
        os.environ["JAX_PLATFORMS"] = "cpu"


def _use_one_thread_for_little_algebra(command: str | None) -> None:
    """Keeps BLAS from starting threads for small arrays, which would only spin."""
    if command in ("account", "plan"):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    0 done; 2 bad input; 3 the result's ``holds`` is false; 1 anything else.
    """
    is_process = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    command = next((a for a in argv if not a.startswith("-")), None)
    if is_process:
        _ignore_code_in_current_folder()
        _use_no_tpu_that_is_not_here()
        _use_one_thread_for_little_algebra(command)
    end = argv.index("--") if "--" in argv else len(argv)  # what follows is for another program
    verbose = "--verbose" in argv[:end]
    argv = [a for i, a in enumerate(argv) if a != "--verbose" or i > end]
    if verbose:
        logging.basicConfig(level=logging.DEBUG)
    try:
        args = _parse(build_parser(command), argv)
        with too_little_memory(
            f"`dpfl {command}`", "lower its batch sizes, or use a larger machine"
        ):
            result = args.handler(args)
    except (BadInputError, OSError) as error:
        sentence = str(error)
        if isinstance(error, OSError):
            if error.errno is None or isinstance(error, BrokenPipeError):
                raise
            sentence = _of_a_file(error)
        if verbose:
            traceback.print_exc()
        print(plain(f"dpfl: error: {as_given(sentence)}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dpfl: interrupted", file=sys.stderr)
        return 1
    except (StoppedError, UnreachableError) as error:
        print(plain(f"dpfl: {error}"), file=sys.stderr)
        return 1
    if getattr(args, "json", False) and result is not None:
        print(json.dumps(result, default=str), flush=True)
    return 3 if isinstance(result, dict) and result.get("holds") is False else 0


if __name__ == "__main__":
    sys.exit(main())
