"""Rows of a global array over many processes: which of them are this process's, and shipping them.

Imported by those who hold a mesh; JAX is imported only when something is shipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def local_columns(sharding: Any, size: int, axis: int) -> np.ndarray:
    """The indices along ``axis`` that the devices of this process hold, increasing.

    They need not be neighbours: a mesh follows the wires of a slice, not its hosts.

    Args:
      sharding: a ``jax.sharding.NamedSharding`` that splits ``axis`` alone.
      size: length of the axis, a multiple of its parts.
      axis: which one.
    """
    shape = (1,) * axis + (size,)
    indices = sharding.addressable_devices_indices_map(shape).values()
    spans = {index[axis].indices(size)[:2] for index in indices}
    return np.concatenate([np.arange(*span) for span in sorted(spans)])


def ship_columns(tree: Any, columns: np.ndarray, size: int, axis: int, sharding: Any) -> Any:
    """Makes global arrays from what each process holds of them.

    Args:
      tree: pytree of NumPy arrays whose ``axis`` has this process's columns.
      columns: from ``local_columns``.
      size: length of the axis in the global arrays.
      axis: which one.
      sharding: as given to ``local_columns``.
    """
    import jax

    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)  # all arrays in one call: small ones are many

    def one(local: np.ndarray) -> Any:
        def part(index: Any) -> np.ndarray:
            # The columns of one device are neighbours, and all of them are here.
            start, stop, _ = index[axis].indices(size)
            first = int(np.searchsorted(columns, start))
            return local[(slice(None),) * axis + (slice(first, first + stop - start),)]

        shape = (*local.shape[:axis], size, *local.shape[axis + 1 :])
        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(one, tree)
