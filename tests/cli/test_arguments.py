"""The command line itself: where arguments may stand, and what is refused."""

import pytest

from dpfl_jax.cli.main import _parse, build_parser
from dpfl_jax.errors import BadInputError


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "c.yaml", "a.b=1", "a.c=2", "--run-dir", "r"],
        ["train", "c.yaml", "--run-dir", "r", "a.b=1", "a.c=2"],
        ["train", "c.yaml", "a.b=1", "--run-dir", "r", "a.c=2"],
        ["train", "--run-dir", "r", "c.yaml", "a.b=1", "a.c=2"],
    ],
)
def test_overrides_may_stand_anywhere(argv):
    args = _parse(build_parser("train"), argv)
    assert (args.config, str(args.run_dir)) == ("c.yaml", "r")
    assert sorted(args.overrides) == ["a.b=1", "a.c=2"]


@pytest.mark.parametrize("extra", [["--nope"], ["--nope=1", "a.b=1"]])
def test_unknown_options_are_refused(extra):
    with pytest.raises(BadInputError, match="unrecognized arguments: --nope"):
        _parse(build_parser("train"), ["train", "c.yaml", *extra])


def test_a_command_without_overrides_takes_no_more():
    with pytest.raises(BadInputError, match="unrecognized"):
        _parse(build_parser("show"), ["show", "runs/one", "--json", "more"])
