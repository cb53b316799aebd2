"""``dpfl audit`` on small configurations."""

import json

import pytest

from benchmarks import audit as bench
from dpfl_jax.cli.main import main

ISRL = ["audit", "--simulate", "configs/isrl/quickstart.yaml", "isrl.rounds=4", "--trials", "2000"]


@pytest.mark.slow
@pytest.mark.privacy
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


def test_what_promises_nothing_cannot_be_audited(capsys):
    assert main([*ISRL, "privacy.epsilon=null"]) == 2
    assert "promises nothing" in capsys.readouterr().err
    assert main(["audit"]) == 2
