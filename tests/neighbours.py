"""Removing a unit from a buffer, for tests of sensitivity."""

import jax
import numpy as np

from dpfl_jax.data import ArrayStore


def removed(units, mask, where):
    """``units`` and ``mask`` without one unit: left out, and other data in its place.

    A mask alone would show nothing of a program in which units mix: the data of the unit would
    still be computed on.

    Args:
      units: pytree of arrays [*mask.shape, ...].
      mask: bool array, True for real units.
      where: index of the unit, an int or a tuple.
    """
    rng = np.random.default_rng(0)

    def other(x):
        x = np.array(x)
        # Floats far from what was there; anything else (tokens) from what is there, in disorder.
        if np.issubdtype(x.dtype, np.floating):
            x[where] = (3 * rng.normal(size=x[where].shape) - 2 * x[where]).astype(x.dtype)
        else:
            x[where] = rng.choice(x.ravel(), size=x[where].shape)
        return x

    mask = np.array(mask)
    mask[where] = False
    return jax.tree.map(other, units), mask


def people(users, last=None):
    """A store of users with two rows of four numbers, "x"; and its neighbours.

    Args:
      users: how many.
      last: None, or what the rows of the store's last user are full of; 0: that one is removed.
    """
    rng = np.random.default_rng(0)
    rows = {f"u{u:03d}": {"x": np.float32(rng.normal(size=(2, 4)))} for u in range(users)}
    made = ArrayStore.from_users(rows.items())
    if last is None:
        return made
    name = made.user_ids(np.array([users - 1]))[0]
    rows |= {name: {"x": np.full((2, 4), last, np.float32)}}
    if not last:
        del rows[name]
    return ArrayStore.from_users(rows.items())
