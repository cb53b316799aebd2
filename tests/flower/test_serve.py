"""What the server's process says, and when it does not begin."""

import io

import pytest
import yaml
from rich.console import Console

from dpfl_jax.config import config_fingerprint
from dpfl_jax.errors import BadInputError
from tests.flower.studies import QUIET, config_of, study

pytest.importorskip("flwr")
from dpfl_jax.flower.serve import _tell, serve


def test_what_a_log_says_is_said_once_and_in_whole_lines(tmp_path):
    log, console = tmp_path / "study.log", Console(file=io.StringIO(), width=40)
    assert _tell(log, 0, console) == 0
    log.write_text("of the run before\nbern is here\nround")
    told = _tell(log, len("of the run before\n"), console)
    log.write_text(log.read_text() + " 1/2\n")
    assert _tell(log, told, console) == log.stat().st_size
    assert console.file.getvalue() == "bern is here\nround 1/2\n"


def test_a_finished_study_is_not_served_again(tmp_path):
    done = tmp_path / "run"
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study()))
    done.mkdir()
    fingerprint = config_fingerprint(config_of(tmp_path))
    (done / "config.yaml").write_text(yaml.safe_dump({"fingerprint": fingerprint}))
    (done / "report.json").write_text('{"status": "finished"}')
    with pytest.raises(BadInputError, match="is finished and is not overwritten"):
        serve(tmp_path / "study.yaml", done, QUIET)
