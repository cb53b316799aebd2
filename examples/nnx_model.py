"""A Flax NNX classifier with dropout, each person protected."""

from __future__ import annotations

import jax
import numpy as np
import optax
from flax import nnx

import dpfl_jax as dpfl


class Net(nnx.Module):
    """Two layers; what it draws, it draws from the key it is given."""

    def __init__(self, features: int, classes: int) -> None:
        self.hidden = nnx.Linear(features, 32, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(32, classes, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """Logits [2] of one row [8]."""
        h = nnx.relu(self.hidden(x))
        if rng is not None:
            h = h * jax.random.bernoulli(rng, 0.9, h.shape) / 0.9
        return self.out(h)


def loss(net: Net, example: dict[str, jax.Array], rng: jax.Array | None = None) -> jax.Array:
    """Of one example. Training gives ``rng``, evaluation does not."""
    logits = net(example["x"], rng)
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


def people(count: int, seed: int) -> dpfl.ArrayStore:
    """Invented people with one to five rows each; the label is the sign of the first number."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(1 + i % 5, 8)).astype(np.float32) for i in range(count)]
    return dpfl.ArrayStore.from_users(
        (f"person {i}", {"x": x, "label": (x[:, 0] > 0).astype(np.int32)})
        for i, x in enumerate(rows)
    )


def main(count: int = 1000, steps: int = 60) -> dpfl.FitResult:
    """Trains, and prints how well and how privately."""
    plan = dpfl.uls(group_size=4, cohort_size=count // 5).plan(
        people(count, 0), steps=steps, epsilon=4.0, delta=1e-4
    )
    result = dpfl.fit(loss, Net(8, 2), plan, optax.adam(1e-2), validation=people(100, 1))
    for when, held_out in (("before", result.initial), ("after", result.final)):
        print(f"held-out loss {when}: {held_out.loss:.3f}" if held_out else when)
    print(result.guarantee)
    return result


if __name__ == "__main__":
    main()
