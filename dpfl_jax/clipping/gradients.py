"""``clipped_grad``: from the loss of one unit to the clipped sum over a batch of units."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dpfl_jax.clipping import per_unit
from dpfl_jax.clipping.auto import Explanation, decide, with_leaf_reports
from dpfl_jax.clipping.cost import Machine, machine_for, memory_limit
from dpfl_jax.clipping.isolation import check_isolated
from dpfl_jax.clipping.jaxprs import traced_once
from dpfl_jax.clipping.problem import ClippedSums, ClippingProblem, as_arrays, count_units
from dpfl_jax.clipping.result import ClippedGradResult, leaf_name, real_units
from dpfl_jax.clipping.rules import Flat, PerGroup, Rule
from dpfl_jax.clipping.taps.engine import MIXED, mixed_by_convolutions, solve_ghost
from dpfl_jax.clipping.taps.leaves import Method
from dpfl_jax.clipping.trainable import Trainable, join, split, trainable_mask
from dpfl_jax.errors import BadInputError, at_least, one_of
from dpfl_jax.varying import vary, varying_axes

PyTree = Any
Strategy = Literal["auto", "vmap", "scan", "ghost"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "vmap", "scan", "ghost")
Neighboring = Literal["add-or-remove", "zero-out", "replace-one"]
# By how many contributions of one unit the sums of two neighbours can differ.
_CONTRIBUTIONS = {"add-or-remove": 1, "zero-out": 1, "replace-one": 2}


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """A function ``(*args, mask=None, rng=None, weight=None) -> ClippedGradResult``.

    ``clipped_grad`` makes it and documents its fields. It holds no state, and composes with
    ``jit``, ``vmap`` over outer axes, ``shard_map`` and loops. It sums over the units it is given;
    inside ``shard_map`` the caller sums over devices, with one ``psum`` a step.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import clipped_grad
      >>> grad = clipped_grad(lambda w, x: jnp.sum(w * x), clip_norm=2.0, normalize_by=4.0)
      >>> grad.sensitivity("add-or-remove"), grad.sensitivity("replace-one")
      (0.5, 1.0)
      >>> mask = jnp.array([True, False])  # the second unit is padding
      >>> print(grad(jnp.ones(2), jnp.array([[4.0, 0.0], [1.0, 1.0]]), mask=mask).sum)
      [0.5 0. ]
    """

    loss_fn: Callable[..., Any]
    argnums: int | tuple[int, ...]
    has_aux: bool
    rule: Rule
    strategy: Strategy
    trainable: PyTree | Callable[[str], bool] | None
    microbatch_size: int | None
    platform: str | None = None
    norm_method: Method | None = None
    memory_limit: float | None = None
    unit_sharding: NamedSharding | None = None
    pieces: Callable[[PyTree], PyTree] | None = None
    gradient_sharding: Callable[[str, tuple[int, ...]], NamedSharding] | None = None
    normalize_by: float = 1.0
    kernel: bool | None = None

    def sensitivity(self, neighboring: Neighboring) -> float:
        """Returns the largest distance between sums of neighbouring batches, to scale noise by.

        Args:
          neighboring: ``"add-or-remove"``: one of the batches lacks a unit; ``"zero-out"``: it has
            padding in the unit's place; ``"replace-one"``: it has another unit in its place.
        """
        one_of("ClippedGrad.sensitivity: neighboring", neighboring, _CONTRIBUTIONS)
        return _CONTRIBUTIONS[neighboring] * self.rule.sensitivity / self.normalize_by

    def __call__(
        self,
        *args: PyTree,
        mask: jax.Array | None = None,
        rng: jax.Array | None = None,
        weight: jax.Array | None = None,
        rule: Rule | None = None,
    ) -> ClippedGradResult:
        """Returns the clipped sum of the batch.

        Args:
          *args: the arguments of the loss. Those in ``argnums`` are pytrees whose floating-point
            leaves are trained. All others are batches: pytrees of arrays with a leading unit axis
            [n, ...]. A batch without units (n = 0) gives a sum of zeros.
          mask: bool, int or float [n]; zero (or NaN) marks padding, which contributes exactly zero
            whatever it holds.
          rng: n keys, one for each unit, passed to the loss as ``rng=``. Make each from the unit's
            id, so that a unit's key does not depend on other units. Or one key, from which unit i
            gets ``fold_in(rng, i)``: if a unit is removed instead of masked, the units after it get
            other keys. The sum may then move by more than ``sensitivity``, and the guarantee holds
            only against those who do not know the key.
          weight: bool, int or float [n], a factor of each unit's clipped gradient, from 0 to 1
            (more counts as 1, NaN as 0). If several units belong to one person and their weights
            sum to at most 1, that person moves the sum by no more than one unit may.
          rule: replaces the rule given to ``clipped_grad`` (for an adaptive clip norm).

        Raises:
          BadInputError: arguments or shapes do not fit.
        """
        problem, rebuild = self.problem(args, mask, rng, weight, rule)
        solution = self.solve(problem)
        if not count_units(self.arguments(args)[1]):  # ``problem`` added padding: remove it
            none = jax.tree.map(lambda x: x[:0], dataclasses.replace(solution, sums=[]))
            solution = dataclasses.replace(none, sums=solution.sums)
        return ClippedGradResult(
            sum=rebuild([x / self.normalize_by for x in solution.sums]),
            norms=solution.norms,
            weights=solution.weights,
            losses=solution.losses,
            nonfinite=solution.nonfinite,
            aux=solution.aux if self.has_aux else None,
            leaf_norms=rebuild(solution.leaf_norms),
        )

    def arguments(
        self, args: Sequence[PyTree]
    ) -> tuple[PyTree, PyTree, Callable[[PyTree, PyTree], tuple[PyTree, ...]]]:
        """Returns the parameters, the batch, and a function that makes arguments of both again.

        Raises:
          BadInputError: there is no batch, or the loss does not take these arguments.
        """
        single, places = isinstance(self.argnums, int), range(len(args))
        asked = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        trained = [places[i] for i in asked if -len(args) <= i < len(args)]
        batches = [i for i in places if i not in trained]
        if len({*trained}) < len(asked) or not batches:
            raise BadInputError(
                f"clipped_grad: it got {len(args)} arguments, of which argnums={self.argnums} are "
                "trained: name each of these once, and give at least one batch"
            )
        try:
            inspect.signature(self.loss_fn).bind_partial(*places)
        except TypeError as error:
            raise BadInputError(
                f"clipped_grad: it got {len(args)} arguments, which the loss does not take "
                f"({error}): give one for each argument of the loss, and a mask as mask=..."
            ) from error
        except ValueError:  # a callable without a signature
            pass

        def pick(places: list[int], alone: bool) -> PyTree:
            return args[places[0]] if alone else tuple(args[i] for i in places)

        def rebuild_arguments(params: PyTree, batch: PyTree) -> tuple[PyTree, ...]:
            known = dict(zip(trained, (params,) if single else params, strict=True))
            known |= zip(batches, (batch,) if len(batches) == 1 else batch, strict=True)
            return tuple(known[i] for i in places)

        return pick(trained, single), pick(batches, len(batches) == 1), rebuild_arguments

    def solve(self, problem: ClippingProblem, microbatches: bool = True) -> ClippedSums:
        """Runs the strategy; without ``microbatches``, on all units at once."""
        chosen = self._choose(problem)
        solve = per_unit.solve_vmap if chosen.strategy != "ghost" else self._ghost
        if chosen.microbatch_size is None or not microbatches:
            return solve(problem)
        return per_unit.microbatched(solve, problem, chosen.microbatch_size)

    def _ghost(self, problem: ClippingProblem) -> ClippedSums:
        return solve_ghost(problem, self._machine, self._methods, memory_limit=self.memory)

    @property
    def _machine(self) -> Machine:
        machine = machine_for(self.platform)
        if self.kernel is None or machine.kernel is None:
            return machine
        # As fast as other products, it is always the first choice.
        return dataclasses.replace(machine, kernel=machine.flops if self.kernel else None)

    @property
    def _methods(self) -> tuple[Method, ...] | None:
        """The ways to norms that book-keeping chooses from; None: all."""
        return None if self.norm_method is None else (self.norm_method,)

    @property
    def memory(self) -> float | None:
        """Bytes that book-keeping may hold on a device; None: they are not known."""
        return memory_limit() if self.memory_limit is None else self.memory_limit

    def _choose(self, problem: ClippingProblem) -> Explanation:
        chosen = self._preferred(problem)
        units = chosen.microbatch_size or problem.num_units
        if units > problem.parts and mixed_by_convolutions(problem, chosen.strategy == "ghost"):
            return Explanation("scan", problem.parts, MIXED)
        return chosen

    def _preferred(self, problem: ClippingProblem) -> Explanation:
        if self.pieces is not None and self.strategy == "auto":
            return Explanation(
                "scan", self.microbatch_size or problem.parts, "units are formed piece by piece"
            )
        if self.strategy == "auto" and self.microbatch_size is None:
            return decide(problem, self._machine, self._methods, self.memory)
        strategy = "ghost" if self.strategy == "auto" else self.strategy
        size = self.microbatch_size or (problem.parts if strategy == "scan" else None)
        return Explanation(strategy, size, "asked for")

    def explain(
        self,
        *args: PyTree,
        mask: jax.Array | None = None,
        rng: jax.Array | None = None,
        weight: jax.Array | None = None,
    ) -> Explanation:
        """Returns which strategy a call with arrays of these shapes takes, and why; print it.

        Args:
          *args: as in a call.
          mask: as in a call.
          rng: as in a call.
          weight: as in a call.
        """
        explanations: list[Explanation] = []

        def trace(*args: PyTree) -> None:
            problem, _ = self.problem(args, mask, rng, weight)
            chosen = self._choose(problem)
            if chosen.strategy == "ghost":
                machine = self._machine
                limits = (self._methods, self.memory)
                chosen = with_leaf_reports(problem, machine, *limits, chosen)
            explanations.append(chosen)

        jax.make_jaxpr(trace)(*args)
        return explanations[-1]

    def problem(
        self,
        args: Sequence[PyTree],
        mask: jax.Array | None = None,
        rng: jax.Array | None = None,
        weight: jax.Array | None = None,
        rule: Rule | None = None,
    ) -> tuple[ClippingProblem, Callable[[list[jax.Array]], PyTree]]:
        """Flattens one call; returns it and a function that makes a tree of its sums."""
        params, batch, rebuild_arguments = self.arguments(args)
        params, batch = as_arrays("params", params), as_arrays("batch", batch)
        batch, bound = (self.rule if rule is None else rule).of_units(batch)
        n = count_units(batch)
        for name, value in (("mask", mask), ("weight", weight), ("bound", bound)):
            if value is not None:
                _check_number_per_unit(name, value, n)
        keys = None if rng is None else _unit_keys(rng, n)
        real = jnp.ones((n,), bool) if mask is None else real_units(mask)
        if n == 0:  # solve padding instead, which has all shapes and contributes nothing
            n = 1 if self.unit_sharding is None else self.unit_sharding.mesh.size
            weight = None if weight is None else jnp.asarray(weight)
            batch, weight, bound = _padding((batch, weight, bound), n)
            keys = None if rng is None else _unit_keys(_one_key(rng), n)
            real = jnp.zeros((n,), bool)
        axes = varying_axes(batch, real, keys, weight, bound)
        if split := varying_axes(params) - axes:
            raise BadInputError(
                f"clipped_grad: parameters vary over the mesh axes {sorted(split)}, but units do "
                "not, so norms would miss what other devices hold: leave those axes to automatic "
                "sharding"
            )
        params, batch = vary(params, axes), vary(batch, axes)
        real, keys, weight, bound = vary((real, keys, weight, bound), axes)

        flat: list[Any]
        tree: Any
        flat, tree = jax.tree_util.tree_flatten_with_path(params)
        train = trainable_mask(params, self.trainable)
        everything = [x for _, x in flat]

        @traced_once
        def loss(leaves: Any, unit: Any) -> tuple[jax.Array, PyTree]:
            example, key = unit
            trained = iter(leaves)
            full = [next(trained) if t else x for t, x in zip(train, everything)]
            extra = {} if key is None else {"rng": key}
            out = self.loss_fn(*rebuild_arguments(tree.unflatten(full), example), **extra)
            return _value_and_aux(out, self.has_aux)

        leaves = [x for t, x in zip(train, everything) if t]
        check_isolated(loss, leaves, (batch, keys), axes)

        def rebuild(sums: list[jax.Array]) -> PyTree:
            trained = iter(sums)
            return tree.unflatten([next(trained) if t else None for t in train])

        problem = ClippingProblem(
            loss=loss,
            leaves=leaves,
            names=[leaf_name(path) for t, (path, _) in zip(train, flat) if t],
            units=(batch, keys),
            real=real,
            weight=weight,
            bound=bound,
            rule=self.rule if rule is None else rule,
            sharding=self.unit_sharding,
            pieces=self.pieces,
            gradient_sharding=self.gradient_sharding,
        )
        return problem, rebuild


def _check_number_per_unit(name: str, value: Any, n: int) -> None:
    kind = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    numbers = (jnp.bool_, jnp.integer, jnp.floating)
    if np.shape(value) != (n,) or not any(jnp.issubdtype(kind, k) for k in numbers):
        raise BadInputError(
            f"clipped_grad: {name} has shape {np.shape(value)} and holds {kind}, but the batch has "
            f"{n} units, so it must have shape ({n},) and hold bool, int or float"
        )


def _value_and_aux(out: Any, has_aux: bool) -> tuple[jax.Array, PyTree]:
    """The float32 scalar value and the auxiliary output of the loss of one unit."""
    pair = isinstance(out, (tuple, list)) and len(out) == 2
    if has_aux and not pair:
        raise BadInputError(
            "clipped_grad: with has_aux=True the loss of one unit must return (value, aux), but it "
            f"returns {_described(out)}: return both, or omit has_aux"
        )
    value, aux = out if has_aux else (out, None)
    if not jax.tree_util.all_leaves([value]) or jnp.shape(value) != ():
        raise BadInputError(
            f"clipped_grad: the loss of one unit must be a scalar, but it is {_described(value)}"
            + (": set has_aux=True if the second is auxiliary" if pair and not has_aux else "")
        )
    return jnp.asarray(value).astype(jnp.float32), aux


def _described(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return f"a {type(x).__name__}" if shape is None else f"an array of shape {shape}"


def _padding(tree: PyTree, n: int) -> PyTree:
    """``n`` units of zeros with the shapes of an empty batch."""

    def one(x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(_one_key(x), (n, *x.shape[1:]))
        return jnp.zeros((n, *x.shape[1:]), x.dtype)

    return jax.tree.map(one, tree)


def _one_key(rng: jax.Array) -> jax.Array:
    """A key with the implementation of ``rng``, for padding."""
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return jax.random.key(0, impl=jax.random.key_impl(rng))
    return jnp.zeros(rng.shape[-1:], rng.dtype)


def _unit_keys(rng: jax.Array, n: int) -> jax.Array:
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    kind = str(jax.random.key_impl(rng) if typed else jax.config.values["jax_default_prng_impl"])
    if "threefry" not in kind:
        raise BadInputError(
            f"clipped_grad: rng is a key of {kind}, which draws for all units together under vmap, "
            "so that one unit would change the others: give a threefry2x32 key "
            "(jax.random.key(seed, impl='threefry2x32'))"
        )
    single = rng.ndim == (0 if typed else 1)
    if single:
        return jax.vmap(functools.partial(jax.random.fold_in, rng))(jnp.arange(n))
    if rng.shape[0] != n:
        raise BadInputError(
            f"clipped_grad: rng holds {rng.shape[0]} keys for {n} units: give one key per unit"
        )
    return rng


def clipped_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    clip_norm: float | PyTree | None = None,
    rule: Rule | None = None,
    normalize_by: float = 1.0,
    strategy: Strategy = "auto",
    trainable: PyTree | Callable[[str], bool] | None = None,
    microbatch_size: int | None = None,
    platform: str | None = None,
    norm_method: Method | None = None,
    memory_limit: float | None = None,
    unit_sharding: NamedSharding | None = None,
    pieces: Callable[[PyTree], PyTree] | None = None,
    gradient_sharding: Callable[[str, tuple[int, ...]], NamedSharding] | None = None,
    kernel: bool | None = None,
) -> ClippedGrad:
    """Clips the gradient of each unit and sums them, without forming them where that is faster.

    Formal guarantee:
      Take two batches that differ in one unit: in the second batch it is missing (or is padding, or
      another unit is in its place). Their sums differ by at most ``sensitivity(neighboring)``, in
      the Euclidean norm over all leaves together, whatever the units hold. The reason is that the
      rule gets a norm that is no smaller than the norm of what is summed, and that a unit's
      contribution depends on that unit, its key and the other arguments alone: a loss in which JAX
      could mix units is refused. Sums are float32, which rounds (``docs/internals/clipping.md``
      says by how much).

      There is no guarantee for values of single units (``norms``, ``losses``, ``aux``, ...), for a
      loss that captures units' data instead of taking them as arguments, or against those who know
      the one key for all units (``rng``).

      | edge case | what happens |
      |---|---|
      | no units (n = 0) | the sum is zeros |
      | padding (the mask is zero or NaN) | contributes exactly zero, whatever it holds |
      | a NaN or an infinity in a gradient | its unit contributes zero, and is ``nonfinite`` |
      | a gradient whose squared norm overflows float32 | contributes zero, is ``nonfinite`` |
      | a gradient of zero | contributes zero |
      | integer leaves of trained arguments | are not differentiated: None in ``sum`` |
      | integer leaves of a batch | reach the loss unchanged |
      | parameters in bfloat16 or float16 | all results are float32; C holds for what is summed |
      | a traced clip norm that is NaN, infinite or <= 0 | the sum is zeros |

      (With a rule that clips each parameter separately, such as ``PerLayer``, only the parameters
      that are not finite are zeroed.)

    Args:
      loss_fn: ``(params, example) -> scalar`` (or ``(scalar, aux)``) for ONE unit; takes ``rng=``
        if keys are given. If a unit is a user, its arrays have an axis of the user's examples.
      argnums: which positional arguments are trained, as in ``jax.grad``: for an int, ``sum`` is
        like that argument, for a tuple it is a tuple. All other arguments are batches; the loss
        closes over anything else. Names of parameters start with their index: ``"1/kernel"``.
      has_aux: whether the loss returns ``(value, aux)``.
      clip_norm: C, short for ``rule=Flat(C)``. A tree of clip norms that is a prefix of the
        parameters clips each part separately (``PerGroup``).
      rule: how norms become weights; give this or ``clip_norm``.
      normalize_by: constant by which the sum is divided, such as the expected number of units.
      strategy: ``"vmap"`` (reference; memory n x parameters), ``"scan"`` (over microbatches of
        units), ``"ghost"`` (book-keeping, no per-unit gradients), or ``"auto"`` (the fastest by
        estimate).
      trainable: which parameters are trained: a function of their name, or a tree of bools that
        is a prefix of the parameters; default: all floating-point parameters.
      microbatch_size: units in a microbatch, over all parts of ``unit_sharding``; default: one of
        each part for ``"scan"``, else all.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``, whose speeds and rounding are assumed (at least
        the rounding of every attached device); default: the backend.
      norm_method: how ``"ghost"`` computes norms where it can; default: the cheapest method.
      memory_limit: most bytes that ``"auto"`` lets book-keeping hold; default: half of the device.
      unit_sharding: under automatic sharding of parameters (fully sharded, tensor parallel), how
        the batch's leading axis is split. It keeps a unit's records on the unit's devices, so that
        no activations are sent for norms and sums. It is not needed where only units are split.
      pieces: cuts a unit that is too large to be processed at once into pieces (a pytree of arrays
        [pieces, ...]) whose losses add up to the unit's. Their gradients are accumulated in float32
        before the norm is taken, with ``"scan"`` or ``"vmap"``. A dictionary may have an entry
        ``"there"``, bool [pieces]: with one unit at a time, pieces after the last True are skipped.
      gradient_sharding: ``(name, shape) -> NamedSharding``, how the gradient of a unit in pieces is
        split under automatic sharding, where all devices work on one unit.
      kernel: whether ``"ghost"`` forms gradients by a kernel of its own where it can (A100, H100,
        H200 and TPUs); default: where that is estimated to be faster.

    Returns:
      A ``ClippedGrad``.

    Raises:
      BadInputError: arguments are missing or contradictory.

    Examples:
      >>> import jax.numpy as jnp
      >>> import dpfl_jax as dpfl
      >>> grad = dpfl.clipped_grad(lambda w, x: (x @ w) ** 2, clip_norm=1.0)
      >>> clipped = grad(jnp.ones(2), jnp.array([[0.5, 0.0], [0.0, 2.0]]))  # two units
      >>> print(clipped.sum, clipped.norms)
      [0.5 1. ] [0.5 8. ]
      >>> grad.sensitivity("add-or-remove")
      1.0
    """
    if (clip_norm is None) == (rule is None):
        raise BadInputError("clipped_grad: give either clip_norm or rule")
    try:
        several = isinstance(argnums, Sequence)
        places = tuple(map(operator.index, argnums)) if several else operator.index(argnums)  # type: ignore[arg-type]
    except TypeError as error:
        raise BadInputError(
            f"clipped_grad: argnums is {argnums!r}, but it must be an int or a tuple of ints"
        ) from error
    one_of("clipped_grad: strategy", strategy, STRATEGIES)
    at_least("clipped_grad: microbatch_size", microbatch_size, 1)
    at_least("clipped_grad: normalize_by", normalize_by, 1e-30, most=1e30)
    if pieces is not None and (strategy == "ghost" or has_aux):
        raise BadInputError(
            "clipped_grad: units in pieces need strategy='scan', 'vmap' or 'auto', and a loss "
            "without auxiliary output"
        )
    if rule is None:
        single = jax.tree_util.all_leaves([clip_norm])
        rule = Flat(clip_norm) if single else PerGroup.of_tree(clip_norm)  # type: ignore[arg-type]
    return ClippedGrad(
        loss_fn,
        places,
        has_aux,
        rule,
        strategy,
        trainable,
        microbatch_size,
        platform,
        norm_method,
        memory_limit,
        unit_sharding,
        pieces,
        gradient_sharding,
        float(normalize_by),
        kernel,
    )


def clipped_fun(
    fun: Callable[..., PyTree], *, strategy: Literal["vmap", "scan"] = "vmap", **options: Any
) -> Callable[..., ClippedGradResult]:
    """Clips the value of any function for each unit and sums the values.

    Args:
      fun: ``(params, *example) -> pytree of floating-point arrays`` for ONE unit; takes ``rng=`` if
        keys are given.
      strategy: as in ``clipped_grad``: all units at once, or one ``microbatch_size`` at a time.
      **options: options of ``clipped_grad`` (``clip_norm`` or ``rule``, ``normalize_by``,
        ``microbatch_size``).

    Returns:
      A function ``(params, *batch, mask=None, rng=None, weight=None) -> ClippedGradResult``, whose
      ``sum`` has the structure of what ``fun`` returns, float32, and whose losses are zero. It has
      the method ``ClippedGrad.sensitivity``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import dpfl_jax as dpfl
      >>> bounded = dpfl.clipped_fun(lambda _, x: x, clip_norm=1.0)
      >>> print(bounded(None, jnp.array([[4.0, 0.0], [0.0, 0.5]])).sum)
      [1.  0.5]
    """
    template = clipped_grad(fun, 0, False, strategy=strategy, **options)

    def clipped(params: PyTree, *batch: PyTree, **given: Any) -> ClippedGradResult:
        def loss(weights: PyTree, *example: PyTree, **key: Any) -> jax.Array:
            # The gradient of an inner product with respect to one side is the other side.
            values = fun(params, *example, **key)
            products = jax.tree.map(lambda w, x: jnp.sum(w * x), weights, values)
            return sum(jax.tree.leaves(products), start=jnp.zeros(()))

        batch = as_arrays("batch", batch)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
        key = {} if given.get("rng") is None else {"rng": jax.random.key(0)}
        like = jax.eval_shape(fun, params, *one, **key)
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(like)):
            raise BadInputError(
                "clipped_fun: the function must return floating-point arrays only, but it returns "
                f"{jax.tree.map(lambda x: str(x.dtype), like)}: convert them (x.astype(float))"
            )
        weights = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        gradient = dataclasses.replace(template, loss_fn=loss)
        return gradient(weights, *batch, **given)

    clipped.sensitivity = template.sensitivity  # type: ignore[attr-defined]
    return clipped


def unclipped_sum(
    loss_fn: Callable[..., jax.Array], trainable: Trainable = None
) -> Callable[..., ClippedGradResult]:
    """Returns ``(params, batch, mask, weight=1) -> ClippedGradResult`` without any clipping.

    Args:
      loss_fn: loss of one example.
      trainable: which parameters are trained.
    """

    def total(
        trained: PyTree, frozen: PyTree, batch: PyTree, mask: jax.Array, weight: Any
    ) -> tuple[jax.Array, jax.Array]:
        params = join(trained, frozen)
        losses = jax.vmap(lambda example: loss_fn(params, example))(batch)
        losses = jnp.where(mask, losses, 0.0)
        return (weight * losses).sum(), losses

    def summed(
        params: PyTree, batch: PyTree, mask: jax.Array, weight: Any = 1.0
    ) -> ClippedGradResult:
        trained, frozen = split(params, trainable)
        gradient = jax.value_and_grad(total, has_aux=True)
        (_, losses), grad = gradient(trained, frozen, batch, mask, weight)
        grad = jax.tree.map(lambda g: g.astype(jnp.float32), grad)
        weights = mask.astype(jnp.float32)
        return ClippedGradResult(
            sum=grad,
            norms=jnp.zeros_like(weights),
            weights=weights,
            losses=losses,
            nonfinite=jnp.logical_and(mask, ~jnp.isfinite(losses)),
            aux=None,
            leaf_norms=jax.tree.map(lambda _: jnp.zeros_like(weights), grad),
        )

    return summed
