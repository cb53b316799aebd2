"""Federated runs that share a key share no noise, and a run that goes on is the one that began."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import federated_epsilon
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.engine import OptimizerServer
from dpfl_jax.federation.federated import run_rounds
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import SiloMechanism, local_item
from dpfl_jax.federation.participation import PersonalRecords, SiloFacts
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.sampling import Poisson

N, SIGMA, CLIP = 6, 1.3, 1.0


def make_data(shift=0.0):
    x = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    x[0] += shift
    return FederatedData.from_assignment(
        ArrayRecords({"x": x}), np.arange(N), np.zeros(N, np.int64), 1
    )


def linear(params, record):
    return jnp.vdot(params["w"], record["x"])


def plan(data, rounds=1, **changes):
    sigma = changes.pop("noise_multiplier", SIGMA)
    options = {"sampling_prob": 1.0, "clip_norm": CLIP} | changes
    facts = SiloFacts.of(data.silos[0])
    silo = SiloPlan(local_item(**options), facts, 1, noise_multiplier=sigma)
    return Federation((silo,), rounds, 1)


def arguments(data=None, rounds=1, **changes):
    data = make_data() if data is None else data
    server = changes.pop("server", OptimizerServer())
    loss_fn, start = changes.pop("loss_fn", linear), changes.pop("start", 0.0)
    delta = changes.pop("delta", 1e-3)
    return {
        "loss_fn": loss_fn,
        "params": {"w": jnp.full(4, start)},
        "data": data,
        "federation": plan(data, rounds, **changes),
        "local_optimizer": optax.sgd(1.0),
        "delta": delta,
        "server": server,
        "show_spent": False,
    }


CHANGES = {
    "data": {"data": make_data(shift=5.0)},
    "mechanism.clip_norm": {"clip_norm": 0.5},
    "noise_multipliers": {"noise_multiplier": 2.0},
    "delta": {"delta": 1e-4},
    "the loss": {"loss_fn": lambda p, r: 2.0 * linear(p, r)},
    "start": {"start": 1.0},
}


def noise_of(key, **changes):
    """What the only silo's only step added to its clipped sum, over its standard deviation."""
    given = arguments(**changes)
    mechanism = given["federation"].mechanism
    result = run_rounds(**given, key=key)
    moved = np.asarray(result.params["w"], np.float64) - np.asarray(given["params"]["w"])
    x = given["data"].read(np.arange(N))["x"].astype(np.float64)
    x = x * (2.0 if "loss_fn" in changes else 1.0)
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    clean = (x * np.minimum(1.0, mechanism.clip_norm / norm)).sum(0)
    divisor = mechanism.participation.divisor(given["federation"].silos[0].facts)
    return (-moved * divisor - clean) / (given["federation"].silos[0].sigma * mechanism.clip_norm)


@pytest.mark.slow
def test_two_runs_with_one_secret_key_share_no_noise():
    key = RootKey.generate()
    first = noise_of(key)
    # 28 numbers of a standard normal distribution: beyond 6 with probability 1e-7.
    assert np.abs(first).max() < 6
    for name, change in CHANGES.items():
        other = noise_of(key, **change)
        assert np.abs(other).max() < 6, name
        # Two independent normals lie within 1e-4 of each other with probability 6e-5.
        assert np.abs(first - other).min() > 1e-4, name
    np.testing.assert_allclose(noise_of(key), first, atol=1e-5)  # the same run is the same run


@pytest.mark.slow
def test_a_continued_run_is_held_against_what_ran(tmp_path):
    directory = RunDirectory(tmp_path / "run", {}, None)
    run_rounds(**arguments(), run_dir=directory)
    for name in sorted(set(CHANGES) - {"start"}):
        words = "training data" if name == "data" else name
        with pytest.raises(BadInputError, match=f"(?s){words}.*start another run"):
            run_rounds(**arguments(**CHANGES[name]), run_dir=directory)
    with pytest.raises(BadInputError, match="rounds is 2, but the run in"):
        run_rounds(**arguments(rounds=2), run_dir=directory)
    assert run_rounds(**arguments(), run_dir=directory).steps == 1
    directory.close()


def test_the_records_themselves_are_part_of_the_fingerprint():
    assert make_data().fingerprint == make_data().fingerprint
    assert make_data().fingerprint != make_data(shift=5.0).fingerprint


@dataclasses.dataclass(frozen=True)
class Extrapolating(OptimizerServer):
    """Sends out more than its model: as accelerated methods do."""

    factor: float = 0.0

    def broadcast(self, state):
        return jax.tree.map(lambda p: p * (1 + self.factor), state["params"])


@pytest.mark.slow
def test_servers_and_kept_states_are_part_of_a_run(tmp_path):
    key, moved = RootKey.generate(), {}
    for factor in (0.0, 0.9):
        given = arguments(rounds=2, server=Extrapolating(factor=factor))
        moved[factor] = np.asarray(run_rounds(**given, key=key).params["w"])
    for keep in (False, True):
        given = arguments(rounds=2) | {"keep_local_state": keep}
        moved[keep, "kept"] = np.asarray(run_rounds(**given, key=key).params["w"])
    # The gradient is that of a linear loss, the same everywhere: all that differs is the noise.
    for (a, first), (b, second) in itertools.combinations(moved.items(), 2):
        assert np.abs(first - second).min() > 1e-5, (a, b)
    directory = RunDirectory(tmp_path / "run", {}, None)
    run_rounds(**arguments(), run_dir=directory)
    with pytest.raises(BadInputError, match="keep_local_state is True, but the run in"):
        run_rounds(**arguments() | {"keep_local_state": True}, run_dir=directory)
    directory.close()


@pytest.mark.slow
def test_records_changed_in_place_are_other_data():
    data, key = make_data(), RootKey.generate()
    given = arguments(data=data)

    def moved():
        return np.asarray(run_rounds(**given, key=key).params["w"])

    before = moved()
    np.testing.assert_array_equal(moved(), before)
    data.records.arrays["x"][0] += 0.25
    # Clipped, the record moves the sum by less than 2; the noise is drawn anew.
    assert np.abs(moved() - before).min() > 1e-4
    assert np.abs(moved() - before).max() > 1e-2


def test_a_subject_whose_records_lie_apart_is_refused():
    with pytest.raises(BadInputError, match="not sorted by subject"):
        FederatedData(
            ArrayRecords({"x": np.zeros((4, 1))}),
            order=np.arange(4),
            subjects=np.array([0, 1, 0, 1]),
            silo_offsets=np.array([0, 4]),
            num_subjects=2,
        )
    FederatedData(
        ArrayRecords({"x": np.zeros((4, 1))}),
        order=np.arange(4),
        subjects=np.array([0, 1, 0, 1]),
        silo_offsets=np.array([0, 2, 2, 4]),
        num_subjects=2,
    )


def test_rates_are_accounted_for_what_runs():
    """Participation, local steps and noise of the accounting are those of the federation."""
    facts = SiloFacts(10, 10)

    def federation(setting, steps=2, cohort=None):
        drawn = PersonalRecords(setting=setting)
        mechanism = SiloMechanism(participation=drawn)
        return Federation((SiloPlan(mechanism, facts, steps, 1.0, 1.0),) * 2, 5, 1, cohort)

    setting = TwoStage(1.0, 2, 5, 0.5, 1e-5)
    half = Poisson(0.5)
    assert federated_epsilon(federation(setting, cohort=half), 1e-5) > 0
    for made in (
        federation(setting),
        federation(setting, steps=4, cohort=half),
        federation(dataclasses.replace(setting, noise_multiplier=2.0), cohort=half),
    ):
        with pytest.raises(BadInputError, match="rates were made for"):
            federated_epsilon(made, 1e-5)
