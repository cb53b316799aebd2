"""`dpfl reproduce` and `dpfl bench`, which need a checkout, from inside and outside of one."""

import pathlib
import sys

import pytest

import dpfl_jax
from dpfl_jax.cli.bench import from_checkout
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as in site-packages, beside somebody else's benchmarks; elsewhere to work in."""
    packages, elsewhere = tmp_path / "site-packages", tmp_path / "elsewhere"
    (packages / "benchmarks").mkdir(parents=True)
    (packages / "benchmarks" / "__init__.py").touch()
    elsewhere.mkdir()
    monkeypatch.setattr(dpfl_jax, "__file__", str(packages / "dpfl_jax" / "__init__.py"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(elsewhere)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "command",
    [
        ["reproduce", "list"],
        ["reproduce", "subject/audit", "--quick"],
        ["bench"],
        ["bench", "clipping", "--unit", "user"],
    ],
)
def test_one_sentence_outside_of_a_checkout(command, capsys):
    assert main(command) == 2
    assert "are not part of the installed package: clone" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("command", ["reproduce", "bench"])
def test_help_outside_of_a_checkout(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"dpfl {command}" in capsys.readouterr().out


def test_the_checkout_of_the_package_serves(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("benchmarks", "reproductions.registry"):
        assert ROOT in pathlib.Path(from_checkout(name).__file__).parents
    assert sys.path[0] == str(ROOT)


@pytest.mark.usefixtures("installed")
def test_the_folder_one_is_in_is_no_checkout(monkeypatch):
    """Somebody may have sent it, with benchmarks that are theirs."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(BadInputError, match="not part of the installed package"):
        from_checkout("benchmarks")
