"""Commands that are printed to be pasted: a folder may be named by whoever sent it."""

import re
import shlex

import pytest

from dpfl_jax.cli.finetune import _write
from dpfl_jax.cli.main import main
from dpfl_jax.cli.train import _check_finished
from dpfl_jax.errors import BadInputError, StoppedError

FOLDER = "r;touch P $(x)'"


def words(text, first):
    """From the word ``first`` on, as a shell reads them."""
    return shlex.split(re.sub(r"\s+", " ", text)[text.index(first) :].replace("`", ""))


def test_an_unfinished_run_goes_on_by_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "config.yaml").touch()
    assert main(["show", FOLDER]) == 0
    said = capsys.readouterr().out
    assert words(said[said.rindex("--run-dir") :], "--run-dir")[1] == FOLDER


def test_a_run_that_is_stopped_goes_on_by_what_is_said():
    with pytest.raises(StoppedError) as stopped:
        _check_finished({"status": "interrupted", "steps": 3, "run_dir": FOLDER})
    assert words(str(stopped.value), "--run-dir")[1] == FOLDER


def test_a_fine_tuning_goes_on_by_what_is_said(tmp_path):
    path = tmp_path / FOLDER / "config.yaml"
    _write(path, "a")
    with pytest.raises(BadInputError) as refused:
        _write(path, "b")
    said = words(str(refused.value), "dpfl train")
    assert said == ["dpfl", "train", str(path), "--run-dir", str(path.parent / "run")]


def test_no_link_is_written_through(tmp_path):
    (tmp_path / "config.yaml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInputError, match="is of another run"):
        _write(tmp_path / "config.yaml", "a")
    assert not (tmp_path / "elsewhere").exists()


def test_a_configuration_is_trained_by_what_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--out", "a;touch P"]) == 0
    assert words(capsys.readouterr().out, "dpfl train")[2] == "a;touch P"
