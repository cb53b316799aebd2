"""The gradient of one use of a parameter, as a sum over positions of products of two factors.

Where a parameter W meets data, its gradient for one unit is ``g[a, b] = sum_k L[k, a] R[k, b]``,
with positions k (tokens, pixels, time steps), a left factor L from the forward pass, and a right
factor R from the gradient d of the output. A dense layer has L = x and R = d; a lookup has L =
one-hot(index); a convolution has L = windows (patches) of x. Axes have labels, so that all layouts,
stacked layers and weight sharing over time are handled alike, and two uses of one parameter can be
compared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from dpfl_jax.clipping.result import unit_where
from dpfl_jax.clipping.taps.trace import Site, embedding_axis

Label = Hashable
UNIT: Label = "unit"


@dataclasses.dataclass(frozen=True)
class Dense:
    """An array with a label for each axis."""

    array: jax.Array
    labels: tuple[Label, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def bits(self) -> int:
        """Bits of an entry, for estimates of memory."""
        return 8 * self.array.dtype.itemsize

    def squares(self) -> jax.Array:
        """Returns the squares of the entries, float32."""
        return jnp.square(self.array.astype(jnp.float32))

    def keep(self, units: jax.Array) -> Dense:
        """Returns the array with units outside ``units`` (bool [n]) set to zero."""
        return Dense(unit_where(units, self.array, self.labels.index(UNIT)), self.labels)

    def scaled(self, weights: jax.Array, units: jax.Array) -> Dense:
        """Returns the array times each unit's weight (float32 [n]); zero outside ``units``."""
        axis = self.labels.index(UNIT)
        shape = [1] * self.array.ndim
        shape[axis] = -1
        product = self.array.astype(weights.dtype) * weights.reshape(shape)
        # bfloat16 has the range of float32, so products are rounded back to it (`leaves.rounding`
        # accounts for that). float16 would underflow or overflow, so its products stay float32.
        if self.array.dtype == jnp.bfloat16:
            product = product.astype(jnp.bfloat16)
        if len(weights) == 1:
            # This changes no value, but without a comparison LLVM unrolls the outer product of one
            # unit's factors along an axis of 32, which takes 6 us instead of 1 at 784 x 32.
            product = jnp.where(self.array == 0, jnp.zeros((), product.dtype), product)
        return Dense(unit_where(units, product, axis), self.labels)


@dataclasses.dataclass(frozen=True)
class OneHot:
    """Rows that are 1 at ``indices`` along the axis ``hot`` of length ``size``, else 0.

    An index equal to ``size`` means a row of zeros.
    """

    indices: jax.Array
    labels: tuple[Label, ...]
    hot: Label
    size: int


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of the data that a kernel sees, not formed, because they are many times as large.

    Attributes:
      array: the data [*lead, *lhs].
      labels: labels of the axes of the windows that ``dense`` forms.
      site: the convolution.
      lead: number of leading axes of loops and units.
    """

    array: jax.Array
    labels: tuple[Label, ...]
    site: Site
    lead: int

    @property
    def bits(self) -> int:
        """Bits of an entry, for estimates of memory."""
        return 8 * self.array.dtype.itemsize

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the windows."""
        return tuple(jax.eval_shape(lambda x: self.on(x).dense().array, self.array).shape)

    def on(self, array: jax.Array) -> Windows:
        """Returns these windows of another array."""
        return Windows(array, self.labels, self.site, self.lead)

    def keep(self, units: jax.Array) -> Windows:
        """Returns the windows with units outside ``units`` (bool [n]) set to zero."""
        return self.on(unit_where(units, self.array, self.labels.index(UNIT)))

    def dense(self, positions_last: bool = False) -> Dense:
        """Forms the windows.

        Args:
          positions_last: whether positions are the last axes, so that a product over them reads
            memory in order, which on a CPU takes two thirds of the time. False: the data's order.
        """
        array, labels, feature = self.array, list(self.labels), self.feature
        places = list(self.site.params["dimension_numbers"].lhs_spec[2:])
        if positions_last:
            at, kernel = self.lead + feature, len(places) + 2
            array = jnp.moveaxis(array, at, self.lead)
            labels[self.lead : at + kernel] = [
                *labels[at : at + kernel],
                *labels[self.lead : at],
            ]
            places = [p + 1 if p < feature else p for p in places]
            feature = 0
        windows = _windows(self.site, array, [self.lead + p for p in places], self.lead + feature)
        # Channels are in groups: the outputs of a group see only its inputs.
        at = self.lead + feature + len(places)
        groups, shape = self.site.params["feature_group_count"], windows.shape
        split = (groups, shape[at] // groups)
        return Dense(windows.reshape(*shape[:at], *split, *shape[at + 1 :]), tuple(labels))

    @property
    def feature(self) -> int:
        """Index of the data's axis of channels, without the leading axes."""
        return self.site.params["dimension_numbers"].lhs_spec[1]

    def squares(self) -> jax.Array:
        """Returns the squares of the windows, float32, summed over the channels of each group."""
        at, shape = self.lead + self.feature, self.array.shape
        groups = self.site.params["feature_group_count"]
        split = self.array.reshape(*shape[:at], groups, shape[at] // groups, *shape[at + 1 :])
        return self.on(jnp.square(split.astype(jnp.float32)).sum(at + 1)).dense().array


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two factors of one use's gradient.

    Attributes:
      left: the factor from the data.
      right: the factor from the output's gradient; if it has no labels of positions, it is equal at
        all positions.
      positions: labels that are summed over.
      coordinates: labels of the view's gradient, in the order of its axes (stacked axes first).
      shape: shape of the view's gradient (its axes may split into several coordinates).
      scale: factor of the leaf's gradient.
      site: the use.
    """

    left: Dense | OneHot | Windows
    right: Dense
    positions: tuple[Label, ...]
    coordinates: tuple[Label, ...]
    shape: tuple[int, ...]
    scale: float
    site: Site


def precision_of(site: Site) -> jax.lax.Precision | None:
    """Returns the precision that the loss sets for this product; None: JAX's default."""
    asked = site.params.get("precision")
    if isinstance(asked, tuple):
        asked = asked[0]
    return asked if isinstance(asked, jax.lax.Precision) else None


def einsum(
    operands: Sequence[Dense],
    out: Sequence[Label],
    precision: jax.lax.Precision | None,
    narrow: bool = False,
) -> jax.Array:
    """Returns an einsum over labelled arrays, accumulated in float32.

    It is float32; if ``narrow``, bfloat16 operands give bfloat16, which is never written in more.
    """
    number: dict[Label, int] = {}
    axes = [[number.setdefault(label, len(number)) for label in x.labels] for x in operands]
    wanted = [number[label] for label in out]
    dtype = jnp.result_type(*[x.array for x in operands])

    def product(*arrays: jax.Array, dtype: jnp.dtype) -> jax.Array:
        arguments: list[object] = []
        for array, labels in zip(arrays, axes, strict=True):
            arguments += [array.astype(dtype), labels]
        kind = jnp.bfloat16 if narrow and dtype == jnp.bfloat16 else jnp.float32
        product = jnp.einsum(*arguments, wanted, precision=precision, preferred_element_type=kind)
        return product.astype(jnp.bfloat16 if narrow else jnp.float32)

    arrays = [x.array for x in operands]
    as_they_are = functools.partial(product, dtype=dtype)
    if dtype.itemsize >= 4:
        return as_they_are(*arrays)
    # On a CPU, not all of XLA's products take narrow operands for a float32 result. Casting first
    # is exact. The device is known only when the program is lowered.
    cast = functools.partial(product, dtype=jnp.dtype(jnp.float32))
    return jax.lax.platform_dependent(*arrays, cpu=cast, default=as_they_are)


def factorise(site: Site, operands: Sequence[jax.Array], gradient: jax.Array) -> Pair:
    """Returns the factors of a site's gradient.

    Args:
      site: one use of a parameter.
      operands: its other operands, each [lengths of loops..., n, *shape].
      gradient: the gradient of its output, [lengths of loops..., n, *shape].
    """
    view = site.view
    stacked = iter(view.stacked)
    loops = tuple(
        next(stacked) if sliced else ("time", site.index, j) for j, sliced in enumerate(view.loops)
    )
    lead = (*loops, UNIT)
    time = tuple(x for x, sliced in zip(loops, view.loops) if not sliced)
    lengths = tuple(n for n, sliced in zip(site.lengths, view.loops) if sliced)
    make = {
        "dot_general": _dot_general,
        "gather": _lookup,
        "dynamic_slice": _lookup,
        "conv_general_dilated": _convolution,
    }[site.primitive.name]
    left, right, positions, axes = make(site, operands, gradient, lead)
    return Pair(
        left=left,
        right=right,
        positions=(*time, *positions),
        coordinates=(*view.stacked, *axes),
        shape=(*lengths, *view.shape),
        scale=view.scale,
        site=site,
    )


_Parts = tuple[Dense | OneHot | Windows, Dense, tuple[Label, ...], tuple[Label, ...]]


def _dot_general(
    site: Site, operands: Sequence[jax.Array], d: jax.Array, lead: tuple[Label, ...]
) -> _Parts:
    (x,) = operands
    contract, batch = site.params["dimension_numbers"]
    mine, other = site.position, 1 - site.position
    view, rank = site.view, len(site.inputs[other].shape)
    labels: list[Label] = [("position", site.index, i) for i in range(rank)]
    for theirs, ours in zip(contract[other], contract[mine]):
        labels[theirs] = view.axes[ours]
    for theirs, ours in zip(batch[other], batch[mine]):
        labels[theirs] = view.axes[ours]
    used = (*contract[other], *batch[other])
    free = tuple(labels[i] for i in range(rank) if i not in used)
    kept = tuple(
        view.axes[i]
        for i in range(len(view.shape))
        if i not in contract[mine] and i not in batch[mine]
    )
    shared = tuple(view.axes[i] for i in batch[mine])
    out = (*shared, *free, *kept) if mine == 1 else (*shared, *kept, *free)
    return Dense(x, (*lead, *labels)), Dense(d, (*lead, *out)), free, view.axes


def _lookup(
    site: Site, operands: Sequence[jax.Array], d: jax.Array, lead: tuple[Label, ...]
) -> _Parts:
    view, numbers = site.view, site.params.get("dimension_numbers")
    axis = embedding_axis(site.inputs[0].shape, site.params)
    assert axis is not None
    size, mode = view.shape[axis], "CLIP"
    slices: Sequence[int] = range(len(view.shape))
    if numbers is None:  # dynamic_slice
        indices, collapsed = operands[axis], ()
    else:
        indices = operands[0][..., numbers.start_index_map.index(axis)]
        slices, collapsed = numbers.offset_dims, numbers.collapsed_slice_dims
        mode = str(site.params["mode"])
    if site.summed:  # one gradient for all positions: only the axes of slices remain
        slices = range(len(slices))
    if not collapsed:  # the looked-up axis remains with length one
        d = d.squeeze(len(lead) + slices[axis])
        slices = [i - (i > slices[axis]) for i in slices if i != slices[axis]]
    if jnp.iinfo(indices.dtype).bits < 32:  # too narrow to be compared with the size
        indices = indices.astype(jnp.int32)
    inside = (indices >= 0) & (indices < size)
    positions = tuple(("position", site.index, i) for i in range(indices.ndim - len(lead)))
    rest, places = iter(x for i, x in enumerate(view.axes) if i != axis), iter(positions)
    labels = [next(rest if i in slices else places) for i in range(d.ndim - len(lead))]
    hot = jnp.clip(indices, 0, size - 1)
    if "CLIP" not in mode and site.summed:
        hot = jnp.where(inside, hot, size)
    elif "CLIP" not in mode:  # an index out of range has no gradient, whatever was read
        shape = iter(indices.shape[len(lead) :])
        spread = [1 if i in slices else next(shape) for i in range(d.ndim - len(lead))]
        inside = inside.reshape(*indices.shape[: len(lead)], *spread)
        d = jnp.where(inside, d, jnp.zeros((), d.dtype))
    left = OneHot(hot, (*lead, *positions), hot=view.axes[axis], size=size)
    return left, Dense(d, (*lead, *labels)), positions, view.axes


def _convolution(
    site: Site, operands: Sequence[jax.Array], d: jax.Array, lead: tuple[Label, ...]
) -> _Parts:
    (x,) = operands
    view, params = site.view, site.params
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    out_axis, in_axis, *spatial = numbers.rhs_spec
    skip = len(lead)
    batch, feature, *places = numbers.lhs_spec
    group: Label = ("group", view.axes[out_axis])
    inner: Label = ("within group", view.axes[out_axis])
    left: list[Label] = [None] * len(site.inputs[0].shape)
    left[batch] = ("position", site.index, 0)
    for k, place in enumerate(places):
        left[place] = ("position", site.index, k + 1)
    left[feature : feature + 1] = [*(view.axes[k] for k in spatial), group, view.axes[in_axis]]

    out_batch, out_feature, *out_places = numbers.out_spec
    at = skip + out_feature
    d = d.reshape(*d.shape[:at], groups, d.shape[at] // groups, *d.shape[at + 1 :])
    right: list[Label] = [None] * len(site.out.shape)
    right[out_batch] = ("position", site.index, 0)
    for k, place in enumerate(out_places):
        right[place] = ("position", site.index, k + 1)
    right[out_feature : out_feature + 1] = [group, inner]

    coordinates: list[Label] = list(view.axes)
    coordinates[out_axis : out_axis + 1] = [group, inner]
    positions = tuple(("position", site.index, k) for k in range(len(places) + 1))
    windows = Windows(x, (*lead, *left), site, skip)
    return windows, Dense(d, (*lead, *right)), positions, tuple(coordinates)


def _windows(site: Site, x: jax.Array, places: Sequence[int], feature: int) -> jax.Array:
    """What each entry of the kernel sees at each position of the output.

    The kernel's spatial axes come before the channels, so that contiguous values are copied.

    Args:
      site: the convolution.
      x: its data, with leading axes.
      places: the spatial axes of ``x``.
      feature: the axis of channels of ``x``.
    """
    params, numbers = site.params, site.params["dimension_numbers"]
    kernel = [site.inputs[1].shape[i] for i in numbers.rhs_spec[2:]]
    outputs = [site.out.shape[i] for i in numbers.out_spec[2:]]
    config = [(0, 0, 0)] * x.ndim
    for place, (low, high), dilation in zip(places, params["padding"], params["lhs_dilation"]):
        config[place] = (low, high, dilation - 1)
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), config)
    ways = list(zip(places, kernel, params["rhs_dilation"], params["window_strides"], outputs))
    if len(ways) == 2 and max(kernel) <= _FUSED:
        return _in_one_pass(x, ways, feature)
    # Form windows axis by axis: data that two entries of the kernel share are copied once.
    for done, (place, *way) in enumerate(reversed(ways)):
        axis = place + done if place > feature else place
        x = jnp.stack(_shifted(x, axis, *way), axis=feature)
    return x


# The most arrays in a stack that XLA fuses on a CPU.
_FUSED = 8
_Way = tuple[int, int, int, int, int]  # a spatial axis, and the arguments of ``_shifted``


def _in_one_pass(x: jax.Array, ways: Sequence[_Way], feature: int) -> jax.Array:
    if not ways:
        return x
    (place, *way), *rest = ways
    cuts = [_in_one_pass(cut, rest, feature) for cut in _shifted(x, place, *way)]
    return jnp.stack(cuts, axis=feature)


def _shifted(
    x: jax.Array, axis: int, size: int, dilation: int, stride: int, count: int
) -> list[jax.Array]:
    """What each of the ``size`` entries of a kernel sees along an axis, at ``count`` positions."""
    starts = [k * dilation if count else 0 for k in range(size)]
    length = (count - 1) * stride + 1 if count else 0
    return [jax.lax.slice_in_dim(x, a, a + length, stride, axis=axis) for a in starts]


def formed(left: Dense | OneHot | Windows) -> Dense | OneHot:
    """Returns ``left``, with windows formed."""
    return left.dense() if isinstance(left, Windows) else left


def merge(pairs: Sequence[Pair]) -> Pair:
    """Joins uses of one parameter that differ only in their data, as positions of one use."""
    if len(pairs) == 1:
        return pairs[0]
    first = pairs[0]
    use: Label = ("use", first.site.index)

    def joined(sides: Sequence[Dense]) -> Dense:
        array = jnp.stack([side.array for side in sides], axis=-1)
        return Dense(array, (*sides[0].labels, use))

    right = joined([p.right for p in pairs])
    left: Dense | OneHot
    if isinstance(first.left, OneHot):
        hots = [p.left for p in pairs if isinstance(p.left, OneHot)]
        both = joined([Dense(h.indices, h.labels) for h in hots])
        left = OneHot(both.array, both.labels, first.left.hot, first.left.size)
    else:
        sides = [formed(p.left) for p in pairs]
        left = joined([side for side in sides if isinstance(side, Dense)])
    return dataclasses.replace(first, left=left, right=right, positions=(*first.positions, use))


def same_form(a: Site, b: Site) -> bool:
    """Returns whether ``merge`` may join two uses of one leaf."""

    def form(site: Site) -> tuple[object, ...]:
        view, inputs = site.view, [(v.shape, v.dtype) for v in site.inputs]
        equation = (site.primitive, str(site.params), site.summed, site.position, site.lengths)
        return *equation, inputs, view.axes, view.stacked, view.loops, view.cuts, view.scale

    return a.view.faithful and b.view.faithful and form(a) == form(b)
