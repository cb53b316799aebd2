"""``dpfl completion``: what makes a shell complete commands and options."""

from __future__ import annotations

import argparse

from dpfl_jax.errors import BadInputError

DESCRIPTION = """\
Print a script that makes the shell complete `dpfl`. It needs the package `shtab`
(pip install shtab).

examples:
  dpfl completion bash > ~/.local/share/bash-completion/completions/dpfl
  dpfl completion zsh > ~/.zfunc/_dpfl                     # a folder of $fpath
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the argument."""
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])


def run(args: argparse.Namespace) -> None:
    """Prints the script."""
    from dpfl_jax.cli.main import COMMANDS, build_parser

    try:
        import shtab
    except ImportError as error:
        raise BadInputError("completion needs a package: pip install shtab") from error
    print(shtab.complete(build_parser(*COMMANDS), args.shell))
