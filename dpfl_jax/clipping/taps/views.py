"""Views of parameters: a parameter after linear operations on it alone, before it meets data.

A cast, transpose, reshape or slice of a parameter, or one layer's slice of a stacked parameter
inside a scan, is a view of that parameter. A ``View`` turns the gradient of the view into the
parameter's gradient. It also knows which of its axes is which axis of the parameter, so that uses
of one parameter in different forms (a tied embedding and head) can be compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from dpfl_jax.varying import axes_of, vary

# With a larger factor, squares of the view's gradient underflow where those of the parameter's do
# not, and the norm would be too small.
_LARGEST_SCALE = 2.0**16
# Equations that leave values unchanged (a cast's gradient is a cast).
TRANSPARENT = frozenset(
    {"convert_element_type", "copy", "copy_p", "name", "pvary", "pcast", "reduce_precision"}
)


@dataclasses.dataclass(frozen=True)
class View:
    """A value that is a linear function of one parameter leaf alone.

    Attributes:
      leaf: index of the leaf.
      shape: shape of the value, inside the enclosing loops.
      axes: a name for each axis; equal names mean one coordinate of the leaf.
      stacked: names of the axes that scans have sliced away, outermost first.
      loops: for each enclosing scan, outermost first: True if it slices this view (stacked
        layers), False if all iterations see the whole view (weight sharing over time).
      ops: operations from the leaf to the view, as (function, number of stacked axes it is mapped
        over).
      cuts: for each slice taken, (name of the axis, start, stop): which part of the leaf this is.
      scale: factor from the leaf's entries to the view's.
      faithful: whether the view is ``scale``, of ordinary size, times a rearrangement of entries of
        the leaf; if False, only ``to_leaf`` relates them.
    """

    leaf: int
    shape: tuple[int, ...]
    axes: tuple[Hashable, ...]
    stacked: tuple[Hashable, ...] = ()
    loops: tuple[bool, ...] = ()
    ops: tuple[tuple[Callable[[Any], Any], int], ...] = ()
    cuts: tuple[tuple[Hashable, int, int], ...] = ()
    scale: float = 1.0
    faithful: bool = True

    @classmethod
    def of_leaf(cls, leaf: int, shape: tuple[int, ...]) -> View:
        """Returns the view that is the leaf itself."""
        return cls(leaf, shape, tuple(("axis", i) for i in range(len(shape))))

    def then(
        self,
        function: Callable[[Any], Any],
        shape: tuple[int, ...],
        axes: tuple[Hashable, ...],
        scale: float = 1.0,
        faithful: bool = True,
        cuts: tuple[tuple[Hashable, int, int], ...] = (),
    ) -> View:
        """Returns the view after one more operation."""
        return dataclasses.replace(
            self,
            shape=shape,
            axes=axes,
            cuts=(*self.cuts, *cuts),
            ops=(*self.ops, (function, len(self.stacked))),
            scale=self.scale * scale,
            faithful=self.faithful and faithful,
        )

    def apart_from(self, other: View) -> bool:
        """Returns whether two views of one leaf certainly have no entry in common."""
        return any(
            a[0] == b[0] and (a[2] <= b[1] or b[2] <= a[1]) for a in self.cuts for b in other.cuts
        )

    def sliced_by_scan(self) -> View:
        """Returns this view inside the body of a scan over its first axis."""
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            axes=self.axes[1:],
            stacked=(*self.stacked, self.axes[0]),
            loops=(*self.loops, True),
        )

    def held_by_scan(self) -> View:
        """Returns this view inside the body of a scan that does not slice it."""
        return dataclasses.replace(self, loops=(*self.loops, False))

    def to_leaf(self, gradient: jax.Array, leaf_shape: tuple[int, ...]) -> jax.Array:
        """Returns the leaf's gradient, given the view's ([stacked..., *shape]), in its dtype."""
        if not self.ops:
            return gradient

        def forward(x: jax.Array) -> jax.Array:
            for function, depth in self.ops:
                for _ in range(depth):
                    function = jax.vmap(function)
                x = function(x)
            return x

        # Casts were skipped, so everything has the gradient's dtype, and no cast rounds.
        zeros = vary(jnp.zeros(leaf_shape, gradient.dtype), axes_of(jax.typeof(gradient)))
        return jax.vjp(forward, zeros)[1](gradient)[0]


def _regroup(
    axes: tuple[Hashable, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[Hashable, ...]:
    """Names of the axes after a reshape; axes that it does not change keep their names."""
    if 0 in old:  # the array is empty
        return tuple(("reshape", (axes, new), k) for k in range(len(new)))
    out: list[Hashable] = []
    i = j = 0
    while j < len(new):
        if i < len(old) and old[i] == new[j]:
            out.append(axes[i])
            i, j = i + 1, j + 1
            continue
        if new[j] == 1:
            out.append(("one", axes, j))
            j += 1
            continue
        if i < len(old) and old[i] == 1:
            i += 1
            continue
        start_i, start_j = i, j
        have, want = old[i], new[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have *= old[i]
                i += 1
            else:
                want *= new[j]
                j += 1
        group = (axes[start_i:i], new[start_j:j])
        out.extend(("reshape", group, k) for k in range(j - start_j))
    return tuple(out)


def extend_view(view: View, eqn: Any) -> list[View] | None:
    """Returns the views that an equation makes of ``view``, or None if its outputs are not views.

    ``view`` must be the equation's only input that depends on parameters.
    """
    name, params = eqn.primitive.name, eqn.params
    shapes = [tuple(v.aval.shape) for v in eqn.outvars]
    bind = _Bind(eqn.primitive, params)
    if not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars):
        return None
    if name in TRANSPARENT:
        return [view]
    if name == "transpose":
        return [view.then(bind, shapes[0], tuple(view.axes[i] for i in params["permutation"]))]
    if name in ("reshape", "squeeze", "expand_dims"):
        if name == "reshape" and params.get("dimensions") is not None:
            return None
        return [view.then(bind, shapes[0], _regroup(view.axes, view.shape, shapes[0]))]
    if name == "broadcast_in_dim":
        if len(eqn.invars) != 1:
            return None
        if math.prod(shapes[0]) == math.prod(view.shape):
            return [view.then(bind, shapes[0], _regroup(view.axes, view.shape, shapes[0]))]
        new = tuple(("broadcast", view.axes, i) for i in range(len(shapes[0])))
        return [view.then(bind, shapes[0], new, faithful=False)]
    if name == "slice":
        strides = params["strides"] or (1,) * len(view.shape)
        return [_cut(view, bind, params["start_indices"], strides, shapes[0])]
    if name == "split":
        at, start, out = params["axis"], 0, []
        for k, shape in enumerate(shapes):
            starts = [start if i == at else 0 for i in range(len(shape))]
            out.append(_cut(view, _Take(bind, k), starts, [1] * len(shape), shape))
            start += shape[at]
        return out
    if name == "neg":
        return [view.then(bind, shapes[0], view.axes, scale=-1.0)]
    if name in ("mul", "div") and len(eqn.invars) == 2:
        return _scaled(view, eqn, shapes[0])
    return None


def _cut(
    view: View,
    function: Callable[[Any], Any],
    starts: Sequence[int],
    strides: Sequence[int],
    shape: tuple[int, ...],
) -> View:
    """A slice of a view; differently cut axes get different names."""
    axes: list[Hashable] = []
    cuts: list[tuple[Hashable, int, int]] = []
    for axis, start, stride, size, kept in zip(view.axes, starts, strides, view.shape, shape):
        if size == kept:
            axes.append(axis)
            continue
        axes.append(("slice", axis, start, stride, kept))
        cuts.append((axis, start, start + (kept - 1) * stride + 1))
    return view.then(function, shape, tuple(axes), cuts=tuple(cuts))


def _scaled(view: View, eqn: Any, shape: tuple[int, ...]) -> list[View] | None:
    """The view after multiplication or division by a literal."""
    numbers = [v.val for v in eqn.invars if isinstance(v, Literal)]
    divides = eqn.primitive.name == "div"
    if len(numbers) != 1 or (divides and isinstance(eqn.invars[0], Literal)):
        return None
    factor = float(numbers[0])
    factor = 1.0 / factor if divides else factor
    ordinary = 1.0 / _LARGEST_SCALE <= abs(view.scale * factor) <= _LARGEST_SCALE
    return [view.then(_Scale(factor), shape, view.axes, scale=factor, faithful=ordinary)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Bind:
    primitive: Any
    params: Any

    def __call__(self, x: jax.Array) -> Any:
        return self.primitive.bind(x, **self.params)


@dataclasses.dataclass(frozen=True, eq=False)
class _Take:
    split: _Bind
    index: int

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.split(x)[self.index]


@dataclasses.dataclass(frozen=True, eq=False)
class _Scale:
    factor: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.factor
