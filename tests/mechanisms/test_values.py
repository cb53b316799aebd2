"""What a mechanism is must follow from its parts alone, and another one draws other noise."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import optax
import pytest
from neighbours import people
from runs import DiedError

import dpfl_jax as dpfl
from dpfl_jax.clipping import Adaptive, Flat
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.errors import BadInputError
from dpfl_jax.experimental import individual
from dpfl_jax.mechanisms import (
    Calibrated,
    Examples,
    Independent,
    Mechanism,
    Population,
    els,
    uls,
)
from dpfl_jax.planning.candidates import at_budget
from dpfl_jax.planning.selection import RunCount, Selection
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Cyclic, CyclicPoisson, TruncatedPoisson
from dpfl_jax.training.central_statement import parse_calibrated

SIZES = {"group_size": 2, "cohort_size": 5}


def test_a_cell_of_a_private_sweep_runs_with_its_own_noise():
    """Two cells of one mechanism, of texts that are cut into more or fewer examples."""
    mechanism = els(group_size=8, batch_size=32)
    many, few = (
        Calibrated(mechanism, 1.0, Population(100, units, units), 100, 1e-5)
        for units in (4000, 640)
    )
    made = Selection.calibrated([many, few], RunCount(3.0), 3.0, 50, epsilon=4.0, delta=1e-5)
    loud, quiet = made.noised(few), made.noised(many)
    assert loud.noise_multiplier > 1.5 * quiet.noise_multiplier
    other = dataclasses.replace(few, population=Population(100, 641, 641))
    with pytest.raises(BadInputError, match="have changed since the noise"):
        made.noised(other)


@dataclasses.dataclass(frozen=True)
class Tenth(Flat):
    @property
    def sensitivity(self):
        return 0.1 * self.clip_norm


def test_a_part_that_extends_another_does_not_go_by_its_name():
    for make in (uls, individual):
        with pytest.raises(BadInputError, match=r"clip is Tenth.*must be one of adaptive"):
            make(**SIZES, clip=Tenth(1.0))


def noise_of(otherwise):
    """A strategy of one's own, written anew in the same place, as in a notebook."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(Independent):
        kind: ClassVar[str] = "mine_written_anew"

        if otherwise:

            @property
            def keys_per_step(self):
                return 1

    return Mine()


def test_a_part_that_is_written_anew_is_another_mechanism():
    plans = [
        dataclasses.replace(uls(**SIZES), noise=noise_of(otherwise)).plan(
            people(20), steps=2, noise_multiplier=1.0, delta=1e-3
        )
        for otherwise in (False, True, True)
    ]
    assert plans[0].stated == plans[1].stated
    assert plans[0].digest != plans[1].digest == plans[2].digest


def test_what_a_value_is_called_does_not_follow_from_what_else_is_registered():
    def before_all(*, group_size: int, cohort_size: float) -> Mechanism:
        return uls(group_size=group_size, cohort_size=cohort_size)

    made = uls(**SIZES)
    CENTRAL.register(before_all, "a_kind_before_all")
    try:
        assert dataclasses.replace(made).to_section() == made.to_section()
    finally:
        del CENTRAL._known["a_kind_before_all"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cyclic(True),
        lambda: CyclicPoisson(period=True),
        lambda: TruncatedPoisson(cap=True),
        lambda: TruncatedPoisson(cap=9.0),
        lambda: Adaptive(count_weight=1e38),
        lambda: Adaptive(clip_norm=1e30),
    ],
)
def test_numbers_that_would_be_other_ones_are_refused(make):
    with pytest.raises(BadInputError, match=r"must be|at most"):
        make()


def test_sizes_of_a_sweep_keep_the_clip_rule():
    chosen = uls(**SIZES, clip=Adaptive(quantile=0.25))
    assert at_budget(chosen, "uls", 64.0, 2).clip == chosen.clip
    assert at_budget(chosen, "els", 64.0, 2).clip == chosen.clip
    spelled_out = Mechanism(participation=Examples(batch_size=8, group_size=2, scheme=Cyclic(3)))
    with pytest.raises(BadInputError, match="name a preset"):
        at_budget(spelled_out, "uls", 64.0, 2)


def test_sections_of_two_versions_at_once_are_refused():
    section = {"kind": "allocation", **SIZES, "noise": "exact", "sampling_prob": 0.05}
    section["noise_multiplier"] = 1.0
    sizes = {"num_users": 100, "num_examples": 200, "num_units": 100}
    basis = {"mechanism": section, "population": sizes, "steps": 3}
    assert parse_calibrated(basis, 1e-5).scheme.period == 20
    with pytest.raises(BadInputError, match="has period and `noise`"):
        parse_calibrated(basis | {"mechanism": section | {"period": 40}}, 1e-5)


def test_a_key_under_its_name_of_today_and_of_before_is_refused():
    section = {"kind": "uls", "group_size": 1, "cohort_size": 2, "noise_multiplier": 1.0}
    stated = {"population": {"num_users": 9, "num_examples": 9, "num_units": 9}, "steps": 3}
    before = {**section, "local_learning_rate": 0.5, "local_epochs": 2}
    made = parse_calibrated({**stated, "mechanism": before}, 1e-5)
    assert made.mechanism.update.user_epochs == 2
    with pytest.raises(BadInputError, match="has a key twice, under two names"):
        parse_calibrated({**stated, "mechanism": {**before, "user_epochs": 1}}, 1e-5)


def test_a_plan_is_of_the_population_that_its_noise_is_for():
    """Fewer people would be drawn more often than the guarantee says."""
    made = uls(**SIZES).plan(people(20), steps=2, noise_multiplier=1.0, delta=1e-3)
    few = uls(**SIZES).plan(people(6), steps=2, noise_multiplier=1.0, delta=1e-3).data
    with pytest.raises(
        BadInputError, match=r"for 20 users.* hold 6 users.*stated guarantee would not hold"
    ):
        dataclasses.replace(made, data=few)
    object.__setattr__(made, "data", few)  # records of a user-defined store may change
    with pytest.raises(BadInputError, match=r"for 20 users.* hold 6 users"):
        made.sampler(RootKey.from_seed(0))


def test_a_run_does_not_resume_with_parts_written_anew(tmp_path):
    """What it released would be taken again with the same noise on other sums."""

    def dies(row):
        raise DiedError

    def run(otherwise, hooks=None):
        mechanism = dataclasses.replace(uls(**SIZES), noise=noise_of(otherwise))
        made = mechanism.plan(people(20), steps=2, noise_multiplier=1.0, delta=1e-3)
        options = {"run_dir": tmp_path / "run", "hooks": hooks}
        return dpfl.fit(lambda p, e: p @ e["x"], jnp.zeros(4), made, optax.sgd(0.1), **options)

    with pytest.raises(DiedError):
        run(False, dpfl.Hooks(on_step=dies))
    with pytest.raises(BadInputError, match=r"code of the mechanism's own parts.* not what"):
        run(True)
    assert run(False).steps == 2
