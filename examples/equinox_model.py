"""An Equinox model for regression, of which only the last layer is trained."""

from __future__ import annotations

import equinox as eqx
import jax
import numpy as np
import optax

import dpfl_jax as dpfl


def people(count: int, seed: int) -> dpfl.ArrayStore:
    """Invented people with one to three rows each."""
    rng, slope = np.random.default_rng(seed), np.linspace(-1, 1, 6)
    rows = [rng.normal(size=(1 + i % 3, 6)).astype(np.float32) for i in range(count)]
    return dpfl.ArrayStore.from_users(
        (f"person {i}", {"x": x, "label": (x @ slope).astype(np.float32)})
        for i, x in enumerate(rows)
    )


def main(count: int = 1000, steps: int = 60) -> dpfl.FitResult:
    """Trains, and prints how well and how privately."""
    net = eqx.nn.MLP(6, 1, width_size=64, depth=1, key=jax.random.key(0))
    plan = dpfl.els(group_size=2, batch_size=count // 4).plan(
        people(count, 0), steps=steps, epsilon=4.0, delta=1e-4
    )
    result = dpfl.fit(
        "regression",  # a loss by name; or loss(net, example)
        net,
        plan,
        optax.adam(3e-2),
        validation=people(100, 1),
        trainable=lambda name: name.startswith("layers/1"),
    )
    for when, held_out in (("before", result.initial), ("after", result.final)):
        print(f"held-out loss {when}: {held_out.loss:.3f}" if held_out else when)
    print(result.guarantee)
    return result  # result.params is the trained module


if __name__ == "__main__":
    main()
