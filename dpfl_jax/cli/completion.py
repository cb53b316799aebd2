"""``dpfl completion``: prints a script for shell completion."""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import extra

DESCRIPTION = """\
Print a script that makes the shell complete `dpfl`. It needs the package `shtab`
(pip install 'dpfl_jax[completion]').

examples:
  dpfl completion bash > ~/.local/share/bash-completion/completions/dpfl
  dpfl completion zsh > ~/.zfunc/_dpfl                     # a folder of $fpath
"""


class Options(options.Options):
    """A shell's completion.

    Attributes:
      shell: the shell to write the script for.
    """

    shell: Annotated[Literal["bash", "zsh", "tcsh"], Flag(is_positional=True)]


def run(args: argparse.Namespace) -> None:
    """Prints a completion script for the user's shell."""
    from dpfl_jax.cli.main import COMMANDS, build_parser

    with extra("completion", "`dpfl completion`"):
        import shtab
    print(shtab.complete(build_parser(*COMMANDS), args.shell))
