"""Checks the compiled sum of a run, on its devices, before the first step.

``clipping.self_check`` compares norms in a small program on a few units. The program that trains is
another, which a compiler with possible bugs has split over devices. The guarantee needs two things
of it: units that are left out do not affect the sum, and each unit that is included adds its own
clipped gradient. Both are measured on the very program that trains, which takes masks and data as
arguments.

It is compared with plain gradients of one unit after the other, and of one example after the other
within a unit, so that the check takes no more memory than a step.

``Passed`` remembers which programs were right, beside the compiled programs that are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh

from dpfl_jax.clipping import Adaptive, SelfCheckError, Trainable, clipped_grad, join
from dpfl_jax.clipping.cost import machine_for
from dpfl_jax.clipping.preflight import TOLERANCE, away_from_zero, has_low, unoptimised
from dpfl_jax.clipping.result import StepStats
from dpfl_jax.clipping.rules import WholeGradientRule
from dpfl_jax.data.pipeline import Bucket, Pipeline
from dpfl_jax.mechanisms.plan.batches import units_of
from dpfl_jax.mechanisms.user_update import Gradient
from dpfl_jax.mesh import place, replicated
from dpfl_jax.run import processes
from dpfl_jax.run.terms import computation_digest

if TYPE_CHECKING:
    from dpfl_jax.mechanisms.mechanism import Mechanism

PyTree = Any
Mask = list[np.ndarray]
_UNITS = 4  # number of different units, which are repeated until rows are full
_ROWS = 2  # rows of each buffer that are filled
_ALONE = 2  # places of a row in which a single unit is checked
# Beginnings of the names of environment variables by which programs are compiled.
_COMPILED_BY = ("XLA_", "LIBTPU", "TPU_", "NVIDIA_", "CUDA_", "CUDNN_", "CUBLAS_", "NCCL_")
# Most tolerances, and most of all, of a parameter's own error in a check that is remembered.
_OWN_TOLERANCES, _OWN_ERROR = 10.0, 0.05
# Largest relative difference of two runs of one program on devices that add in no fixed order.
_UNORDERED = 1e-5


@dataclasses.dataclass(frozen=True)
class SumCheck:
    """What ``check_sum`` measured.

    Attributes:
      max_relative_error: largest error over parameters and sums, relative to the whole sum.
      tolerance: largest relative error that is allowed.
      on_one_device: whether the plain gradients were computed on one device, or on the mesh.
    """

    max_relative_error: float
    tolerance: float
    on_one_device: bool


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
    say: Callable[[str], object] = str,
) -> SumCheck | None:
    """Compares a run's sum with plain per-unit gradients, and checks that units do not mix.

    The first units of the store fill up to two rows of each buffer, so that every device holds
    some. The program sums all of them, a random half, the other half, and single units in several
    places:

    * If units are left out, the sum must not change by one bit when their data become zeros. (On
      devices that add in no fixed order, it may change by 1e-5 of the sum.)
    * The sum of all units, and of each single unit, must equal that of plain per-unit gradients on
      one device, and so must the norms of each parameter's gradients; the two halves must add up to
      the sum of all. If the parameters do not fit on one device, or the loss is bound to the mesh,
      the plain gradients are computed on the mesh.
    * A single unit must not add more than the clip rule's sensitivity.

    A program that was found right on this machine before, on data that would have shown a fault, is
    not checked again while JAX keeps it (``Passed``); then None is returned. With several
    processes, all of them must call it.

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
      say: called with what is being checked, for progress.

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
    reference = Reference.on_mesh(mechanism, loss_fn, params, frozen, pipeline.mesh, trainable)
    each = [units_of(mechanism, bucket) for bucket in _of_one_size(host)]
    if tolerance is None:
        first, _ = mechanism.rule.of_units(jax.tree.map(lambda x: x[0, 0], each[0]))
        example, _ = reference.examples(first)[0]
        low = machine_for(None).rounding > 0
        low = low or has_low(reference.loss_fn, join(params, frozen), example)
        tolerance = TOLERANCE["bfloat16" if low else "float32"]
    check = _Check(trial, reference, which, each, mechanism.clip.sensitivity, tolerance, say)
    check.alone = reference.on_one_device(pipeline.mesh.local_devices[0])
    passed = Passed(check, pipeline.mesh)
    if all(processes.gather(passed.already())):
        return None
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
    if check.is_telling:
        passed.keep()
    return SumCheck(check.worst, tolerance, check.alone is not None)


@dataclasses.dataclass(frozen=True)
class _Single:
    """A sum of one unit.

    Attributes:
      bucket: the unit's.
      clipped: whether a somewhat smaller gradient would have added as much.
      error: the largest error of a parameter, relative to what the unit adds to that parameter.
    """

    bucket: int
    clipped: bool
    error: float


@dataclasses.dataclass
class _Check:
    """The checks, which collect errors without raising, as all processes must run all programs."""

    trial: _Trial
    reference: Reference
    which: list[np.ndarray]
    each: list[PyTree]
    bound: float
    tolerance: float
    say: Callable[[str], object]
    alone: Reference | None = None
    worst: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)
    singles: list[_Single] = dataclasses.field(default_factory=list)

    @property
    def is_telling(self) -> bool:
        """Whether the data would have shown a fault.

        A gradient that is lost in the tolerance, or zero, would not, nor would a frozen parameter
        of zeros. Gradients that no rule had to clip would not show that they are clipped, in each
        bucket; of groups of parameters that is not looked at. Units that are copies of one would
        not show that each is clipped by itself; single examples, or copies of one, not that users'
        examples are averaged.
        """
        mechanism = self.reference.mechanism
        examples = [
            [
                [example for example, _ in self.reference.examples(self.unit(b, u))]
                for u in range(which.max() + 1)
            ]
            for b, which in enumerate(self.which)
        ]
        several = mechanism.participation.unit_examples in (None, 1)
        several = several or any(_vary(unit) for bucket in examples for unit in bucket)
        clipped = {one.bucket for one in self.singles if one.clipped}
        most = min(_OWN_TOLERANCES * self.tolerance, _OWN_ERROR)
        return bool(
            several
            and all(map(_vary, examples))
            and isinstance(mechanism.rule, WholeGradientRule)
            and len(clipped) == len(self.which)
            and all(one.error <= most for one in self.singles)
            and all(map(_is_any, jax.tree.leaves(self.trial.frozen)))
        )

    def unit(self, b: int, u: int) -> PyTree:
        """A unit of a bucket."""
        return jax.tree.map(lambda x: x[0, u], self.each[b])

    def run_all(self) -> None:
        columns = [np.linspace(0, w.shape[1] - 1, _ALONE).astype(int) for w in self.which]
        alone = [(b, column) for b, some in enumerate(columns) for column in np.unique(some)]
        sums = 3 + len(alone)
        rng = np.random.default_rng(0)
        half = [rng.random(w.shape) < 0.5 for w in self.which]
        self.say("compiling its sum, which is that of every step")
        parts = [self.per_unit_reference(half)]
        self.say(f"sum 2 of {sums} over a few units")
        parts.append(self.per_unit_reference([~h for h in half]))
        self.say(f"sum 3 of {sums} over a few units")
        everyone = self.where(True)
        got = self.trial.run(everyone)
        self.compare(got, everyone, "the sum of several units")
        size = max(got.size, *(part.size for part in parts))
        what = "the sums of two halves of some units do not add up to that of all"
        self.assert_close(got, parts[0].plus(parts[1].parts), size, what)
        # A clip norm that adapts is an argument: here with another value.
        trial = dataclasses.replace(
            self.trial, adapting=tuple(0.5 * x for x in self.trial.adapting)
        )
        clip_norm = next(iter(trial.adapting), None)
        for number, (b, column) in enumerate(alone, 4):
            self.say(f"sum {number} of {sums} over a few units")
            real = self.where(False)
            real[b][0, column] = True
            got = trial.run(real, alone=True)
            want = self.compare(got, real, "the sum of a single unit", clip_norm)
            u = self.which[b][0, column]
            with np.errstate(invalid="ignore", divide="ignore"):  # a parameter that gets nothing
                error = got.by_leaf(got.minus(want)) / got.by_leaf(want)
            is_clipped = self.is_clipped(b, u, got.norms, clip_norm)
            self.singles.append(_Single(b, is_clipped, float(error.max())))
            bound = self.bound_of(b, u)
            if not got.size <= bound * (1 + self.tolerance):
                self.wrong.append(
                    f"a single unit adds {got.size:.6g} to it, but its clip rule allows {bound:.6g}"
                )

    def is_clipped(self, b: int, u: int, norm: float, clip_norm: Any) -> bool:
        """Whether the rule clips a gradient of this norm: 0.9 times it would contribute as much."""
        mechanism = self.reference.mechanism
        rule = mechanism.rule
        if isinstance(mechanism.clip, Adaptive):
            rule = mechanism.clip.rule(clip_norm)
        if not isinstance(rule, WholeGradientRule):
            return False
        _, own = rule.of_units(self.unit(b, u))
        norms = jnp.array([norm, 0.9 * norm], jnp.float32)
        size, less = np.asarray(norms * rule.weights(norms, own), np.float64)
        return bool(size <= 1.01 * less)

    def bound_of(self, b: int, u: int) -> float:
        """The most that a unit may add: the clip rule's sensitivity, or less if it has a bound."""
        rule = self.reference.mechanism.rule
        _, own = rule.of_units(self.unit(b, u))
        if own is None:
            return self.bound
        # In the units of the sensitivity. The rule's weights are not asked: they might ignore it.
        return min(self.bound, float(own) * rule.sensitivity / (rule.threshold or 1.0))

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

    def compare(
        self, got: HostSum, real: Mask, what: str, clip_norm: Any = None
    ) -> list[np.ndarray]:
        """Compares a sum, and the norms in it, with those of plain gradients; returns their sum."""
        counts = [
            np.bincount(w[m], minlength=w.max() + 1) for w, m in zip(self.which, real, strict=True)
        ]
        reference = self.alone or self.reference
        try:
            want, size, norms, of_leaves = reference.total(self.each, counts, got, clip_norm)
        except ValueError as error:
            if self.alone is None or "incompatible devices" not in str(error):
                raise
            self.alone = None  # the loss captures arrays on the mesh, or places them there
            return self.compare(got, real, what, clip_norm)
        where = "one device" if self.alone is not None else "plain gradients"
        self.assert_close(got, want, size, f"{what} is not that of {where}")
        if not abs(got.norms - norms) <= self.tolerance * norms:
            self.wrong.append(
                f"the norms in {what} are not those of {where} ({got.norms:.6g} instead of "
                f"{norms:.6g} in all)"
            )
        errors = np.abs(got.leaf_norms - of_leaves)
        if not (errors <= self.tolerance * norms).all():
            worst = int(np.argmax(np.where(np.isfinite(errors), errors, np.inf)))
            self.wrong.append(
                f"the norms of the gradients of parameter {got.names[worst]!r} in {what} are not "
                f"those of {where} ({got.leaf_norms[worst]:.6g} instead of "
                f"{of_leaves[worst]:.6g} in all)"
            )
        return want

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
        self.norms, self.leaf_norms = float(stats.norm), np.asarray(stats.leaf_norms)
        self.stats = [np.asarray(x) for x in jax.tree.leaves(stats)]

    def same_bits(self, other: HostSum) -> bool:
        """Returns whether another sum and its statistics equal this one, bit by bit."""
        mine, theirs = self.parts + self.stats, other.parts + other.stats
        return all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))

    def project(self, total: PyTree) -> list[np.ndarray]:
        """Returns the parts of a sum on one device, or placed like this one, that are held here."""
        leaves = jax.tree.leaves(total)

        def part(x: jax.Array, index: Any) -> np.ndarray:
            same = (shard.data for shard in x.addressable_shards if shard.index == index)
            found = next(same, None)
            return np.asarray(x)[index] if found is None else np.asarray(found)

        return [part(leaves[i], index) for i, index in zip(self.leaf, self.index, strict=True)]

    def plus(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the parts of this sum plus those of another."""
        return [a + b for a, b in zip(self.parts, parts, strict=True)]

    def minus(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the parts of this sum minus those of another."""
        return [a.astype(np.float64) - b for a, b in zip(self.parts, parts, strict=True)]

    def by_leaf(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns the norm of each parameter's parts."""
        squared = np.zeros(len(self.names))
        for i, part in zip(self.leaf, parts, strict=True):
            squared[i] += np.sum(np.square(part, dtype=np.float64))
        return np.sqrt(squared)

    def error(self, want: list[np.ndarray], size: float) -> tuple[str, float]:
        """Returns the name of the parameter with the largest error, and it relative to ``size``."""
        off = self.by_leaf(self.minus(want)) / (size or 1.0)
        worst = int(np.argmax(np.where(np.isfinite(off), off, np.inf)))
        return self.names[worst], float(off[worst])


_is_any = jax.jit(jnp.any)


def _vary(trees: Iterable[PyTree]) -> bool:
    """Whether the trees differ."""
    held = {tuple(np.asarray(x).tobytes() for x in jax.tree.leaves(tree)) for tree in trees}
    return len(held) > 1


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

    def run(self, real: Mask, blank: bool = False, alone: bool = False) -> HostSum:
        """Returns the sum of the units at ``real``.

        Args:
          real: the units in the sum.
          blank: whether others' data are zeros.
          alone: whether there is one unit, in a first row: no other row is computed.
        """
        return HostSum(*self.summed(*self.arguments(real, blank, alone)))

    def arguments(self, real: Mask, blank: bool = False, alone: bool = False) -> tuple[Any, ...]:
        """Arguments of the program, as for ``run``."""
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
        used = tuple(
            np.int32(m.any() if alone else min(bucket.num_rows, _ROWS))
            for m, bucket in zip(real, self.buckets, strict=True)
        )
        return self.params, units, masks, used, self.frozen, *self.adapting


class Passed:
    """Whether a program was found right on this machine before.

    A program that JAX compiles is always checked, and so is one that it loads from its folder of
    kept programs for the first time. A file there then says that these bytes passed. Who can write
    there needs no such file to change what runs, as these programs are executed.
    """

    def __init__(self, check: _Check, mesh: Mesh) -> None:
        self.file: pathlib.Path | None = None
        kept = jax.config.jax_compilation_cache_dir
        lower = getattr(check.trial.summed, "lower", None)
        if not (kept and os.path.isdir(kept) and lower):
            return
        lowered = lower(*check.trial.arguments(check.where(True)))
        with _loads() as loaded:
            lowered.compile()
        if len(loaded) == 1 and _PACKAGE is not None:  # else it was compiled
            facts = [*loaded, *_facts(check, lowered.as_text(), mesh)]
            digest = hashlib.sha256(repr(facts).encode()).hexdigest()
            self.file = pathlib.Path(kept) / f"passed-{digest}"

    def already(self) -> bool:
        """Whether the program was found right before."""
        return self.file is not None and self.file.is_file()

    def keep(self) -> None:
        """Remembers that a program that JAX had kept is right, if the folder can be written."""
        with contextlib.suppress(OSError):
            if self.file is not None:
                self.file.touch(mode=0o600)


def _facts(check: _Check, program: str, mesh: Mesh) -> list[Any]:
    """All that the check compares except parameters, and what JAX compiles by."""
    reference = check.reference
    unit, bound = reference.mechanism.rule.of_units(jax.tree.map(lambda x: x[0, 0], check.each[0]))
    example, weight = reference.examples(unit)[0]
    sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), reference.nothing)
    added = (reference.params, reference.frozen, example, np.float32(weight), sums)
    clipped = (*sums, {} if bound is None else {"bound": bound}, None)
    devices = list(mesh.devices.flat)
    installed = [(one.name, one.version) for one in importlib.metadata.distributions()]
    return [
        program,
        computation_digest(reference.add.__wrapped__, *added),
        computation_digest(reference.clip.__wrapped__, *clipped),
        [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in jax.tree.leaves(check.each)],
        [check.bound, check.tolerance, check.alone is None, _UNITS, _ROWS, _ALONE],
        _PACKAGE,
        [jax.__version__, jaxlib.__version__, devices[0].client.platform_version],
        sorted(one for one in installed if one[0].startswith(("jax", "nvidia", "libtpu"))),
        [platform.node(), jax.process_index(), jax.process_count()],
        [(device.id, device.device_kind) for device in devices],
        sorted(jax.config.values.items(), key=lambda item: item[0]),
        sorted(item for item in os.environ.items() if item[0].startswith(_COMPILED_BY)),
    ]


@contextlib.contextmanager
def _loads() -> Iterator[list[str]]:
    """Digests of the programs that JAX loads in this thread meanwhile, as they were kept.

    Its own reader is listened to, since by now another program may be in the file. Bytes that
    cannot be loaded do not count: JAX then compiles. Where it has no such reader, nothing counts.
    """
    from jax._src import compilation_cache

    cache: Any = getattr(compilation_cache, "_cache", None)
    read: list[str] = []
    loaded: list[str] = []
    mine = threading.get_ident()

    def get(key: str) -> bytes | None:
        kept: bytes | None = type(cache).get(cache, key)
        if kept is not None and threading.get_ident() == mine:
            read.append(hashlib.sha256(kept).hexdigest())
        return kept

    def heard(event: str, **about: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == mine:
            loaded.extend({*read})

    if cache is None:
        yield loaded
        return
    cache.get = get
    jax.monitoring.register_event_listener(heard)
    try:
        yield loaded
    finally:
        vars(cache).pop("get", None)
        jax.monitoring.unregister_event_listener(heard)


def _package_digest() -> str | None:
    """Of all modules of this package: a change in any may change what is checked, or how."""
    files = sorted(pathlib.Path(__file__).parents[2].rglob("*.py"))
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    except OSError:
        return None


_PACKAGE = _package_digest()  # as it is imported: an upgrade may replace the files meanwhile


@dataclasses.dataclass(frozen=True)
class Reference:
    """Plain gradients of one unit after the other, of one example after the other in each.

    It uses nothing of how a run forms gradients and cuts units, except the clip rule.

    Attributes:
      mechanism: the run's mechanism.
      loss_fn: loss of one example, or of one unit that is not the mean of examples.
      params: trained parameters, or their shapes with shardings.
      frozen: frozen parameters, or their shapes with shardings.
      place: where examples go: one device, or all of the mesh.
    """

    mechanism: Mechanism
    loss_fn: Callable[..., jax.Array]
    params: PyTree
    frozen: PyTree
    place: jax.sharding.Sharding

    @classmethod
    def on_mesh(
        cls,
        mechanism: Mechanism,
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        frozen: PyTree,
        mesh: Mesh,
        trainable: Trainable = None,
    ) -> Reference:
        """The reference on all devices, with the parameters as they are placed there.

        Args:
          mechanism: the run's mechanism.
          loss_fn: loss of one example.
          params: trained parameters.
          frozen: frozen parameters.
          mesh: the run's mesh.
          trainable: as given to ``clipping.split``.
        """
        if not _averages(mechanism):
            loss_fn = mechanism.clipped_grad(loss_fn, strategy="vmap", trainable=trainable).loss_fn
        return cls(mechanism, loss_fn, params, frozen, replicated(mesh))

    def on_one_device(self, device: jax.Device) -> Reference | None:
        """The same on one device; None if there is no room for copies of the parameters."""
        if len(self.place.device_set) > 1:
            size, rest = (
                sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (self.params, self.frozen)
            )
            stats = device.memory_stats() or {}
            free = stats.get("bytes_limit", np.inf) - stats.get("bytes_in_use", 0)
            # Room for parameters and two gradients in half of what is free.
            if not all(processes.gather(bool(rest + 3 * size <= free / 2))):
                return None

        def copy(x: Any) -> jax.Array:
            if x.is_fully_addressable:
                return jax.device_put(x, device)
            x = jax.jit(lambda x: x, out_shardings=replicated(x.sharding.mesh))(x)
            return next(s.data for s in x.addressable_shards if s.device == device)

        return dataclasses.replace(
            self,
            params=jax.tree.map(copy, self.params),
            frozen=jax.tree.map(copy, self.frozen),
            place=jax.sharding.SingleDeviceSharding(device),
        )

    def examples(self, unit: PyTree) -> list[tuple[PyTree, float]]:
        """The examples of a unit, each with its weight in the unit's loss."""
        if not _averages(self.mechanism):
            return [(unit, 1.0)]
        there = np.flatnonzero(unit["mask"])
        weight = 1 / max(1, int(unit.get("count", len(there))))
        return [(jax.tree.map(lambda x, i=i: x[i], unit["examples"]), weight) for i in there]

    @functools.cached_property
    def nothing(self) -> PyTree:
        """Gradient and loss of no examples, as shapes with shardings."""
        one = isinstance(self.place, jax.sharding.SingleDeviceSharding)

        def like(x: Any) -> jax.ShapeDtypeStruct:
            where = self.place if one else x.sharding
            return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=where)

        loss = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.place)
        return jax.tree.map(like, self.params), loss

    @functools.cached_property
    def add(self) -> Any:
        """Compiled ``(params, frozen, example, weight, sums) -> sums``, which are donated.

        Sums are a gradient and a loss.
        """

        def add(params: PyTree, frozen: PyTree, example: PyTree, weight: Any, sums: PyTree) -> Any:
            def loss(params: PyTree) -> jax.Array:
                return self.loss_fn(join(params, frozen), example).astype(jnp.float32)

            value, gradient = jax.value_and_grad(loss)(params)
            return jax.tree.map(
                lambda a, g: a + weight * g.astype(jnp.float32), sums, (gradient, value)
            )

        places = jax.tree.map(lambda x: x.sharding, self.nothing)
        return jax.jit(add, donate_argnums=4, out_shardings=places, compiler_options=unoptimised())

    @functools.cached_property
    def clip(self) -> Any:
        """Compiled ``(gradient, loss, bound, clip_norm) -> (clipped, its norm, StepStats)``."""

        def linear(params: PyTree, unit: PyTree) -> jax.Array:
            products = jax.tree.map(lambda p, g: jnp.sum(p * g), params, unit["gradient"])
            return sum(jax.tree.leaves(products), start=jax.lax.stop_gradient(unit["loss"]))

        summed = self.mechanism.sum_fn(
            clipped_grad(linear, rule=self.mechanism.rule, strategy="vmap")
        )

        def clip(gradient: PyTree, loss: jax.Array, bound: dict[str, Any], clip_norm: Any) -> Any:
            unit = jax.tree.map(lambda x: x[None], {"gradient": gradient, "loss": loss, **bound})
            one = summed(clip_norm, jax.tree.map(jnp.zeros_like, gradient), unit)
            stats = StepStats.of(one, jnp.ones(1), jnp.inf, leaf_norms=True)
            return one.sum, _norm(one.sum), stats

        return jax.jit(clip, compiler_options=unoptimised())

    def total(
        self,
        units: list[PyTree],
        counts: list[np.ndarray],
        like: HostSum,
        clip_norm: Any = None,
    ) -> tuple[list[np.ndarray], float, float, np.ndarray]:
        """Returns the sum of units, the size that errors are relative to, and sums of norms.

        Args:
          units: a batch of units for each bucket.
          counts: int [units of a bucket], how often each unit is added.
          like: the sum that is compared, whose parts are summed on the host.
          clip_norm: the clip norm if it adapts; None: that of the first step.

        The size is at least that of orthogonal summands: if units nearly cancel, rounding errors
        are relative to what was added up, not to the sum. Norms are those of all parameters
        together, and of each.
        """
        total: list[Any] = [np.float32(0)] * len(like.parts)
        squares, norms, of_leaves = 0.0, 0.0, np.zeros(())
        for bucket, often in zip(units, counts, strict=True):
            for u in np.flatnonzero(often):
                clipped, size, stats = self._of_unit(
                    jax.tree.map(lambda x, u=u: x[0, u], bucket), clip_norm
                )
                n = np.float32(often[u])
                total = [a + n * b for a, b in zip(total, like.project(clipped), strict=True)]
                squares += float(n) * float(size) ** 2
                norms += float(n) * float(stats.norm)
                of_leaves = of_leaves + n * np.asarray(stats.leaf_norms, np.float64)
        return total, max(like.size, squares**0.5), norms, of_leaves

    def _of_unit(self, unit: PyTree, clip_norm: Any) -> Any:
        unit, bound = self.mechanism.rule.of_units(unit)
        sums = jax.tree.map(lambda x: place(np.zeros(x.shape, x.dtype), x.sharding), self.nothing)
        for example, weight in self.examples(unit):
            given = place((example, np.float32(weight)), self.place)
            sums = self.add(self.params, self.frozen, *given, sums)
        if clip_norm is not None:
            clip_norm = place(np.asarray(clip_norm), self.place)
        return self.clip(*sums, {} if bound is None else {"bound": bound}, clip_norm)


def _averages(mechanism: Mechanism) -> bool:
    """Whether a unit's gradient is the mean of its examples' gradients."""
    return mechanism.participation.averages_examples and isinstance(mechanism.update, Gradient)
