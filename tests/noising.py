"""What tests of correlated noise need: its keys, what it releases, and its matrices."""

import jax
import numpy as np

from dpfl_jax.randomness import RootKey

KEY = RootKey.from_seed(3)


def key_of(step):
    """As a plan's."""
    return np.concatenate([KEY.words("noise", step), np.uint32([step, 7, 9])])


def released(transform, sums, params, place=lambda tree: tree):
    """What is released of the sums of each step, and the state after."""
    state = transform.init(params)
    state = state._replace(memory=place(state.memory))
    update, rows = jax.jit(transform.update), []
    for step, total in enumerate(sums):
        key = key_of(step) if state.memory else KEY.words("noise", step)
        gradient, state = update(total, state, params, noise_key=key)
        rows.append(gradient)
    return rows, state


def banded_matrix(column, steps):
    """C of the bands, entry by entry."""
    return sum(np.diag(np.full(steps - i, c), -i) for i, c in enumerate(column))


def buffered_matrix(buffers, steps):
    """C of the buffers, entry by entry."""
    made = np.eye(steps)
    for i in range(steps):
        for j in range(i):
            made[i, j] = sum(w * d ** (i - j - 1) for d, w in zip(*buffers, strict=True))
    return made


def inverse_banded_matrix(taken, steps):
    """C whose inverse has these bands, entry by entry."""
    return np.linalg.inv(banded_matrix((1.0, *(-f for f in taken))[:steps], steps))


class Recorded:
    """Noise that adds none, and keeps what it was to be added to."""

    def __init__(self):
        self.rows = []

    def add(self, key, tree, rest):
        del key
        self.rows.append(np.asarray(tree["w"], float) + np.asarray(rest["w"], float))
        return tree


class Silent:
    """Noise that adds none: what is noised is read from the state."""

    def add(self, key, tree, rest):
        del key, rest
        return tree
