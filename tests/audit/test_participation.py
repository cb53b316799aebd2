"""People ranked by a model's losses: of every system, and what coins prove."""

import json

import numpy as np
import pytest
from rich.console import Console

from dpfl_jax.audit.attacks.participation import participation
from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config
from dpfl_jax.randomness import RootKey

SHORT = ["train.steps=3", "eval.baseline=false", "eval.max_users=4", "mechanism.cohort_size=100"]
RUNS = {
    "central": ("configs/quickstart.yaml", SHORT),
    "federated": ("configs/subject/quickstart.yaml", ["federation.rounds=1"]),
    "personal": ("configs/rpdp/quickstart.yaml", ["federation.rounds=1"]),
    "isrl": ("configs/isrl/quickstart.yaml", ["federation.rounds=5"]),
}


def asked(how, name, capsys):
    path, overrides = RUNS[name]
    assert main(["audit", how, path, *overrides, "--seed", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_little_training_tells_nothing_of_members(name, capsys):
    """False alarm of an area: 5 standard deviations, 6e-7 of each."""
    found = asked("--membership", name, capsys)
    for area in found["auc"].values():
        assert abs(area - 0.5) < 5 * found["chance_deviation"]
    assert found["holds"]
    (audit,) = found["audits"]
    assert 0 < audit["claimed"] <= 10 + 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["central", "federated"])
def test_users_are_ranked_by_other_records(name, capsys):
    found = asked("--user-inference", name, capsys)
    assert found["users_in"] + found["users_out"] > 400
    for area in found["auc"].values():
        assert abs(area - 0.5) < 5 * found["chance_deviation"]


OVERFIT = """
name: overfit
data: {{source: csv, path: {path}, user_column: person, target_column: label, classes: 2}}
model: {{kind: logistic}}
federation: {{silos: 2, rounds: 30, local_steps: 5}}
mechanism: {{kind: hi_grad_avg, sampling_prob: 1.0, clip_norm: 1.0}}
privacy: {{epsilon: 1.0, delta: 1.0e-4}}
"""


@pytest.mark.slow
def test_members_of_a_federation_are_known_without_noise_and_not_with_it(tmp_path):
    """More columns than people, labels by chance: what is learned is who was there."""
    rng = np.random.default_rng(0)
    lines = ["person,label," + ",".join(f"x{i}" for i in range(200))]
    for person in range(200):
        values = ",".join(f"{v:.3f}" for v in rng.normal(size=200))
        lines.append(f"p{person},{rng.integers(2)},{values}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    (tmp_path / "overfit.yaml").write_text(OVERFIT.format(path=tmp_path / "table.csv"))
    config = load_config(tmp_path / "overfit.yaml", [])
    told, (audit,) = participation(
        config, RootKey.from_seed(3), Console(quiet=True), membership=True
    )
    assert not audit.exceeds
    assert told["auc"]["without_privacy"] > 0.8 > told["auc"]["with_privacy"]
