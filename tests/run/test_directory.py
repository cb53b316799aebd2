"""What a run directory holds, and what it must not."""

import pytest
import yaml

from dpfl_jax.errors import BadInputError
from dpfl_jax.run.directory import RunDirectory


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
