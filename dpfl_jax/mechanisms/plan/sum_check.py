"""Checks the compiled sum of a run, on its devices, before the first step.

``clipping.self_check`` compares norms in a small program on a few units. The program that trains is
another, which a compiler with possible bugs has split over devices. The guarantee needs two things
of it: units that are left out do not affect the sum, and each unit that is included adds its own
clipped gradient. Both are measured on the very program that trains, which takes masks and data as
arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.clipping import SelfCheckError, Trainable, join
from dpfl_jax.clipping.preflight import TOLERANCE, away_from_zero, is_low, unoptimised
from dpfl_jax.data.pipeline import Bucket, Pipeline
from dpfl_jax.mechanisms.plan.batches import units_of
from dpfl_jax.mesh import place, replicated
from dpfl_jax.run import processes

if TYPE_CHECKING:
    from dpfl_jax.mechanisms.mechanism import Mechanism

PyTree = Any
Mask = list[np.ndarray]
_UNITS = 4  # number of different units, which are repeated until rows are full
_ROWS = 2  # rows of each buffer that are filled
_ALONE = 2  # places of a row in which a single unit is checked
# Largest relative difference of two runs of one program on devices that add in no fixed order.
_UNORDERED = 1e-5


@dataclasses.dataclass(frozen=True)
class SumCheck:
    """What ``check_sum`` measured.

    Attributes:
      max_relative_error: largest error over parameters and sums, relative to the whole sum.
      tolerance: largest relative error that is allowed.
      compared: whether sums were compared with those of one device, or only with each other.
    """

    max_relative_error: float
    tolerance: float
    compared: bool


def check_sum(
    summed: Callable[..., Any],
    mechanism: Mechanism,
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    frozen: PyTree,
    pipeline: Pipeline,
    group_size: int | None,
    *,
    trainable: Trainable = None,
    tolerance: float | None = None,
) -> SumCheck:
    """Compares a run's sum with the sum on one device, and checks that units do not mix.

    The first units of the store fill up to two rows of each buffer, so that every device holds
    some. The program sums all of them, a random half, the other half, and single units in several
    places:

    * If units are left out, the sum must not change by one bit when their data become zeros. (On
      devices that add in no fixed order, it may change by 1e-5 of the sum.)
    * The sum of all units, and of each single unit, must equal that of plain per-unit gradients on
      one device, and the two halves must add up to the sum of all. If the parameters do not fit on
      one device, or the loss is bound to the mesh, single units must add up to their common sum.
    * A single unit must not add more than the clip rule's sensitivity.

    With several processes, all of them must call it.

    Args:
      summed: the run's compiled ``(params, units, mask, num_microbatches, frozen) -> (sum,
        StepStats)``.
      mechanism: the run's mechanism.
      loss_fn: loss of one example, in the form that the pipeline ships.
      params: trained parameters, placed as in the run. Parameters that are all zero are moved a
        little for the check.
      frozen: frozen parameters.
      pipeline: the run's pipeline, with a mesh.
      group_size: the sampler's group size.
      trainable: as given to ``clipping.split``.
      tolerance: largest relative error; None: as in ``clipping.self_check``.

    Returns:
      What was measured.

    Raises:
      SelfCheckError: in every process; it says what is wrong, where, and what to do.
    """
    params = away_from_zero(params)
    host = pipeline.first_units(_UNITS, group_size)
    capacities = pipeline.capacities or (1,) * len(host)
    widths = [pipeline.width(shape) for shape in pipeline.shapes or (None,) * len(host)]
    given = zip(host, capacities, widths, strict=True)
    which = [_places(b.num_units, min(_ROWS, most), width) for b, most, width in given]
    # Placed as in training, so that it is the same program.
    adapting = place(mechanism.initial_extra_args, replicated(pipeline.mesh))
    buckets = pipeline.spread(host, which)
    trial = _Trial(summed, mechanism, params, frozen, buckets, adapting)
    reference = mechanism.clipped_grad(loss_fn, strategy="vmap", trainable=trainable)
    each = [units_of(mechanism, bucket) for bucket in _of_one_size(host)]
    if tolerance is None:
        one = jax.tree.map(lambda x: x[0, :1], each[0])
        low = is_low(reference, join(params, frozen), one)
        tolerance = TOLERANCE["bfloat16" if low else "float32"]
    check = _Check(trial, which, each, mechanism.clip.sensitivity, tolerance)
    plain = functools.partial(mechanism.sum_fn(reference), None)
    zeros = jax.eval_shape(mechanism.zero_sum, params)
    check.alone = _OneDevice.made(plain, zeros, params, frozen, pipeline.mesh)
    check.run_all()
    # The sum may be wrong only in the parts of some processes.
    for said in processes.gather(check.wrong[:1]):
        for sentence in said:
            layout = " x ".join(f"{axis} {size}" for axis, size in pipeline.mesh.shape.items())
            raise SelfCheckError(
                f"the sum of the training step is wrong on the mesh {layout}: {sentence}; no step "
                "was taken: use another mesh (execution.mesh.tensor=1, or data alone) or another "
                "execution.strategy, and report this"
            )
    return SumCheck(check.worst, tolerance, check.alone is not None)


@dataclasses.dataclass
class _Check:
    """The checks, which collect errors without raising, as all processes must run all programs."""

    trial: _Trial
    which: list[np.ndarray]
    each: list[PyTree]
    bound: float
    tolerance: float
    alone: _OneDevice | None = None
    worst: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)

    def run_all(self) -> None:
        everyone = self.where(True)
        rng = np.random.default_rng(0)
        half = [rng.random(w.shape) < 0.5 for w in self.which]
        parts = [self.per_unit_reference(half), self.per_unit_reference([~h for h in half])]
        got = self.trial.run(everyone)
        self.compare(got, everyone, "the sum of several units")
        size = max(got.size, *(part.size for part in parts))
        what = "the sums of two halves of some units do not add up to that of all"
        self.assert_close(got, parts[0].plus(parts[1].parts), size, what)

        together, singles = self.where(False), []
        for b, w in enumerate(self.which):
            for column in np.unique(np.linspace(0, w.shape[1] - 1, _ALONE).astype(int)):
                real = self.where(False)
                real[b][0, column] = together[b][0, column] = True
                singles.append(self.trial.run(real, rows=1))
                self.compare(singles[-1], real, "the sum of a single unit")
                if not singles[-1].size <= self.bound * (1 + self.tolerance):
                    self.wrong.append(
                        f"a single unit adds {singles[-1].size:.6g} to it, but its clip rule allows"
                        f" {self.bound:.6g}"
                    )
        if self.alone is None:
            got, added = self.trial.run(together), singles[0].parts
            for one in singles[1:]:
                added = one.plus(added)
            size = max(got.size, *(one.size for one in singles))
            self.assert_close(
                got, added, size, "the sums of single units do not add up to that of all"
            )

    def where(self, value: bool) -> Mask:
        return [np.full(w.shape, value) for w in self.which]

    def assert_close(self, got: HostSum, want: list[np.ndarray], size: float, what: str) -> None:
        leaf, error = got.error(want, size)
        self.worst = max(self.worst, error)
        if not error <= self.tolerance:
            self.wrong.append(
                f"{what}, at parameter {leaf!r} (relative error {error:.1e}, allowed "
                f"{self.tolerance:.0e})"
            )

    def compare(self, got: HostSum, real: Mask, what: str) -> None:
        """Compares a sum with that of one device, if one device can compute it."""
        if self.alone is None:
            return
        counts = [
            np.bincount(w[m], minlength=w.max() + 1) for w, m in zip(self.which, real, strict=True)
        ]
        try:
            want, size, norms = self.alone.total(self.each, counts)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            self.alone = None  # the loss captures arrays on the mesh, or places them there
            return
        self.assert_close(got, got.project(want), size, f"{what} is not that of one device")
        if not abs(got.norms - norms) <= self.tolerance * norms:
            self.wrong.append(
                f"the norms in {what} are not those of one device ({got.norms:.6g} instead of "
                f"{norms:.6g} in all)"
            )

    def per_unit_reference(self, real: Mask) -> HostSum:
        """The sum of the units at ``real``, after checking that others do not affect it."""
        got, wrong = per_unit_reference(functools.partial(self.trial.run, real))
        self.wrong += [] if wrong is None else [wrong]
        return got


def _places(units: int, rows: int, row: int) -> np.ndarray:
    """The unit at each place, int [rows, row], so that neighbours and parts of a row differ."""
    columns = np.arange(row)
    return (columns + columns // units + np.arange(rows)[:, None]) % units


def _of_one_size(buckets: list[Bucket]) -> list[Bucket]:
    """Buckets padded to one shape, so that the reference compiles once for all of them."""
    trees = [{"arrays": b.arrays, "example_mask": b.example_mask, "keys": b.keys} for b in buckets]

    def one(*same: np.ndarray) -> list[np.ndarray]:
        most = np.max([x.shape for x in same], axis=0)
        return [np.pad(x, [(0, m - n) for m, n in zip(most, x.shape)]) for x in same]

    flat, structures = zip(*(jax.tree.flatten(tree) for tree in trees), strict=True)
    filled = zip(*(one(*same) for same in zip(*flat, strict=True)), strict=True)
    return [
        dataclasses.replace(bucket, **jax.tree.unflatten(structure, leaves))
        for bucket, structure, leaves in zip(buckets, structures, filled, strict=True)
    ]


class HostSum:
    """A sum on the host: each part of each parameter that this process holds, once."""

    def __init__(self, total: PyTree, stats: Any) -> None:
        flat = jax.tree_util.tree_leaves_with_path(total)
        self.names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]
        self.leaf: list[int] = []
        self.index: list[Any] = []
        self.parts: list[np.ndarray] = []
        for i, (_, x) in enumerate(flat):
            seen = set()
            for shard in x.addressable_shards:
                key = str(shard.index)
                if key not in seen:
                    seen.add(key)
                    self.leaf.append(i)
                    self.index.append(shard.index)
                    self.parts.append(np.asarray(shard.data))
        self.size = float(_norm(total))
        self.norms = float(stats.norm)
        self.stats = [np.asarray(x) for x in jax.tree.leaves(stats)]

    def same_bits(self, other: HostSum) -> bool:
        """Returns whether another sum and its statistics equal this one, bit by bit."""
        mine, theirs = self.parts + self.stats, other.parts + other.stats
        return all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))

    def project(self, whole: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the parts of whole parameters that this process holds."""
        return [whole[i][index] for i, index in zip(self.leaf, self.index, strict=True)]

    def plus(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the parts of this sum plus those of another."""
        return [a + b for a, b in zip(self.parts, parts, strict=True)]

    def error(self, want: list[np.ndarray], size: float) -> tuple[str, float]:
        """Returns the name of the parameter with the largest error, and it relative to ``size``."""
        squared = np.zeros(len(self.names))
        for i, a, b in zip(self.leaf, self.parts, want, strict=True):
            squared[i] += np.sum(np.square(a.astype(np.float64) - b))
        off = np.sqrt(squared) / (size or 1.0)
        worst = int(np.argmax(np.where(np.isfinite(off), off, np.inf)))
        return self.names[worst], float(off[worst])


def per_unit_reference(run: Callable[[bool], HostSum]) -> tuple[HostSum, str | None]:
    """Checks that the data of units that are left out do not change a sum.

    Args:
      run: computes the sum; if given True, with zeros for the data of units that are left out.

    Returns:
      The sum, and what is wrong with it in words, or None.
    """
    got, blank = run(False), run(True)
    if all(processes.gather(got.same_bits(blank))):
        return got, None
    again = run(False)
    leaf, error = blank.error(got.parts, got.size)
    if not got.same_bits(again) and error <= _UNORDERED:
        return got, None
    return got, (
        f"units mix: the data of units that are left out change it at parameter {leaf!r} (by "
        f"{error:.1e} of it)"
    )


@jax.jit
def _norm(tree: PyTree) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def only(units: PyTree, mask: jax.Array) -> PyTree:
    """Returns the units' data with zeros for the units that are not in ``mask``."""

    def one(x: jax.Array) -> jax.Array:
        there = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
        return jnp.where(there, x, jnp.zeros_like(x))

    return jax.tree.map(one, units)


_only = jax.jit(only)


@dataclasses.dataclass
class _Trial:
    """Runs the program that trains on rows of units, some of which are left out."""

    summed: Callable[..., Any]
    mechanism: Mechanism
    params: PyTree
    frozen: PyTree
    buckets: tuple[Bucket, ...]
    adapting: tuple[jax.Array, ...]

    def run(self, real: Mask, blank: bool = False, rows: int = _ROWS) -> HostSum:
        """Returns the sum of the units at ``real``; with ``blank``, others' data are zeros."""
        units = tuple(units_of(self.mechanism, bucket) for bucket in self.buckets)
        masks = tuple(
            place(np.pad(m, [(0, len(b.unit_mask) - len(m)), (0, 0)]), b.unit_mask.sharding)
            for m, b in zip(real, self.buckets, strict=True)
        )
        if blank:
            # Placed as before, because another placement would be another program.
            blanked = [_only(u, m) for u, m in zip(units, masks, strict=True)]
            units = tuple(
                jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), new, old)
                for new, old in zip(blanked, units, strict=True)
            )
        used = tuple(np.int32(min(bucket.num_rows, rows)) for bucket in self.buckets)
        return HostSum(*self.summed(self.params, units, masks, used, self.frozen, *self.adapting))


@dataclasses.dataclass
class _OneDevice:
    """Sums of plain per-unit gradients on one device."""

    add: Callable[..., Any]
    params: PyTree
    zeros: PyTree
    device: jax.Device

    @classmethod
    def made(
        cls, reference: Any, zeros: PyTree, params: PyTree, frozen: PyTree, mesh: Any
    ) -> _OneDevice | None:
        """Returns None if the parameters do not fit; ``zeros`` has the shapes of a sum."""
        device = mesh.local_devices[0]
        size, rest = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (params, frozen))
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", np.inf) - stats.get("bytes_in_use", 0)
        # Room for parameters, a gradient, and the sum before and after, in half of what is free.
        if not all(processes.gather(bool(rest + 4 * size <= free / 2))):
            return None

        def whole(x: Any) -> jax.Array:
            if x.is_fully_addressable:
                return jax.device_put(x, device)
            x = jax.jit(lambda x: x, out_shardings=replicated(x.sharding.mesh))(x)
            return next(s.data for s in x.addressable_shards if s.device == device)

        def add(params: PyTree, unit: PyTree, sums: PyTree, count: jax.Array) -> Any:
            one = reference(params, unit)
            more = jax.tree.map(lambda a, b: a + count * b, sums, one.sum)
            norm = jnp.where(jnp.isfinite(one.losses[0]), one.norms[0], 0.0)  # as StepStats counts
            return more, _norm(one.sum), norm

        alone = jax.tree.map(whole, params)
        zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, "f4"), device), zeros)
        return cls(
            jax.jit(add, compiler_options=unoptimised()),
            join(alone, jax.tree.map(whole, frozen)),
            zeros,
            device,
        )

    def total(
        self, units: list[PyTree], counts: list[np.ndarray]
    ) -> tuple[list[np.ndarray], float, float]:
        """Returns the sum of all units, the size that errors are relative to, and the sum of norms.

        Args:
          units: a batch of units for each bucket.
          counts: int [units of a bucket], how often each unit is added.

        The size is at least that of orthogonal summands: if units nearly cancel, rounding errors
        are relative to what was added up, not to the sum.
        """
        sums, squares, norms = self.zeros, 0.0, 0.0
        for bucket, often in zip(units, counts, strict=True):
            for u in np.flatnonzero(often):
                unit = jax.tree.map(
                    lambda x, u=u: jax.device_put(x[0, u : u + 1], self.device), bucket
                )
                sums, size, norm = self.add(self.params, unit, sums, np.float32(often[u]))
                squares += often[u] * float(size) ** 2
                norms += often[u] * float(norm)
        size = max(float(_norm(sums)), squares**0.5)
        return [np.asarray(x) for x in jax.tree.leaves(sums)], size, norms
