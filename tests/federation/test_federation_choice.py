"""What `dpfl plan` compares of a federation is what a run of each choice would have."""

import json

import numpy as np
import pytest
import yaml
from rich.console import Console

from dpfl_jax.cli.main import main
from dpfl_jax.config import validate_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.choice import by_reach, federated_options, other_steps
from dpfl_jax.federation.federated_run import prepare

CONFIG = {
    "data": {"source": "digits", "records_per_user": 6},
    "federation": {"silos": 4, "rounds": 8, "local_steps": 2},
    "model": {"kind": "mlp", "options": {"hidden": [8]}},
    "mechanism": {"kind": "hi_grad_avg", "batch_size": 30, "max_records_per_subject": 2},
    "privacy": {"epsilon": 8.0, "delta": 1e-4},
}
QUIET = Console(quiet=True)
pytest.importorskip("sklearn")


def prepared(**changes):
    return prepare(validate_config({**CONFIG, **changes}), QUIET)


@pytest.fixture(scope="module")
def ready():
    return prepared()


@pytest.fixture(scope="module")
def found(ready):
    return list(federated_options(ready))


def test_each_choice_is_what_its_configuration_would_run(ready, found):
    assert {c.kind for c in found} == {"user_ldp", "local_group", "hi_grad_avg", "subject_uls"}
    assert {c.cap for c in found} == {1, 2}
    chosen = [c for c in found if c.cap == 1 and c.kind in ("local_group", "subject_uls")]
    for choice in chosen:
        again = prepare(choice.config, QUIET)
        assert again.balance().ratio == pytest.approx(choice.ratio, rel=1e-6)
        assert again.guarantee(choice.rounds).epsilon <= 8.0
        records = sum(plan.facts.num_records for plan in again.federation.silos)
        whole = sum(plan.facts.num_records for plan in ready.federation.silos)
        assert choice.kept == pytest.approx(records / whole)


def test_as_configured_is_one_of_them(ready, found):
    (mine,) = [c for c in found if (c.kind, c.cap) == ("hi_grad_avg", 2)]
    assert mine.ratio == pytest.approx(ready.balance().ratio, rel=1e-6)
    for other in other_steps(ready, mine):
        assert other.batch * other.rounds == pytest.approx(30 * 8)
    reach = list(by_reach(ready, mine).values())
    assert reach[-1] == pytest.approx(mine.ratio)
    assert (np.diff(reach) > 0).all()  # a person in more silos costs more


def test_no_target_is_refused():
    open_ended = prepared(privacy={"noise_multiplier": 1.0, "delta": 1e-4})
    with pytest.raises(BadInputError, match="the target is not set"):
        next(federated_options(open_ended))


def test_the_command_writes_what_it_recommends(tmp_path, capsys):
    config, out, png = (tmp_path / name for name in ("f.yaml", "planned.yaml", "p.png"))
    config.write_text(yaml.safe_dump({"name": "small", **CONFIG}))
    command = ["plan", str(config), "--out", str(out), "--png", str(png), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    least = min(found["options"], key=lambda o: o["ratio"])["ratio"]
    assert found["best"]["ratio"] == pytest.approx(least, rel=1e-2)
    assert png.stat().st_size > 1000
    written = yaml.safe_load(out.read_text())
    assert written["mechanism"]["kind"] == found["best"]["kind"]
    assert main(["train", str(out), "--dry-run", "--json"]) == 0
    dry = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert dry["noise_over_signal"]["over_a_run"] == pytest.approx(found["best"]["ratio"], rel=1e-3)
    assert main([*command, "--compute-budget", "8"]) == 2
    assert "--compute-budget is for central runs" in capsys.readouterr().err
