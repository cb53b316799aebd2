"""A participation is one file, and so are a noise strategy and a participation of silos.

docs/extending.md walks through them. All are trained from YAML, stopped, resumed and charged.
"""

import dataclasses
import json
import sys
from typing import ClassVar

import numpy as np
import pytest
import yaml
from neighbours import people
from runs import death_after_a_checkpoint

from dpfl_jax.accounting import epsilon, events
from dpfl_jax.accounting.cells import (
    TABLE,
    Cell,
    Everyone,
    Sensitivity,
    StrategyMatrix,
)
from dpfl_jax.audit import audit
from dpfl_jax.audit.attacks import simulate
from dpfl_jax.cli.account import ROWS, Row
from dpfl_jax.cli.main import main
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.federation.participation import SiloParticipation
from dpfl_jax.mechanisms import NoiseStrategy, Participation, Population
from dpfl_jax.mechanisms.participation import mean_of_examples
from dpfl_jax.noise import Noise, banded_inverse
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Cyclic, UserSampler
from dpfl_jax.sampling.schemes import SamplingScheme

# ---- a participation: a scheme, the cell that is proven of it, and what users have in a draw ---


@dataclasses.dataclass(frozen=True)
class HalfAtATime(SamplingScheme):
    """A coin of each unit's own decides, once, whether it takes part in even steps or in odd ones.

    In T steps a unit has at most ceil(T / 2): to whoever knows its coin these are as many
    Gaussians, and a mixture over the coin costs no more.
    """

    period: ClassVar[int] = 2
    is_stateful = True

    @property
    def rate(self):
        return 0.5

    def of_size(self, size, population, what):
        return self

    def describe(self, counted, unit, taken=""):
        return f"each of {counted} in all even steps or in all odd ones, by a coin, {taken}"

    def indices(self, key, step, population):
        return np.flatnonzero(key.numpy("halves").integers(2, size=population) == step % 2)


TABLE[HalfAtATime, "independent", None] = Cell(
    event=lambda sums: events.gaussian(sums.noise_multiplier, -(-sums.steps // 2)),
    accountant="PLD, Gaussians of half of the steps",
    proof="the docstring of HalfAtATime",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves(Participation):
    """Users in even or in odd steps, each with up to ``group_size`` examples."""

    group_size: int
    num_users: int

    kind: ClassVar[str] = "halves"

    @property
    def divisor(self):
        return self.num_users / 2

    @property
    def unit_examples(self):
        return self.group_size

    def population(self, user_offsets):
        users = len(user_offsets) - 1
        return Population(users, int(user_offsets[-1] - user_offsets[0]), users)

    def scheme_of(self, population):
        return HalfAtATime()

    def sampler(self, user_offsets, key):
        return UserSampler(HalfAtATime(), np.asarray(user_offsets), self.group_size, key)

    def unit_loss(self, loss_fn):
        return mean_of_examples(loss_fn)

    def units(self, examples, example_mask):
        return {"examples": examples, "mask": example_mask}

    def describe(self, population, more=""):
        examples = f"up to {self.group_size} examples of each{more}"
        return HalfAtATime().describe(f"{population.num_users} users", "user", examples)


# ---- a noise strategy ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fading(NoiseStrategy):
    """C is 1, f, f^2, ...: a step's noise less f times the noise of the step before it."""

    decay: float = 0.5

    kind: ClassVar[str] = "fading"

    @property
    def is_correlated(self):
        return True

    def matrix(self, steps):
        return StrategyMatrix(tuple(self.decay ** np.arange(steps)), "full")

    def transform(self, stddev, sensitivity, divisor):
        reach = sensitivity / (1 - self.decay**2) ** 0.5
        noise = Noise(stddev, reach, self.arithmetic, rows=64)
        return banded_inverse(noise, (self.decay,), divisor)


# ---- a silo's participation ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeSilo(SiloParticipation):
    """Every record in every local step; a subject of K records moves the sum by up to K C."""

    max_records_per_subject: int = 1

    kind: ClassVar[str] = "whole_silo"
    protected = "subject"
    has_fixed_sampling_prob = True

    def sampling_prob_of(self, facts):
        return 1.0

    def at_sampling_prob(self, sampling_prob, cap=None):
        return self if cap is None else dataclasses.replace(self, max_records_per_subject=cap)

    def select(self, silo, key, step):
        return np.arange(silo.num_records)

    def divisor(self, facts):
        return max(facts.num_records, 1)

    def scheme_of(self, facts, protected):
        return Everyone()

    def contribution(self, protected):
        return Sensitivity(self.max_records_per_subject)


TEXTS = {
    "data": {
        "source": "python_source",
        "seq_len": 16,
        "max_users": 30,
        "max_examples_per_user": 4,
        "validation_fraction": 0.0,
        "test_fraction": 0.0,
    },
    "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
    "train": {"steps": 4, "checkpoint_every": 2},
}
CONFIGS = {
    "halves": TEXTS
    | {"mechanism": {"participation": {"kind": "halves", "group_size": 2, "num_users": 30}}},
    "fading": TEXTS
    | {
        "mechanism": {
            "participation": {
                "kind": "users",
                "group_size": 2,
                "cohort_size": 15,
                "scheme": {"kind": "cyclic"},
            },
            "noise": {"kind": "fading", "decay": 0.25},
        }
    },
    "whole_silo": {
        "data": {"source": "digits", "records_per_user": 6},
        "federation": {"silos": 3, "rounds": 4, "local_steps": 1},
        "model": {"kind": "mlp", "options": {"hidden": [4]}},
        "mechanism": {"participation": {"kind": "whole_silo", "max_records_per_subject": 2}},
        "train": {"checkpoint_every": 2},
    },
}


@pytest.mark.slow
@pytest.mark.nightly("whole_silo")
@pytest.mark.parametrize("kind", CONFIGS)
def test_one_file_is_all_it_takes(kind, tmp_path, capsys, monkeypatch):
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
    assert kind in json.dumps(report["mechanism"])
    assert report["privacy"]["unit"] == ("subject" if kind == "whole_silo" else "user")
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    units = {r["step"]: r["outside_guarantee"]["units"] for r in rows if "eval" not in r}
    assert list(units) == [1, 2, 3, 4]
    if kind == "halves":
        assert (units[1], units[2]) == (units[3], units[4])
        assert units[1] + units[2] == 30
    spent = [json.loads(line) for line in (tmp_path / "spent.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in spent] == ["reserve", "commit"]
    assert main([*command[:-1], str(tmp_path / "again")]) == 2
    assert "beyond the budget of 9" in capsys.readouterr().err
    assert main(["verify", str(run_dir)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["halves", "fading"])
def test_audits_attack_them_as_all_others(kind):
    mechanism = CENTRAL.parse(CONFIGS[kind]["mechanism"])
    population = Population(30, 60, 30)
    made = mechanism.calibrate(population, 4, epsilon=4.0, delta=1e-5)
    key = RootKey.from_seed(0)
    found = audit(simulate.central(made, key, trials=4000), 0.999)
    assert not found.exceeds, str(found)


def test_what_is_not_proven_is_refused():
    section = {"participation": {"kind": "halves", "group_size": 2, "num_users": 30}}
    mechanism = CENTRAL.parse(section | {"noise": {"kind": "fading"}})
    with pytest.raises(ValueError, match="nothing is proven of HalfAtATime sampling with full"):
        mechanism.calibrate(Population(30, 60, 30), 4, epsilon=4.0, delta=1e-5)
    # Before anything is trained, where the noise is given, too.
    with pytest.raises(ValueError, match="nothing is proven of HalfAtATime sampling with full"):
        mechanism.plan(people(30), steps=4, noise_multiplier=2.0, delta=1e-5)


@pytest.mark.parametrize(("kind", "options"), [("halves", ""), ("fading", "--period 2")])
def test_an_account_is_one_row(kind, options, monkeypatch, capsys):
    def fading(steps: int, separation: int, *, decay: float = 0.25) -> StrategyMatrix:
        return Fading(decay=decay).matrix(steps)

    monkeypatch.setitem(ROWS, "halves", Row("half of the users at a time", "user", HalfAtATime))
    monkeypatch.setitem(ROWS, "fading", Row("fading noise", "user", Cyclic, matrix=fading))
    given = ["--noise-multiplier", "3", "--delta", "1e-4", "--steps", "4", *options.split()]
    assert main(["account", kind, *given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    population = Population(30, 60, 30)
    mechanism = CENTRAL.parse(CONFIGS[kind]["mechanism"])
    event = mechanism.calibrate(population, 4, noise_multiplier=3.0).event()
    assert told["epsilon"] == pytest.approx(epsilon(event, 1e-4), rel=1e-9)
    assert told["solved_for"] == "epsilon"


def test_parts_that_are_code_are_imported_where_that_is_allowed(tmp_path, monkeypatch):
    from dpfl_jax.config import load_config

    section = CONFIGS["fading"]["mechanism"] | {"noise": {"kind": f"{__name__}:Fading"}}
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(TEXTS | {"mechanism": section, "privacy": {"epsilon": 1.0}}))
    with pytest.raises(ValueError, match=r"mechanism\.noise\.kind is .*, code that would be run"):
        load_config(file)
    assert __name__ in sys.modules
    assert load_config(file, allow_code=True).mechanism.noise == Fading()
