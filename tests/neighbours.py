"""Removing a unit from a buffer, for tests of sensitivity."""

import jax
import numpy as np


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
