"""What is said of noise and signal before training is what training then does."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from dpfl_jax.config import validate_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.federated import run_rounds
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.pipeline import Balance, advice, doubled, dry_run
from tests.federation.fed_zoo import MECHANISMS, make_data, make_federation
from tests.flower.studies import FEDERATED, ISRL, QUIET, study, write_tables


@pytest.mark.slow
def test_the_noise_is_as_large_as_it_is_said_to_be():
    """A loss without gradient: all that moves is noise, 4,000 coordinates of it (within 6 %)."""
    data = make_data(records=40, subjects=10, silos=3)
    federation = make_federation(data, MECHANISMS["hi_grad_avg"], rounds=3, weights=[1.0, 2.0, 0.5])
    params = {"w": jnp.zeros(4000)}
    found = run_rounds(
        loss_fn=lambda p, x: 0.0 * p["w"].sum(), params=params, data=data, federation=federation,
        local_optimizer=optax.sgd(1.0), delta=1e-3, key=RootKey.from_seed(1), show_spent=False,
    )  # fmt: skip
    balance = federation.balance(4000)
    moved = float(jnp.linalg.norm(found.params["w"]))
    # The norm of 4,000 Gaussians is within 1.1 % of its mean, one standard deviation.
    assert moved == pytest.approx(balance.noise * np.sqrt(3), rel=0.06)
    assert jax.tree.leaves(found.params)[0].shape == (4000,)


def test_the_balance_of_equal_silos_is_that_of_the_formula():
    data = make_data(records=60, subjects=20, silos=2)
    federation = make_federation(data, MECHANISMS["user_ldp"], rounds=5, uneven=False)
    sigma, clip = 0.8, 0.7
    found = federation.balance(100)
    assert found.signal == pytest.approx(2 * clip)  # two local steps
    assert found.noise == pytest.approx(np.sqrt(100 * 2 / 2) * sigma * clip)  # b = 1
    assert found.ratio == pytest.approx(found.noise / found.signal / np.sqrt(5))


def test_advice_is_the_first_value_that_would_do():
    swamped = Balance(noise=30.0, signal=1.0, rounds=100)

    def fails():
        raise BadInputError("no such noise")

    knobs = [
        ("a", [(1, lambda: swamped), (2, lambda: Balance(4.0, 1.0, 100)), (3, fails)]),
        ("b", [(1, fails)]),
    ]

    def would_be(changed):
        return changed

    (line,) = advice(swamped, knobs, would_be)
    assert "3 over all 100 rounds" in line
    assert "a=2 (0.4)" in line
    assert "b=" not in line
    assert "no single change" in advice(swamped, knobs[1:], would_be)[0]
    assert "warning" not in advice(Balance(9.0, 1.0, 100), fails, would_be)[0]
    knobs[0][1].insert(1, (1.5, lambda: Balance(7.5, 1.0, 100)))  # measured: such a run gets worse
    assert "a=2 (0.4)" in advice(swamped, knobs, would_be)[0]
    assert doubled(0.3, 1.0) == [0.6, 1.0]


@pytest.mark.parametrize("like", [FEDERATED, ISRL])
def test_what_is_advised_would_do(tmp_path, like):
    """The dry run of the advised configuration is not swamped any more."""
    write_tables(tmp_path)
    data = {"path": str(tmp_path / "all.csv")}
    change = {"privacy": {"epsilon": 0.4}, "model": {"kind": "mlp", "options": {"hidden": [60]}}}
    if like is ISRL:
        change = {"privacy": {"epsilon": 0.02}}
    raw = study(like, data=data, **change)
    console = Console(width=1000, record=True, file=io.StringIO())
    price = dry_run(validate_config(raw), console)
    assert price["noise_over_signal"]["over_a_run"] > 1
    line = next(x for x in console.export_text().splitlines() if "swamps" in x)
    advised = line.split("noise over signal then): ")[1].split(", ")
    for item in advised:
        key, value = item.split(" (")[0].split("=")
        section, name = key.split(".")
        if key == "mechanism.kind":
            continue
        part = {**raw[section], name: type(raw[section].get(name, 0.0))(float(value))}
        better = dry_run(validate_config({**raw, section: part}), QUIET)
        assert better["noise_over_signal"]["over_a_run"] <= 0.5
