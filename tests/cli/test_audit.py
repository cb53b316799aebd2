"""``dpfl audit`` on small configurations."""

import json

import pytest
import yaml

from benchmarks import audit as bench
from dpfl_jax.cli.main import main

ISRL = [
    "audit",
    "--simulate",
    "configs/isrl/quickstart.yaml",
    "federation.rounds=4",
    "--trials",
    "2000",
]


@pytest.mark.slow
def test_a_sound_configuration_stands_and_a_bug_is_exit_status_3(capsys, tmp_path):
    picture = tmp_path / "audit.png"
    always = ["--seed", "3", "--confidence", "0.999", "--json"]
    assert main([*ISRL, *always, "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["holds"]
    assert found["audits"][0]["proved"] < found["audits"][0]["claimed"] == pytest.approx(8, 1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with bench.BUGS["noise / 2"][0]():
        assert main([*ISRL, *always]) == 3
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["audits"][0]["proved"] > found["audits"][0]["claimed"]


DIGITS = {
    "name": "digits",
    "data": {"source": "digits", "validation_fraction": 0.05, "test_fraction": 0.0},
    "model": {"kind": "mlp"},
    "mechanism": {"kind": "uls", "group_size": 1, "cohort_size": 800},
    "privacy": {"epsilon": 2.0, "delta": 1e-4},
    "train": {"steps": 4},
    "audit": {"canaries": 3000, "confidence": 0.999},
}


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.nightly
def test_a_run_is_audited_by_its_own_canaries(capsys, tmp_path):
    pytest.importorskip("sklearn")
    file, picture = tmp_path / "digits.yaml", tmp_path / "audit.png"
    file.write_text(yaml.safe_dump(DIGITS))
    train = ["train", str(file), "seed=1", "--json", "--run-dir"]
    assert main([*train, str(tmp_path / "sound")]) == 0
    report = last_json(capsys)
    assert report["audit"]["holds"]
    assert "## Audit" in (tmp_path / "sound" / "report.md").read_text()
    assert main(["audit", str(tmp_path / "sound"), "--json", "--picture", str(picture)]) == 0
    found = last_json(capsys)
    assert found["audits"] == report["audit"]["audits"]
    assert (
        0 < found["audits"][0]["proved"] < found["audits"][0]["claimed"] == pytest.approx(2, 1e-3)
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["verify", str(tmp_path / "sound")]) == 0
    capsys.readouterr()

    assert main([*train, str(tmp_path / "without"), "audit=null"]) == 0
    report_without = last_json(capsys)
    assert report_without["guarantee"] == report["guarantee"]
    assert report_without["eval"]["final"]["loss"] == pytest.approx(
        report["eval"]["final"]["loss"], rel=1e-5
    )
    files = [tmp_path / d / "guarantee.json" for d in ("sound", "without")]
    sound, without = (json.loads(file.read_text()) for file in files)
    assert sound | {"digests": without["digests"]} == without
    assert main(["audit", str(tmp_path / "without")]) == 2
    assert "had no canaries" in capsys.readouterr().err

    with bench.BUGS["noise / 2"][0]():
        assert main([*train, str(tmp_path / "broken")]) == 0
        assert "THE CLAIM IS REFUTED" in capsys.readouterr().err
        given = ["audit", "--train", str(file), "--seed", "2", "--json"]
        assert main(given) == 3
    assert last_json(capsys)["refuted"] == 1
    assert main(["audit", str(tmp_path / "broken"), "--json"]) == 3
    assert last_json(capsys)["audits"][0]["proved"] > 2


def test_what_is_no_run_is_said(capsys, tmp_path):
    assert main(["audit", str(tmp_path)]) == 2
    assert "not the directory of a run" in capsys.readouterr().err
    assert main(["audit", "--train", "configs/isrl/quickstart.yaml"]) == 2
    assert "central" in capsys.readouterr().err


def test_what_promises_nothing_cannot_be_audited(capsys):
    assert main([*ISRL, "privacy.epsilon=null"]) == 2
    assert "has no guarantee" in capsys.readouterr().err
    assert main(["audit"]) == 2
