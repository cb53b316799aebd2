"""Handcrafted features of images, which help most if noise makes it costly to learn features.

A feature is a function of one example only, and nothing is learned or measured: the guarantee is
the same as for training on the images themselves (Tramèr & Boneh 2021, arXiv 2011.11660).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from dpfl_jax.data.owners import SharedStore
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import ArrayStore, Store
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.task import Task

_ROWS, _READ = 256, 4096  # images that are transformed, and that are read, at once
_GROUP = 3  # channels of a group, as in Tramèr & Boneh for MNIST


def scattering(images: Any, *, scales: int = 2, angles: int = 8) -> np.ndarray:
    """Returns scattering coefficients of orders 0 to 2 (Bruna & Mallat 2013).

    An image is convolved with oriented Morlet wavelets. Order 1 is the average of the modulus over
    ``2 ** scales`` pixels; order 2 does the same to the modulus, with wavelets of coarser scales. A
    shift by ``2 ** scales`` pixels shifts coefficients by one place, and small deformations change
    them little (Oyallon & Mallat 2015). Filters, padding and order of channels are Kymatio's
    (arXiv 1812.11214).

    Args:
      images: [n, height, width] or [n, height, width, colours], of more than ``2 ** scales`` pixels
        on a side.
      scales: number J of scales of wavelets.
      angles: number L of directions of wavelets.

    Returns:
      float32 [n, ceil(height / 2^J), ceil(width / 2^J), channels]; for each colour the average, J L
      channels of order 1 and L^2 J (J - 1) / 2 of order 2.

    Raises:
      BadInputError: the images have another shape, or are too small.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.data import scattering
      >>> scattering(np.zeros((2, 28, 28), "float32")).shape
      (2, 7, 7, 81)
    """
    import jax

    at_least("scattering: scales", scales, 1)
    at_least("scattering: angles", angles, 1)
    images, unit = np.asarray(images), 2**scales
    if images.ndim not in (3, 4) or min(images.shape[1:3]) <= unit:
        raise BadInputError(
            f"scattering takes images [height, width] or [height, width, colours] of more than "
            f"{unit} x {unit} pixels, but these have the shape {list(images.shape[1:])}"
        )
    transform = jax.jit(functools.partial(_transform, scales=scales, angles=angles))
    out = np.empty((len(images), *jax.eval_shape(transform, images).shape[1:]), np.float32)
    for low in range(0, len(images), _ROWS):
        part = images[low : low + _ROWS]
        # Parts of one size: the rounding of an image must not depend on the number of images.
        filled = np.zeros((_ROWS, *part.shape[1:]), part.dtype)
        filled[: len(part)] = part
        out[low : low + _ROWS] = np.asarray(transform(filled))[: len(part)]
    return out


def _transform(images: Any, scales: int, angles: int) -> Any:
    import jax.numpy as jnp

    x = jnp.moveaxis(images[..., None] if images.ndim == 3 else images, 3, 1)
    unit, lead = 2**scales, x.shape[:2]
    sizes = [-(-n // unit) * unit + 2 * unit for n in x.shape[2:]]
    room = [(unit, size - unit - n) for n, size in zip(x.shape[2:], sizes)]
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), *room), mode="reflect")
    wavelets = [_wavelets(sizes, j, angles) for j in range(scales)]

    def modulus(u: Any, at: int, j: int) -> Any:
        """|u * wavelets of scale j|; u lies on a grid of 2^at pixels, the result on one of 2^j."""
        filters = _folded(wavelets[j], 2**at) * 4**at
        product = jnp.fft.fft2(u)[..., None, :, :] * filters.astype(np.complex64)
        return jnp.abs(jnp.fft.ifft2(_folded(product, 2 ** (j - at))))

    def smooth(u: Any, at: int) -> Any:
        """Averages over 2^J pixels, one for each 2^J: [n, colours, channels, rows, columns]."""
        rows, columns = (_averages(size, unit, 2**at) for size in sizes)
        means = jnp.einsum("ri,...ij,cj->...rc", rows, u, columns)
        return means.reshape(*lead, math.prod(means.shape[2:-2]), *means.shape[-2:])

    first = [modulus(x, 0, j) for j in range(scales)]
    order1 = [smooth(u, j) for j, u in enumerate(first)]
    order2 = [
        smooth(modulus(first[j], j, k), k) for j in range(scales) for k in range(j + 1, scales)
    ]
    out = jnp.concatenate([smooth(x, 0), *order1, *order2], axis=2)
    return jnp.moveaxis(out.reshape(lead[0], lead[1] * out.shape[2], *out.shape[3:]), 1, -1)


def _folded(spectrum: Any, factor: int) -> Any:
    """The spectrum of every ``factor``-th place of a signal [..., height, width]."""
    *lead, height, width = spectrum.shape
    shape = (*lead, factor, height // factor, factor, width // factor)
    return spectrum.reshape(shape).mean((-4, -2))


def _wavelets(sizes: list[int], scale: int, angles: int) -> np.ndarray:
    """Spectra [L, height, width] of Morlet wavelets: waves under a Gaussian, of mean zero."""
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 4 / angles
    # Periodic: what crosses the border enters on the other side.
    turns = np.arange(-2, 2)[:, None]
    rows, columns = ((np.arange(n) + n * turns).reshape(-1) for n in sizes)
    spectra = []
    for angle in (angles // 2 + angles % 2 - 1 - np.arange(angles)) * np.pi / angles:
        along = rows[:, None] * np.cos(angle) + columns * np.sin(angle)
        across = columns * np.cos(angle) - rows[:, None] * np.sin(angle)
        bell = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
        wave, bell = (
            u.reshape(4, sizes[0], 4, sizes[1]).sum((0, 2)) * slant / (2 * np.pi * sigma**2)
            for u in (bell * np.exp(1j * frequency * along), bell)
        )
        spectra.append(np.fft.fft2(wave - wave.sum() / bell.sum() * bell))
    return np.array(spectra)


def _averages(size: int, unit: int, step: int) -> np.ndarray:
    """[places, size / step]: maps every ``step``-th pixel to Gaussian means at every ``unit``-th.

    The first and the last mean, which are in the padding, are left out.
    """
    sigma = 0.8 * unit / 2
    away = unit * np.arange(1, size // unit - 1)[:, None] - step * np.arange(size // step)
    turns = size * np.arange(-2, 3)[:, None, None]
    bell = np.exp(-((away + turns) ** 2) / (2 * sigma**2)).sum(0)
    return (bell * step / (np.sqrt(2 * np.pi) * sigma)).astype(np.float32)


def _group_norm(features: np.ndarray) -> np.ndarray:
    """Normalises groups of channels of each example to mean 0 and variance 1 (Wu & He 2018)."""
    n, height, width, channels = features.shape
    x = features.reshape(n, height, width, channels // _GROUP, _GROUP)
    mean, var = x.mean((1, 2, 4), keepdims=True), x.var((1, 2, 4), keepdims=True)
    return ((x - mean) / np.sqrt(var + 1e-5)).reshape(features.shape)


def with_features(store: Store, task: Task) -> tuple[Store, Task]:
    """Replaces the images of examples by normalised scattering coefficients.

    Each result depends only on its image: normalisation is over groups of channels within it.

    Raises:
      BadInputError: the examples are not images.
    """
    if not task.has_images:
        raise BadInputError(
            "data.features=scattering is for images, and these data are not images: remove it"
        )
    if isinstance(store, SharedStore):
        sets, task = with_features(store.sets, task)
        return SharedStore(sets), task
    count = store.num_examples
    for low in range(0, count, _READ):
        batch = store.read(np.arange(low, min(low + _READ, count)))
        batch["x"] = _group_norm(scattering(batch["x"]))
        if low == 0:
            schema = Schema.arrays(batch, leading_axis=True)
            records = np.empty(count, schema.record_dtype)
        records[low : low + _READ] = schema.pack(batch)
    records.flags.writeable = False
    ids = store.user_ids(range(store.num_users))
    shape = next(field.shape for field in schema.fields if field.name == "x")
    made = ArrayStore(schema, ids, store.user_offsets, records)
    return made, dataclasses.replace(task, input_shape=shape)
