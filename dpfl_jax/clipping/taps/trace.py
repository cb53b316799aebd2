"""The search for sites in the jaxpr of a one-unit loss: equations where a parameter meets data."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
from jax.extend.core import Literal

from dpfl_jax.clipping.taps.views import View, extend_view

LOOKUPS = frozenset({"gather", "dynamic_slice"})
INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
_ELEMENTWISE = frozenset({"add", "add_any", "mul", "sub", "div"})
REMAT = frozenset({"checkpoint", "remat", "remat2"})


@dataclasses.dataclass(frozen=True)
class Site:
    """One equation in which a parameter meets data, with its tap.

    Attributes:
      index: number of the tap; sites whose outputs are only added to each other share a tap.
      view: the parameter, as this equation sees it.
      primitive: the equation's primitive.
      params: the equation's parameters.
      position: index of the operand that is the parameter.
      operands: for each other operand, the key of its record.
      inputs: abstract values of all operands, inside the loops.
      out: abstract value of the output, inside the loops.
      lengths: lengths of the enclosing scans, outermost first.
      summed: whether looked-up rows are summed over their positions before the tap, so that all
        positions have one gradient.
      tapped: whether the tap is at this site; False if it is at another site that shares it.
      early: whether the backward pass forms the parameter's gradient here, so that nothing is
        recorded; the tap's token then has the shape of the view.
    """

    index: int
    view: View
    primitive: Any
    params: dict[str, Any]
    position: int
    operands: tuple[Hashable, ...]
    inputs: tuple[Any, ...]
    out: Any
    lengths: tuple[int, ...]
    summed: bool = False
    tapped: bool = True
    early: bool = False


@dataclasses.dataclass
class TapPlan:
    """Where to tap and what to record in one jaxpr (in one calling context).

    Attributes:
      sites: equations to tap, by position.
      inner: plans for the inner jaxprs of equations, by position.
      records: variables whose values are recorded, by key.
      number: identifies the plan.
      depth: number of enclosing scans.
      recomputed: whether this is the inside of a ``jax.checkpoint`` that saves nothing.
      pinned: whether bfloat16 records, and gradients at taps, are rounded where they are made.
      looked_up: outputs of gathers (after the walk: those read once), with the plan and the
        position of the gather.
    """

    number: int
    depth: int
    recomputed: bool = False
    pinned: bool = False
    sites: dict[int, Site] = dataclasses.field(default_factory=dict)
    inner: dict[int, TapPlan] = dataclasses.field(default_factory=dict)
    records: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    looked_up: dict[Any, tuple[TapPlan, int]] = dataclasses.field(default_factory=dict)

    def all_sites(self) -> list[Site]:
        """Returns the sites of this plan and its inner plans."""
        nested = [s for plan in self.inner.values() for s in plan.all_sites()]
        return [*self.sites.values(), *nested]

    def changed(self, early: frozenset[int], pinned: bool) -> TapPlan:
        """Returns the plan in which the backward pass forms the gradients of the leaves ``early``.

        Args:
          early: indices of leaves.
          pinned: as in the attributes.
        """

        def copied(plan: TapPlan) -> TapPlan:
            sites = {
                at: dataclasses.replace(s, early=s.view.leaf in early)
                for at, s in plan.sites.items()
            }
            inner = {at: copied(below) for at, below in plan.inner.items()}
            return dataclasses.replace(plan, sites=sites, inner=inner, pinned=pinned)

        def read_only(plan: TapPlan, keys: set[Hashable]) -> None:
            plan.records = {key: v for key, v in plan.records.items() if key in keys}
            for below in plan.inner.values():
                read_only(below, keys)

        plan = copied(self)
        read_only(plan, {key for s in plan.all_sites() if not s.early for key in s.operands})
        return plan

    def all_records(self) -> dict[Hashable, int]:
        """Returns ``{key: number of enclosing scans}`` for records of this and inner plans."""
        out = dict.fromkeys(self.records, self.depth)
        for plan in self.inner.values():
            out |= plan.all_records()
        return out


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The plan for a loss, and why some leaves have per-unit copies instead of taps.

    Attributes:
      plan: the plan for the whole jaxpr.
      copied: leaf index -> reason for copies.
    """

    plan: TapPlan
    copied: dict[int, str]


class _NeedsCopyError(Exception):
    """A leaf is used in a way that no rule covers."""

    def __init__(self, leaf: int, reason: str) -> None:
        super().__init__(reason)
        self.leaf, self.reason = leaf, reason


def analyse(jaxpr: Any, num_leaves: int, copied: dict[int, str] | None = None) -> Analysis:
    """Plans the taps of a one-unit loss.

    Args:
      jaxpr: the loss's jaxpr; its first ``num_leaves`` inputs are the trainable leaves.
      num_leaves: number of trainable leaves.
      copied: leaves that get per-unit copies whatever their use, with the reason.
    """
    copied = dict(copied or {})
    while True:
        views = [
            None if i in copied else View.of_leaf(i, tuple(v.aval.shape))
            for i, v in enumerate(jaxpr.invars[:num_leaves])
        ]
        walker = _Walker([math.prod(v.aval.shape) for v in jaxpr.invars[:num_leaves]])
        try:
            rest: list[View | None] = [None] * (len(jaxpr.invars) - num_leaves)
            plan, outputs = walker.walk(jaxpr, [*views, *rest], ())
            if outputs[0] is not None:
                raise _NeedsCopyError(outputs[0].leaf, "the loss is the parameter itself")
        except _NeedsCopyError as error:
            copied[error.leaf] = error.reason
            continue
        return Analysis(plan, copied)


class _Walker:
    """Walks jaxprs and follows views of parameters; raises if a leaf needs copies."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.num_sites = 0
        self.num_plans = 0

    def walk(
        self, jaxpr: Any, inputs: Sequence[View | None], lengths: tuple[int, ...]
    ) -> tuple[TapPlan, list[View | None]]:
        """Plans one jaxpr.

        Args:
          jaxpr: an open jaxpr.
          inputs: for each input, the view of a parameter that it is, or None.
          lengths: lengths of the enclosing scans.

        Returns:
          The plan, and for each output the view that it is, or None.
        """
        plan = TapPlan(number=self.num_plans, depth=len(lengths))
        self.num_plans += 1
        views = {v: view for v, view in zip(jaxpr.invars, inputs) if view is not None}

        def view_of(v: Any) -> View | None:
            return None if isinstance(v, Literal) else views.get(v)

        reads = collections.Counter(v for v in jaxpr.outvars if not isinstance(v, Literal))
        for eqn in jaxpr.eqns:
            reads.update(v for v in eqn.invars if not isinstance(v, Literal))
        for position, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name == "reduce_sum" and view_of(eqn.invars[0]) is None:
                _tap_the_sum(plan, position, eqn, reads)
            seen = [view_of(v) for v in eqn.invars]
            used = [(i, view) for i, view in enumerate(seen) if view is not None]
            # An equation with an effect may pass a parameter on through a Ref that it writes to.
            inexact = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
            if not used or not (eqn.effects or inexact):
                continue
            name = eqn.primitive.name
            if name == "stop_gradient":
                continue
            outputs: list[View | None] | list[View] | None
            if name in INLINED or name in REMAT:
                inner, outputs = self.walk(inner_jaxpr(eqn), seen, lengths)
                inner.recomputed = name in REMAT and eqn.params["policy"] is None
                plan.inner[position] = inner
                for v, w in zip(eqn.outvars, inner_jaxpr(eqn).outvars):
                    if name in INLINED and not isinstance(w, Literal) and w in inner.looked_up:
                        plan.looked_up[v] = inner.looked_up[w]
            elif name == "scan":
                plan.inner[position] = self._scan(eqn, seen, lengths)
                outputs = None
            elif len(used) > 1:
                self._copy(used, f"`{name}` combines two parameters")
            elif (outputs := extend_view(used[0][1], eqn)) is None:
                where, view = used[0]
                if not has_rule(eqn, where):
                    small = name in _ELEMENTWISE
                    why = "is elementwise: copies cost no more" if small else "has no rule"
                    self._copy(used, f"`{name}` {why}")
                plan.sites[position] = self._site(plan, eqn, where, view, lengths)
                if name == "gather":
                    plan.looked_up[eqn.outvars[0]] = plan, position
            views.update((v, w) for v, w in zip(eqn.outvars, outputs or ()) if w is not None)
        plan.looked_up = {v: x for v, x in plan.looked_up.items() if reads[v] == 1}
        _share_taps(plan, jaxpr, reads)
        return plan, [view_of(v) for v in jaxpr.outvars]

    def _site(
        self, plan: TapPlan, eqn: Any, where: int, view: View, lengths: tuple[int, ...]
    ) -> Site:
        operands: list[Hashable] = []
        for i, v in enumerate(eqn.invars):
            if i != where:
                key: Hashable = (plan.number, len(plan.records))
                for known, var in plan.records.items():
                    if var is v:
                        key = known
                plan.records[key] = v
                operands.append(key)
        self.num_sites += 1
        return Site(
            index=self.num_sites - 1,
            view=view,
            primitive=eqn.primitive,
            params=dict(eqn.params),
            position=where,
            operands=tuple(operands),
            inputs=tuple(v.aval for v in eqn.invars),
            out=eqn.outvars[0].aval,
            lengths=lengths,
        )

    def _scan(self, eqn: Any, seen: list[View | None], lengths: tuple[int, ...]) -> TapPlan:
        body = eqn.params["jaxpr"].jaxpr
        consts, carried = scan_counts(eqn.params)
        inputs: list[View | None] = []
        for i, view in enumerate(seen):
            if view is None:
                inputs.append(None)
            elif i >= consts + carried:
                inputs.append(view.sliced_by_scan())
            elif i < consts or body.outvars[i - consts] is body.invars[i]:
                inputs.append(view.held_by_scan())
            else:
                self._copy([(i, view)], "a scan carries and changes it")
        plan, outputs = self.walk(body, inputs, (*lengths, eqn.params["length"]))
        for k, view in enumerate(outputs):
            unchanged = k < carried and body.outvars[k] is body.invars[consts + k]
            if view is not None and (k >= carried or not unchanged):
                self._copy([(k, view)], "a scan returns it")
            # An unchanged carry that is a view must not be used as data after the scan.
            if view is not None and unchanged and type(eqn.outvars[k]).__name__ != "DropVar":
                self._copy([(k, view)], "a scan carries it and it is used afterwards")
        return plan

    def _copy(self, used: Sequence[tuple[int, View]], reason: str) -> NoReturn:
        raise _NeedsCopyError(min((v.leaf for _, v in used), key=lambda i: self.sizes[i]), reason)


def _tap_the_sum(plan: TapPlan, position: int, eqn: Any, reads: Mapping[Any, int]) -> None:
    """Moves the tap from a gather to the sum over all its positions, if that alone reads it."""
    (v,) = eqn.invars
    if isinstance(v, Literal) or v not in plan.looked_up or reads[v] != 1:
        return
    holder, at = plan.looked_up[v]
    site = holder.sites[at]
    slices = site.params["dimension_numbers"].offset_dims
    if {*eqn.params["axes"]} == {*range(len(site.out.shape))} - {*slices}:
        del holder.sites[at]
        plan.sites[position] = dataclasses.replace(site, out=eqn.outvars[0].aval, summed=True)


def _share_taps(plan: TapPlan, jaxpr: Any, reads: Mapping[Any, int]) -> None:
    """Gives products that are only added up (``x @ A + h @ B``) one tap: they share a gradient.

    A loop would store the gradient once per tap; elsewhere compilers merge the copies.
    """
    made = {jaxpr.eqns[at].outvars[0]: [at] for at in plan.sites}
    for eqn in jaxpr.eqns:
        terms = [v for v in eqn.invars if not isinstance(v, Literal)]
        if eqn.primitive.name not in ("add", "add_any") or len({*terms}) < 2:
            continue
        alike = len({(v.aval.shape, v.aval.dtype) for v in [*terms, *eqn.outvars]}) == 1
        if alike and all(v in made and reads[v] == 1 for v in terms):
            first, *others = [at for v in terms for at in made[v]]
            for at in others:
                plan.sites[at] = dataclasses.replace(
                    plan.sites[at], index=plan.sites[first].index, tapped=False
                )
            made[eqn.outvars[0]] = [first, *others]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carried."""
    if "ft_in" in params:  # JAX 0.12
        consts, carried, _ = params["ft_in"].elts
        return len(consts), len(carried)
    return params["num_consts"], params["num_carry"]


def inner_jaxpr(eqn: Any) -> Any:
    """Returns the open jaxpr that an equation calls."""
    inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return getattr(inner, "jaxpr", inner)


def has_rule(eqn: Any, where: int) -> bool:
    """Returns whether the gradient of operand ``where`` factors (see ``factors``)."""
    name, params = eqn.primitive.name, eqn.params
    floats = [v for i, v in enumerate(eqn.invars) if name not in LOOKUPS or i == 0]
    if not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*floats, *eqn.outvars)):
        return False
    if name == "dot_general":
        return True
    if name in LOOKUPS:
        return where == 0 and embedding_axis(eqn.invars[0].aval.shape, params) is not None
    if name == "conv_general_dilated":
        return where == 1 and params["batch_group_count"] == 1
    return False


def embedding_axis(shape: tuple[int, ...], params: dict[str, Any]) -> int | None:
    """Returns the axis along which a lookup takes whole slices, or None for other lookups."""
    numbers, sizes = params.get("dimension_numbers"), tuple(params["slice_sizes"])
    cut = [i for i, size in enumerate(shape) if size != sizes[i]]
    if numbers is not None:  # a gather
        looked = tuple(numbers.start_index_map)
        if numbers.operand_batching_dims or not set(numbers.collapsed_slice_dims) <= set(looked):
            return None
        if len(looked) > 1 and "CLIP" not in str(
            params["mode"]
        ):  # a whole axis may be out of range
            return None
        cut = cut or list(looked)
        if not set(cut) <= set(looked) or not set(numbers.collapsed_slice_dims) <= set(cut):
            return None
    return cut[0] if len(cut) == 1 and sizes[cut[0]] == 1 else None
