"""What a run directory holds, and what it must not."""

import copy
import errno
import json
import os
import pathlib
import stat

import pytest
import yaml

from dpfl_jax.config import config_to_dict, validate_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.directory import RunDirectory, seal_of, write_atomically
from dpfl_jax.training.start import _alone


def test_the_fingerprint_of_the_data_is_written_only_keyed(tmp_path):
    """A plain hash of private data would tell whoever knows all users but one who that is."""
    facts = {"data": "cafe" * 16, "noise_multiplier": 1.0}
    first = RunDirectory(tmp_path / "run", {}, None, facts)
    first.close()
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            assert "cafecafe" not in file.read_text()
    again = RunDirectory(tmp_path / "run", {}, None, facts)
    assert again.resumed
    assert again.facts == first.facts
    again.close()
    other = RunDirectory(tmp_path / "other", {}, None, facts)
    assert other.facts["data"] != first.facts["data"]
    other.close()
    with pytest.raises(BadInputError, match="training data are not those"):
        RunDirectory(tmp_path / "run", {}, None, facts | {"data": "beef" * 16})


def test_hardware_is_known_before_the_first_checkpoint(tmp_path):
    first = RunDirectory(tmp_path / "run", {"a": 1}, None, {"data": "abc"})
    before = first.facts["data"]
    assert not first.computed_with("4 x cpu")
    first.close()  # it died here
    again = RunDirectory(tmp_path / "run", {"a": 1}, None, {"data": "abc"})
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
    assert known["config"] == {"a": 1}


def test_another_configuration_is_refused_by_its_key(tmp_path):
    raw = {
        "data": {"source": "csv", "path": "a.csv"},
        "model": {"checkpoint": "base"},
        "mechanism": {"kind": "uls", "group_size": 1, "cohort_size": 16},
        "privacy": {"epsilon": 2.0},
        "train": {"steps": 3},
    }

    def opened(change):
        changed = {name: {**section, **change.get(name, {})} for name, section in raw.items()}
        config = validate_config(changed)
        facts = {"data": "the same"}
        content = config_to_dict(config)
        found = RunDirectory(tmp_path / "run", content, None, facts)
        found.begin_steps()
        found.close()
        return found

    first = opened({})
    # Data are known by their content, and how often something is written changes no run.
    often = {"log_every": 2, "checkpoint_every": 7, "keep_checkpoints": 3}
    moved = {"data": {"path": "moved/a.csv", "public": "p.txt"}, "model": {"checkpoint": "other"}}
    again = opened({**moved, "train": often})
    assert again.resumed
    assert again.run_id == first.run_id
    # Whoever exports the model looks for its base where it lies now.
    known = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["config"]
    assert known["model"]["checkpoint"] == "other"
    assert (known["data"]["path"], known["data"]["public"]) == ("moved/a.csv", "p.txt")
    assert known["train"]["log_every"] == 1
    assert opened(moved).resumed  # its seal is that of what it holds now
    for change, key in (
        ({"train": {"steps": 4}}, "train.steps"),
        ({"mechanism": {"cohort_size": 8}, "data": {"path": "b"}}, "mechanism.cohort_size"),
    ):
        with pytest.raises(BadInputError, match=f"another configuration: {key} differs"):
            opened(change)


def test_a_directory_below_a_file_and_one_with_a_backslash_are_refused(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(BadInputError, match=r"notes is a file, and .*notes/runs/a is to be"):
        RunDirectory(tmp_path / "notes" / "runs" / "a", {})
    with pytest.raises(BadInputError, match="has a backslash"):
        RunDirectory(tmp_path / "a\\b" / "run", {})
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_a_disk_that_was_full_at_the_start_leaves_a_directory_that_can_be_used(
    tmp_path, monkeypatch
):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 2:  # the key is written, and config.yaml is not
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left.*config\.yaml"):
            RunDirectory(tmp_path / "run", {})
    (tmp_path / "run" / ".config.yaml.1.tmp").write_text("of a process that was killed")
    assert not RunDirectory(tmp_path / "run", {}).resumed


def test_going_on_takes_back_the_report_of_the_interruption(tmp_path):
    first = RunDirectory(tmp_path / "run", {}, None)
    told = ("report.json", "report.md", "private/records.csv", "private/records.json")
    for name in told:
        (first.path / name).write_text('{"status": "interrupted"}')
    first.close()
    again = RunDirectory(tmp_path / "run", {}, None)
    assert again.resumed
    again.begin_steps()
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
    RunDirectory(path, {}).close()
    assert (mode(path / "private"), mode(path / "private/root_key.json")) == (0o700, 0o600)
    (path / "private").chmod(0o755)
    (path / "private/root_key.json").chmod(0o664)
    RunDirectory(path, {}).close()
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
            RunDirectory(path, {})
        (path / name).unlink()
        RunDirectory(path, {}).close()  # the lock is not held any more
    (tmp_path / "base.lock").symlink_to(target)
    with pytest.raises(BadInputError, match=r"base.lock cannot be opened"):
        _alone(tmp_path / "base").__enter__()
    link = tmp_path / f".file.{os.getpid()}.tmp"
    link.symlink_to(target)
    write_atomically(tmp_path / "file", "new", mode=0o600)
    assert ((tmp_path / "file").read_text(), mode(tmp_path / "file")) == ("new", 0o600)
    assert target.read_text() == "mine"


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
        RunDirectory(path, {})
    assert not list(pathlib.Path(path, "private").iterdir())


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "profile/trace", "wandb"])
def test_a_run_that_was_sent_writes_nowhere_else(tmp_path, name):
    RunDirectory(tmp_path / "run", {}).close()
    if name != "wandb":
        (tmp_path / "run" / "wandb").mkdir()
        (tmp_path / "run" / "wandb" / "latest-run").symlink_to("run-1")  # its own
    RunDirectory(tmp_path / "run", {}).close()
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInputError, match=f"holds a link, .*{name}"):
        RunDirectory(tmp_path / "run", {})


FORGED = {
    "run_id": [["a"], None, {}],
    "config": [None, "a", ["a"]],
    "facts": [None, [], "a"],
    "facts.data": [1, ["a"]],
    "facts.versions": ["1.0", [], [1], {}],
    "facts.hardware": ["a", [["a"]], 3],
    "facts.layouts": [None, [{}]],
    "facts.caveats": ["a", [None]],
    "facts.terms": [[], "a"],
    "facts.start": [[], 1.0],
    "facts.streams": [["a"], 1],
    "facts.delta": ["1e-5", []],
    "facts.noise": [1.0, ["1"]],
    "facts.mechanism": ["uls"],
}


@pytest.mark.parametrize("place", FORGED)
def test_a_sealed_file_of_somebody_else_with_other_types_gets_one_sentence(place, tmp_path):
    run = RunDirectory(tmp_path / "run", {}, None, {"data": "abc"})
    run.close()
    file = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    content.pop("seal")
    for value in FORGED[place]:
        forged = copy.deepcopy(content)
        *above, last = place.split(".")
        (forged[above[0]] if above else forged)[last] = value
        forged["seal"] = seal_of(forged, run.root_key)
        file.write_text(yaml.safe_dump(forged))
        with pytest.raises(BadInputError, match=f"config.yaml.*{last}|damaged|belongs to another"):
            RunDirectory(tmp_path / "run", {}, None, {"data": "abc"})


def test_aliases_and_keys_of_other_types_get_one_sentence(tmp_path):
    RunDirectory(tmp_path / "run", {}).close()
    key = tmp_path / "run" / "private" / "root_key.json"
    kept = key.read_text()
    for content in ("[]", "1", '{"secret": 3, "public": false}', "[" * 10**5):
        key.write_text(content)
        with pytest.raises(BadInputError, match="root key"):
            RunDirectory(tmp_path / "run", {})
    key.write_text(kept)
    lines = ["a0: &a0 [1, 1]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (tmp_path / "run" / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(BadInputError, match="damaged"):
        RunDirectory(tmp_path / "run", {})


def test_a_refused_resume_leaves_the_run_as_it_is(tmp_path):
    """The guarantee of what an interrupted run had released, say."""
    run = RunDirectory(tmp_path / "run", {}, None, {"data": "abc"})
    run.begin_steps()
    run.close()
    stated = tmp_path / "run" / "guarantee.json"
    stated.write_text(json.dumps({"status": "interrupted"}))
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    again = RunDirectory(tmp_path / "run", {}, None, {"data": "abc"})
    again.close()  # something refused it
    assert stated.exists()
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    again = RunDirectory(tmp_path / "run", {}, None, {"data": "abc"})
    again.begin_steps()
    again.close()
    assert not stated.exists()
