"""What a run says of its speed: waiting for input, time in steps, use of the devices."""

import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.clipping.cost import PEAK, peak_flops
from dpfl_jax.run import driver
from dpfl_jax.training.central import CentralSteps

ROWS = {"x": np.ones((96, 8), np.float32)}
DATA = dpfl.from_arrays(ROWS, np.arange(96) // 3)
PEAK_HERE = 1e4


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", PEAK["v5e"]),
        ("TPU v5p", PEAK["v5p"]),
        ("TPU v5", PEAK["v5p"]),
        ("TPU v6 lite", PEAK["v6e"]),
        ("TPU v3", PEAK["v3"] / 2),  # two devices a chip
        ("NVIDIA A100-SXM4-40GB", PEAK["a100"]),
        ("NVIDIA H100 80GB HBM3", PEAK["h100"]),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_its_kind(kind, peak):
    assert peak_flops(kind) == peak


def test_a_run_says_how_well_it_uses_the_devices(monkeypatch):
    monkeypatch.setattr(driver, "peak_flops", lambda kind: PEAK_HERE)

    def loss(params, example):
        return jnp.sum((example["x"] @ params["w"] @ params["head"]) ** 2)

    plan = dpfl.uls(group_size=2, cohort_size=16).plan(DATA, steps=5, epsilon=8.0, delta=1e-3)
    rows, inputs = [], CentralSteps.inputs

    def late(steps):
        for step in inputs(steps):
            time.sleep(0.2)
            yield step

    monkeypatch.setattr(CentralSteps, "inputs", late)
    result = dpfl.fit(
        loss,
        {"w": jnp.ones((8, 4)), "head": jnp.ones((4, 2))},
        plan,
        optax.sgd(0.01),
        trainable=lambda name: name == "w",
        hooks=dpfl.Hooks(on_step=rows.append),
    )
    assert 0 < result.goodput < 1
    last = rows[-1]["outside_guarantee"]
    assert 0.5 < last["input_wait"] <= 1  # nearly all of a step is waiting
    assert last["seconds_per_step"] >= 0.2
    # A forward pass, as much backward, and as much for the trained share (32 of 40 numbers).
    flops = 2 * (8 * 4 + 4 * 2) * (2 + 32 / 40)
    speed = result.examples / result.seconds
    devices = plan.mesh.size
    assert result.mfu == pytest.approx(flops * speed / (devices * PEAK_HERE), abs=1e-4)
