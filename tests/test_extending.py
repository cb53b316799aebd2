"""A mechanism is one file: a central and a federated one, defined here and nowhere else.

docs/extending.md walks through them. Both are trained from YAML, stopped, resumed and charged.
"""

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest
import yaml
from runs import death_after_a_checkpoint

from dpfl_jax.accounting.cells import Contribution, Everyone
from dpfl_jax.cli.main import main
from dpfl_jax.federation.mechanisms import SiloMechanism
from dpfl_jax.mechanisms import Mechanism, Population, mean_of_examples
from dpfl_jax.sampling import Poisson, UserSampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryUser(Mechanism):
    """All users in every step, each with up to ``group_size`` examples: no amplification.

    g = (sum over all users of clip(g_u, C) + N(0, (C sigma)^2)) / num_users
    """

    group_size: int
    num_users: int

    kind: ClassVar[str] = "every_user"

    @property
    def divisor(self) -> float:
        return float(self.num_users)

    @property
    def unit_examples(self) -> int:
        return self.group_size

    def population(self, user_offsets: np.ndarray) -> Population:
        users = len(user_offsets) - 1
        return Population(users, int(user_offsets[-1] - user_offsets[0]), users)

    def sampling_probability(self, population: Population) -> float:
        return 1.0

    def scheme(self, population):
        return Poisson(1.0)

    def sampler(self, user_offsets, key):
        scheme = self.scheme(self.population(user_offsets))
        return UserSampler(scheme, np.asarray(user_offsets), self.group_size, key)

    def unit_loss(self, loss_fn):
        return mean_of_examples(loss_fn)

    def units(self, examples, example_mask):
        return {"examples": examples, "mask": example_mask}

    def told_sampling(self, population: Population) -> str:
        return "all users at each step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeSilo(SiloMechanism):
    """Every record in every local step; a subject of K records moves the sum by up to K C."""

    sampling_prob: float | None = 1.0
    kind: ClassVar[str] = "whole_silo"

    def select(self, silo, key, step):
        return np.arange(silo.num_records)

    def scheme(self, facts):
        return Everyone()

    def contribution(self, unit):
        return Contribution(self.max_items_per_subject)


CONFIGS = {
    "every_user": {
        "data": {
            "source": "python_source",
            "seq_len": 16,
            "max_users": 30,
            "max_examples_per_user": 4,
            "validation_fraction": 0.0,
            "test_fraction": 0.0,
        },
        "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
        "mechanism": {"kind": "every_user", "group_size": 2, "num_users": 30},
        "train": {"steps": 4, "checkpoint_every": 2},
    },
    "whole_silo": {
        "data": {"source": "digits", "records_per_user": 6},
        "federation": {"silos": 3, "rounds": 4, "local_steps": 1},
        "model": {"kind": "mlp", "options": {"hidden": [4]}},
        "mechanism": {"kind": "whole_silo", "max_items_per_subject": 2},
        "train": {"checkpoint_every": 2},
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_mechanism_is_one_file(kind, tmp_path, capsys, monkeypatch):
    if kind == "whole_silo":
        pytest.importorskip("sklearn")
    ledger = {"ledger": "spent.jsonl", "account": "people", "budget": 9.0}
    config = CONFIGS[kind] | {"privacy": {"epsilon": 8.0, "delta": 1e-4, **ledger}}
    file, run_dir = tmp_path / "own.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(config))
    command = ["train", str(file), "--json", "--run-dir", str(run_dir)]

    with death_after_a_checkpoint(monkeypatch):
        main(command)
    assert not (run_dir / "report.json").exists()
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["status"], report["steps"]) == ("finished", 4)
    assert report["mechanism"]["kind"] == kind
    assert report["privacy"]["unit"] == ("user" if kind == "every_user" else "subject")
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    units = {r["step"]: r["outside_guarantee"]["units"] for r in rows if "eval" not in r}
    assert list(units) == [1, 2, 3, 4]
    assert len(set(units.values())) == 1  # everybody, in every step
    spent = [json.loads(line) for line in (tmp_path / "spent.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in spent] == ["reserve", "commit"]
    assert main([*command[:-1], str(tmp_path / "again")]) == 2
    assert "beyond the budget of 9" in capsys.readouterr().err
