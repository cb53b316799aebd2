"""``dpfl silo``: the folder that is made, what is read back, and what is refused."""

import json

import pytest
import yaml

from dpfl_jax.cli.main import main
from dpfl_jax.flower.silo import SiloClient
from dpfl_jax.flower.silo_folder import read_key, read_silo_config
from dpfl_jax.flower.wire import pack
from tests.flower.studies import ISRL, study, write_tables


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study()))
    (tmp_path / "isrl.yaml").write_text(yaml.safe_dump(study(ISRL)))
    return tmp_path


def init(config="study.yaml", folder="bern"):
    words = ["--name", "bern", "--config", config, "--data", "bern.csv"]
    return main(["silo", "init", folder, *words])


@pytest.mark.parametrize("config", ["study.yaml", "isrl.yaml"])
def test_a_folder_is_made_and_checked(place, config, capsys):
    assert init(config) == 0
    assert not read_key(place / "bern").public
    policy = read_silo_config(place / "bern").policy
    assert policy.unit == ("record" if config == "isrl.yaml" else "subject")
    assert main(["silo", "check", "bern", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["name"] == "bern"
    assert 0 < found["sent"]["num_records"] <= 60
    assert found["runs"] == {}
    secret = (place / "bern/private/root_key").read_text()
    assert init(config) == 2  # a key has no second life
    assert (place / "bern/private/root_key").read_text() == secret


def test_what_is_given_stays_one_value(place, capsys):
    """A file's name could make a person a visit."""
    told = {
        "--name": "bern: #1",
        "--config": "study.yaml",
        "--data": "bern.csv, user_column: visit",
    }
    told |= {"--server": "[::1]:8000", "--root-certificates": "ca: {}.pem"}
    words = [word for pair in told.items() for word in pair]
    assert main(["silo", "init", "my silo;x", *words]) == 0
    assert "then `dpfl silo check 'my silo;x'`" in " ".join(capsys.readouterr().out.split())
    found = yaml.safe_load((place / "my silo;x" / "silo.yaml").read_text())
    assert found["data"] == {"path": "../bern.csv, user_column: visit"}
    assert (found["name"], found["server"]) == ("bern: #1", "[::1]:8000")
    assert found["root_certificates"] == "../ca: {}.pem"


def test_a_limit_without_a_value_and_one_said_twice_are_refused(place, capsys):
    init()
    path = place / "bern/silo.yaml"
    text = path.read_text()
    for change, told in (
        (text.replace("total_epsilon: 8.0 ", "total_epsilon: "), "policy.total_epsilon is empty"),
        (text + "  total_epsilon: 800\n", "the key 'total_epsilon' occurs twice"),
    ):
        assert change != text
        path.write_text(change)
        assert main(["silo", "check", "bern"]) == 2
        assert told in capsys.readouterr().err


def test_names_of_files_are_quoted(place):
    words = ["--name", "010", "--config", "study.yaml", "--data", "a #1: b.csv"]
    assert main(["silo", "init", "other", *words]) == 0
    read = read_silo_config(place / "other")
    assert (read.name, read.data["path"]) == ("010", "../a #1: b.csv")


def test_no_request_breaks_the_check(place, capsys):
    init()
    silo = SiloClient(place / "bern")
    silo.answer(pack({"kind": "round", "run": "[/x] \x1b[2J"}))
    silo.close()
    assert main(["silo", "check", "bern"]) == 0
    assert "has accepted no run '[/x] " in capsys.readouterr().out


def test_bad_input_is_one_sentence(place, capsys):
    def said(*words):
        assert main(["silo", *words]) == 2
        return capsys.readouterr().err

    assert "not a silo's folder" in said("check", "nowhere")
    assert "--insecure for a test on one machine" in said("serve", "study.yaml", "--run-dir", "r")
    tls = ["--certificate", "a", "--key", "b"]
    assert "there is no file a" in said("serve", "study.yaml", "--run-dir", "r", *tls)
    init()
    path = place / "bern/silo.yaml"
    text = path.read_text()
    path.write_text(text.replace("epsilon: 8.0", "epsilon: -1"))
    assert "policy.epsilon" in said("check", "bern")
    path.write_text(text.replace('"../bern.csv"}', '"../bern.csv", classes: 3}'))
    assert "data.classes is not the same here" in said("check", "bern")
