"""What a run directory holds, and what it must not."""

import os
import pathlib
import stat

import pytest
import yaml

from dpfl_jax.errors import BadInputError
from dpfl_jax.run.directory import RunDirectory, write_atomically
from dpfl_jax.training.pretrain import _alone


def test_the_fingerprint_of_the_data_is_written_only_keyed(tmp_path):
    """A plain hash of private data would tell whoever knows all users but one who that is."""
    facts = {"data": "cafe" * 16, "noise_multiplier": 1.0}
    first = RunDirectory(tmp_path / "run", {}, "c", None, facts)
    first.close()
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            assert "cafecafe" not in file.read_text()
    again = RunDirectory(tmp_path / "run", {}, "c", None, facts)
    assert again.resumed
    assert again.facts == first.facts
    again.close()
    other = RunDirectory(tmp_path / "other", {}, "c", None, facts)
    assert other.facts["data"] != first.facts["data"]
    other.close()
    with pytest.raises(BadInputError, match="training data are not those"):
        RunDirectory(tmp_path / "run", {}, "c", None, facts | {"data": "beef" * 16})


def test_hardware_is_known_before_the_first_checkpoint(tmp_path):
    first = RunDirectory(tmp_path / "run", {"a": 1}, "f", None, {"data": "abc"})
    before = first.facts["data"]
    assert not first.computed_with("4 x cpu")
    first.close()  # it died here
    again = RunDirectory(tmp_path / "run", {"a": 1}, "f", None, {"data": "abc"})
    assert not again.computed_with("4 x cpu")
    assert again.computed_with("8 x tpu")
    assert again.facts["hardware"] == ["4 x cpu", "8 x tpu"]
    joined = RunDirectory.join(again.introduction(), {"data": "abc"})
    assert joined.computed_with("8 x tpu")
    joined.note("said", "by a process that does not write")
    again.close()
    known = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert known["facts"] == {
        "data": before,
        "hardware": ["4 x cpu", "8 x tpu"],
        "layouts": ["None"],
    }
    assert (known["fingerprint"], known["config"]) == ("f", {"a": 1})


def test_going_on_takes_back_the_report_of_the_interruption(tmp_path):
    first = RunDirectory(tmp_path / "run", {}, "f", None)
    told = ("report.json", "report.md", "private/records.csv", "private/records.json")
    for name in told:
        (first.path / name).write_text('{"status": "interrupted"}')
    first.close()
    again = RunDirectory(tmp_path / "run", {}, "f", None)
    assert again.resumed
    assert not [name for name in told if (again.path / name).exists()]
    again.close()


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_a_folder_that_was_there_keeps_no_secret_open(tmp_path):
    """Made by a script, or by somebody else, with a private/ that all can look into."""
    path = tmp_path / "run"
    (path / "private").mkdir(parents=True)
    (path / "private").chmod(0o777)
    planted = path / "private" / f".root_key.json.{os.getpid()}.tmp"
    planted.touch()
    planted.chmod(0o666)
    RunDirectory(path, {}, "f").close()
    assert (mode(path / "private"), mode(path / "private/root_key.json")) == (0o700, 0o600)
    (path / "private").chmod(0o755)
    (path / "private/root_key.json").chmod(0o664)
    RunDirectory(path, {}, "f").close()
    assert (mode(path / "private"), mode(path / "private/root_key.json")) == (0o700, 0o600)


def test_links_are_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    for name in ("run.lock", "private", "private/root_key.json"):
        path = tmp_path / name.replace("/", "-")
        (path / name).parent.mkdir(parents=True)
        (path / name).symlink_to(target)
        with pytest.raises(
            BadInputError, match=f"{name} .*(outside of the folder|cannot be opened)"
        ):
            RunDirectory(path, {}, "f")
        (path / name).unlink()
        RunDirectory(path, {}, "f").close()  # the lock is not held any more
    (tmp_path / "base.lock").symlink_to(target)
    with pytest.raises(BadInputError, match=r"base.lock cannot be opened"):
        _alone(tmp_path / "base").__enter__()
    link = tmp_path / f".file.{os.getpid()}.tmp"
    link.symlink_to(target)
    write_atomically(tmp_path / "file", "new", mode=0o600)
    assert ((tmp_path / "file").read_text(), mode(tmp_path / "file")) == ("new", 0o600)
    assert target.read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "attacks.png"])
def test_a_run_does_not_go_on_behind_links(name, tmp_path):
    """Into another run's checkpoints, of which the oldest would be deleted."""
    RunDirectory(tmp_path / "run", {}, "f").close()
    (tmp_path / "precious").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(BadInputError, match=f"{name} is .*precious, outside of the folder"):
        RunDirectory(tmp_path / "run", {}, "f")


def test_what_belongs_to_somebody_else_keeps_no_secret(tmp_path, monkeypatch):
    path = tmp_path / "run"
    (path / "private").mkdir(parents=True)
    fstat, own = os.fstat, os.stat(path / "private").st_ino

    def others(descriptor):
        found = fstat(descriptor)
        if found.st_ino != own:
            return found
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10]))

    monkeypatch.setattr(os, "fstat", others)
    with pytest.raises(BadInputError, match="private is to keep a secret, but it belongs to some"):
        RunDirectory(path, {}, "f")
    assert not list(pathlib.Path(path, "private").iterdir())
