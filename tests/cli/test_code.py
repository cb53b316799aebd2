"""Code that comes with a folder, a configuration or a run: it does not run by being there."""

import ast
import subprocess
import sys

import pytest
import yaml

from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config
from dpfl_jax.errors import BadInputError, imported
from dpfl_jax.training.export import read_run
from tests.statements import SOUND, finished

RUNS = "open('ran', 'a').write(__name__)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which importing any module leaves a file."""
    for name in ("planted_module", "linkify_it", "zstandard", "uarray"):
        (tmp_path / f"{name}.py").write_text(f"{RUNS}def f(*args, **more):\n    {RUNS}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("planted_module", None)


def configuration(folder, **sections):
    (folder / "d.csv").write_text("user,x,y\n" + "".join(f"u{i},{i},{i % 2}\n" for i in range(9)))
    data = {"source": "csv", "path": "d.csv", "target_column": "y", "classes": 2}
    config = {
        "data": data | sections.pop("data", {}),
        "model": {"kind": "logistic"},
        "mechanism": {"kind": "uls", "group_size": 1, "cohort_size": 4},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "train": {"steps": 2},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config | sections))
    return str(folder / "c.yaml")


def test_a_folder_runs_nothing_for_being_the_current_one(folder):
    """`dpfl show` reads Markdown by a library that tries to import linkify_it."""
    finished(folder, SOUND["uls"](), name="https://example.com")
    (folder / "matplotlibrc").write_text("text.usetex: True\n")  # has TeX run, on a preamble
    told = "import os, sys; from dpfl_jax.cli.main import main; main(); import matplotlib;"
    told += "print(matplotlib.rcParams['text.usetex'], os.environ['PYTHONSAFEPATH'], sys.path)"
    for start in (["-P", "-c", told], ["-m", "dpfl_jax"]):
        done = subprocess.run(
            [sys.executable, *start, "show", "."], capture_output=True, text=True, check=True
        )
        assert "example.com" in done.stdout
        assert not (folder / "ran").exists()
        if "-c" in start:
            usetex, safe, path = done.stdout.splitlines()[-1].split(" ", 2)
            assert (usetex, safe) == ("False", "1")
            assert not {"", str(folder)} & set(ast.literal_eval(path))


def test_it_is_on_the_path_while_a_module_that_the_user_names_is_imported(folder):
    assert imported("planted_module:f", "model.module").__name__ == "f"
    assert (folder / "ran").read_text() == "planted_module"
    assert "" not in sys.path
    with pytest.raises(BadInputError, match="cannot be used: No module named"):
        imported("no_such_module:f", "model.module")
    assert "" not in sys.path


CODE = {
    "mechanism.kind": "planted_module:f",
    "model.module": "planted_module:f",
    "data.source": "planted_module:f",
    "data.user_column": "planted_module:f",
}


@pytest.mark.parametrize("key", CODE)
@pytest.mark.parametrize("by", ["file", "override"])
def test_a_configuration_names_code_only_if_the_command_says_so(key, by, folder, capsys):
    section, name = key.split(".")
    value, override = {name: CODE[key]}, []
    if key == "mechanism.kind":
        value |= {"group_size": 1, "cohort_size": 4}
    if by == "file":
        file = configuration(folder, **{section: value})
    else:
        file, override = configuration(folder), [f"{key}={CODE[key]}"]
    commands = [["train", file, "--dry-run"], ["plan", file], ["audit", "--simulate", file]]
    commands += [["sweep", file, "--grid", "epsilon=1", "--out", "s", "--dry-run"]]
    commands += [["compile", file, "--topology", "cpu:1"]]
    for command in commands:
        assert main([*command, *override]) == 2
        assert f"{key} is 'planted_module:f', code that would be run" in capsys.readouterr().err
    assert not (folder / "ran").exists()
    if key == "mechanism.kind":
        with pytest.raises(BadInputError, match="not a mechanism, or was not imported"):
            load_config(file, override, allow_code=True)
        assert (folder / "ran").exists()


def test_a_cell_of_a_sweep_names_code_only_if_the_command_says_so(folder, capsys):
    grid = ["--grid", "model.module=planted_module:f", "--out", "s", "--dry-run"]
    assert main(["sweep", configuration(folder), *grid]) == 2
    assert "model.module is 'planted_module:f', code" in capsys.readouterr().err
    assert not (folder / "ran").exists()


def test_no_function_of_the_standard_library_is_given_what_a_file_says(folder, capsys):
    """The keys of a row are the first line of a file: here a command, to subprocess.getoutput."""
    file = configuration(folder, data={"user_column": "subprocess:getoutput"})
    (folder / "d.csv").write_text("touch ran,x,y\n1,1,1\n0,0,0\n")
    assert main(["train", file, "--dry-run", "--allow-code"]) == 2
    assert "in Python's standard library" in capsys.readouterr().err
    assert not (folder / "ran").exists()


def test_what_a_run_directory_names_is_not_imported(folder, capsys):
    """Of a run that somebody sent: its configuration, and the guarantee beside it."""
    run = folder / "run"
    run.mkdir()
    kind = {"kind": "planted_module:f", "group_size": 1, "cohort_size": 4}
    configuration(folder, mechanism=kind)
    sent = {"config": yaml.safe_load((folder / "c.yaml").read_text()), "facts": {}}
    (run / "config.yaml").write_text(yaml.safe_dump(sent))
    finished(run, SOUND["uls"]())
    with pytest.raises(BadInputError, match="was not imported"):
        read_run(run)
    for command in (["export", "run", "out"], ["audit", "run"], ["sample", "run", "--prompt", "a"]):
        assert main(command) == 2
    assert not (folder / "ran").exists()
