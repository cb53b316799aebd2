"""A mechanism's own release on designed gradients alone: no training, many trials in one run.

Sampler, clipping, noise, divisor and keys are those that train: nothing here is written again. The
loss is linear, so that each unit's gradient is what is designed: long enough to be clipped, and,
one unit each, along a direction that no other unit has. So every unit is a trial of its own.

Parameters move from one release to the next, and every gradient turns round with them. What was
released is turned back, so that a unit's shift is the same in all steps. Noise that is added twice
then has two signs, and is gone from the sum of the two.

Adjacency is what the event says: units that are out are not in the data. Rates of sampling stay
those of the plan, which are public constants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dpfl_jax.accounting import REPLACE, cells, events
from dpfl_jax.audit.trials import LONG, Trials
from dpfl_jax.clipping import Adaptive
from dpfl_jax.config.execution import Execution
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import ArrayStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.engine import make_release
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.isrl.message import MessageSpec, SiloData, make_messages
from dpfl_jax.federation.isrl.privacy import SiloNoise
from dpfl_jax.federation.isrl.schedule import make_schedule
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.mechanisms import Calibrated, Mechanism
from dpfl_jax.mechanisms.batches import example_loss, step_arguments
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mechanisms.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey

PyTree = Any
_MOST_DIRECTIONS = 2000
_BESIDE = 16  # steps of correlated noise that are looked at one by one


def _start(directions: int, turn: float = 1.0) -> PyTree:
    """Parameters: two leaves, as what is not clipped is often the second; and ``turn``, 1 or -1."""
    return {"weight": jnp.zeros(directions), "bias": jnp.zeros(directions), "turn": jnp.array(turn)}


def _loss(params: PyTree, example: PyTree) -> jax.Array:
    """Linear; its gradient is ``size`` along a direction, half of it (squared) in each leaf.

    It turns round with ``turn``, which is not trained.
    """
    both = (params["weight"] + params["bias"]) / math.sqrt(2.0)
    along = both @ jax.nn.one_hot(example["direction"], both.shape[0])
    return jax.lax.stop_gradient(params["turn"]) * example["size"] * along


def _along(tree: PyTree) -> jax.Array:
    """What a gradient (or sum) has along each direction."""
    return (tree["weight"] + tree["bias"]) / math.sqrt(2.0)


def _runs(trials: int, each: int) -> int:
    if trials < 200:
        raise BadInputError(f"{trials} trials are asked for, but an audit needs 200 or more")
    return math.ceil(trials / each)


def refuse_filtered(mechanism: Mechanism) -> None:
    """Raises BadInputError if users have budgets of their own, of which no loss is known."""
    if isinstance(mechanism.clip, Adaptive):
        raise BadInputError(
            "mechanism.clip is adaptive, which clips to another norm at each step: audit the "
            "mechanism with the clip rule normalized, which costs what this one does"
        )
    if mechanism.budget is not None:
        raise BadInputError(
            f"of mechanism.kind={mechanism.kind} a Renyi divergence is known, and no loss that an "
            "attack could be held against: audit the same without mechanism.budget at as much "
            "noise, for the least_steps steps that everybody takes part in"
        )


# ---- central -----------------------------------------------------------------------------------


def central(
    calibrated: Calibrated,
    key: RootKey,
    *,
    trials: int = 20_000,
    directions: int | None = None,
    others: int = 0,
    mesh: Mesh | None = None,
    execution: Execution | None = None,
) -> Trials:
    """Trials of a central mechanism.

    Args:
      calibrated: the mechanism with its noise, at the rates of its population.
      key: of coins, sampling and noise; no run's.
      trials: units that are in or out, at least.
      directions: units of one run; default some that sampling can tell from each other.
      others: units of every run that are always in the data, all along one more direction.
      mesh: default: one device.
      execution: how steps are computed.
    """
    refuse_filtered(calibrated.mechanism)
    rate, steps = calibrated.scheme.sampling_prob, calibrated.steps
    mechanism = calibrated.at_own_rates()
    calibrated = dataclasses.replace(calibrated, mechanism=mechanism)
    units = min(trials, directions or max(200, min(_MOST_DIRECTIONS, round(400 / rate))))
    mesh = data_parallel_mesh(jax.devices()[:1]) if mesh is None else mesh
    execution = Execution(microbatch_size=64, strategy="vmap") if execution is None else execution
    params, size = _start(units + 1), np.float32(LONG * mechanism.clip_norm)
    examples = mechanism.group_size
    schema = Schema.arrays({"direction": np.int32(0), "size": size}, leading_axis=False)

    def store(inside: np.ndarray) -> ArrayStore:
        who = np.concatenate([np.flatnonzero(inside), np.full(others, units)]).astype(np.int32)
        if not len(who):
            who = np.array([-1], np.int32)  # somebody without a gradient
        rows = np.repeat(who, examples)
        made = {"direction": rows, "size": np.full(len(rows), size)}
        offsets = np.arange(len(who) + 1) * examples
        return ArrayStore(schema, [f"{i:07d}" for i in range(len(who))], offsets, schema.pack(made))

    loss = example_loss(_loss, store(np.ones(units, bool)))
    summed = jax.jit(
        clipped_sum_over_microbatches(
            mechanism, loss, mesh, strategy=execution.strategy, **execution.cut
        )
    )
    noise = calibrated.noise_transform()
    unit = calibrated.noise_stddev / mechanism.participation.divisor

    # Correlated noise is for units whose gradients all point one way, their worst case. They sit
    # out steps, though: noise that is added twice is seen in the first few as they are.
    alone = mechanism.noise.keys_per_step == 1 and not jax.tree.leaves(noise.init(params).memory)

    @jax.jit
    def released(total: PyTree, state: Any, noise_key: Any) -> tuple[jax.Array, Any]:
        gradient, state = noise.update(total, state, noise_key=noise_key)
        return _along(gradient) / unit, state

    coins, seen, beside = [], [], []
    for run in range(_runs(trials, units)):
        inside = key.numpy("audit-coins", run).random(units) < 0.5
        plan = Plan(calibrated, store(inside), execution, mesh)
        own, state, rows = key.child("audit-run", run), noise.init(params), []
        for batch in plan.pipeline(plan.sampler(own)).iterate(0, steps):
            turn = (-1.0) ** batch.step if alone else 1.0
            now = params | {"turn": jnp.array(turn)}
            total, _ = summed(now, *step_arguments(mechanism, batch), None)
            row, state = released(total, state, plan.noise_key(own, batch.step))
            rows.append(turn * row)
        found = np.asarray(jnp.stack(rows, axis=1))
        coins.append(inside)
        seen.append(
            cells.audit_statistic(calibrated.matrix, found[:units], inside, plan.sampler(own))
        )
        more = [np.broadcast_to(found[units:], (units, steps))] if others else []
        if not alone:
            more.append(found[:units, :_BESIDE])
        if more:
            beside.append(np.hstack(more))
    return Trials(
        inside=np.concatenate(coins),
        seen=np.concatenate(seen),
        event=calibrated.event(),
        delta=calibrated.delta,
        beside=np.concatenate(beside) if beside else None,
        name=mechanism.kind,
        how=f"{len(coins)} simulated runs of {steps} steps with {units} canaries each",
    )


# ---- silos -------------------------------------------------------------------------------------


def silos(
    plans: Sequence[SiloPlan],
    rounds: int,
    delta: float,
    key: RootKey,
    *,
    trials: int = 20_000,
    rate: float | None = None,
    other: float | None = None,
    cohort: Any = None,
    against: int = 0,
) -> Trials:
    """Trials of what silos release, every local step of theirs.

    Args:
      plans: the silos that hold one unit, with their noise.
      rounds: R.
      delta: of the claim.
      key: of coins, sampling and noise; no run's.
      trials: units that are in or out, at least.
      rate: of the records, where they have rates of their own (rPDP).
      other: rate of every second record, which is no trial: it must not become its neighbour's.
      cohort: law by which one silo takes part in a round; None: in all.
      against: records of others in every silo, whose gradients are opposite to the unit's, all of
        them drawn at every step; it is then the only trial of its silos.

    Beside the silos that hold the units there is one that holds none: what it sends must not help.
    """
    first = plans[0].mechanism
    if first.participation.one_unit:  # one gradient of all records, which the unit's turns round
        against = 1
    prob = (
        1.0 if against else max(p.mechanism.participation.sampling_prob_of(p.facts) for p in plans)
    )
    units = 1 if against else max(200, min(_MOST_DIRECTIONS, round(200 / (rate or prob)), trials))
    groups, each = min(trials, 200) if against else 1, len(plans) + 1
    every = 1 if other is None else 2  # of so many units one is a trial
    units *= every
    steps = max(plan.local_steps for plan in plans)
    size = LONG * first.clip_norm
    made = [_designed(plan, against) for plan in (*plans, plans[0])]
    mesh, recorder = data_parallel_mesh(jax.devices()[:1]), _recorder(units, steps)
    release = make_release(made[0].mechanism, _loss, recorder, mesh, keep_state=True)
    start = recorder.init(_start(units))
    coins, seen, beside = [], [], []
    for run in range(_runs(trials, units // every * groups)):
        own = key.child("audit-run", run)
        inside = key.numpy("audit-coins", run).random((groups, units)) < 0.5
        data = _records(made, inside, size, against)
        if rate is not None:
            rates = np.where(data.subjects % 2 == 0, rate, rate if other is None else other)
            data = data.with_rates(rates)
        all_plans = tuple(made * groups)
        law = None if cohort is None else dataclasses.replace(cohort, population=len(all_plans))
        federation = Federation(all_plans, rounds, len(plans), law)
        builder = RoundBuilder(federation, data, own, mesh, microbatch_size=64)
        sent = np.full((groups * each, rounds, steps, units), np.nan, np.float32)
        for r, pieces in builder.prefetch(0, rounds):
            params = _start(units, (-1.0) ** r)
            for piece in pieces:
                states = jax.tree.map(
                    lambda x: jnp.broadcast_to(x, (builder.size, *x.shape)),  # noqa: B023
                    start,
                )
                _, states, _ = release(params, states, piece.chunk)
                sent[piece.silos, r] = np.asarray(states["seen"])[: len(piece.silos)]
        found = sent.reshape(groups, each, rounds, steps, units).transpose(0, 4, 1, 2, 3)[
            :, ::every
        ]
        inside = inside[:, ::every].ravel()
        columns = []
        for i, plan in enumerate(made):
            drawn = plan.mechanism.participation
            unit = plan.noise_stddev / drawn.divisor(plan.facts)
            mine = found[:, :, i, :, : plan.local_steps].reshape(len(inside), -1) / unit
            columns.append(against / plan.sigma - mine if against else mine)
        coins.append(inside)
        seen.append(np.hstack(columns[:-1]))
        beside.append(columns[-1])
    costs = [_event(plan, rounds, rate) for plan in made[:-1]]
    return Trials(
        inside=np.concatenate(coins),
        seen=np.concatenate(seen),
        event=costs[0] if len(costs) == 1 else events.horizontal(costs),
        delta=delta,
        beside=np.concatenate(beside),
        name=first.kind if rate is None else f"{first.kind}, rate {rate:.3g}",
        how=f"{len(coins)} simulated runs of {rounds} rounds with {len(coins[0])} canaries each, "
        f"in {len(plans)} {'silo' if len(plans) == 1 else 'silos'}",
    )


def _designed(plan: SiloPlan, against: int) -> SiloPlan:
    """The silo with its public rate as a constant, whatever it holds now."""
    own = plan.mechanism
    prob = 1.0 if against else own.participation.sampling_prob_of(plan.facts)
    fixed = own.participation.at_sampling_prob(prob)
    return dataclasses.replace(plan, mechanism=dataclasses.replace(own, participation=fixed))


def _event(plan: SiloPlan, rounds: int, rate: float | None) -> Any:
    drawn: Any = plan.mechanism.participation
    if rate is not None:
        return drawn.setting.event(rate, rounds)
    return plan.event(rounds)


def _records(
    plans: Sequence[SiloPlan], inside: np.ndarray, size: float, against: int
) -> FederatedData:
    """Of each group's units that are in, all records that they may have, in every silo but one."""
    owner, silo, direction, length = [], [], [], []
    groups, units = inside.shape
    for g in range(groups):
        for i, plan in enumerate(plans):
            own = plan.mechanism
            many = 1 if own.privacy_unit == "record" else own.participation.max_items_per_subject
            who = np.flatnonzero(inside[g]) if i < len(plans) - 1 else np.zeros(0, np.int64)
            rows = np.repeat(who, many)
            owner.append(g * (units + against) + rows)
            direction.append(rows)
            length.append(np.full(len(rows), -3.0 * size if against else size))
            owner.append(g * (units + against) + units + np.arange(against))
            direction.append(np.zeros(against, np.int64))
            length.append(np.full(against, size))
            silo.append(np.full(len(rows) + against, g * len(plans) + i))
    arrays = {
        "direction": np.concatenate(direction).astype(np.int32),
        "size": np.concatenate(length).astype(np.float32),
    }
    if not len(arrays["size"]):
        raise BadInputError("no unit is in: ask for more trials")
    return FederatedData.from_assignment(
        ArrayRecords(arrays), np.concatenate(owner), np.concatenate(silo), groups * len(plans)
    )


def _recorder(units: int, steps: int) -> optax.GradientTransformation:
    """A local optimiser that keeps what it is given, turned back, and turns all gradients round."""

    def init(params: PyTree) -> PyTree:
        del params
        return {"step": jnp.zeros((), jnp.int32), "seen": jnp.zeros((steps, units))}

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        seen = state["seen"].at[state["step"]].set(params["turn"] * _along(gradient))
        moved = jax.tree.map(jnp.zeros_like, gradient) | {"turn": -2.0 * params["turn"]}
        return moved, {"step": state["step"] + 1, "seen": seen}

    return optax.GradientTransformation(init, update)


# ---- messages ----------------------------------------------------------------------------------


def messages(
    noise: SiloNoise,
    key: RootKey,
    *,
    clip_norm: float = 1.0,
    trials: int = 20_000,
) -> Trials:
    """Trials of a silo's messages: every record has one of two opposite gradients.

    Beside the silo there is one whose records have none: what it sends must not help.
    """
    spec = MessageSpec(noise.sampling, noise.noise)
    size, rounds = noise.silo_size, noise.rounds
    take = math.ceil(noise.batch)
    one_pass = np.array([take]) if noise.sampling == "disjoint" else None
    stddev = noise.noise_multiplier * clip_norm

    def loss(w: jax.Array, example: PyTree) -> jax.Array:
        return example["size"] * jnp.abs(w @ jax.nn.one_hot(example["direction"], size))

    @jax.jit
    def sent(signs: jax.Array, rows: PyTree, rank: jax.Array) -> jax.Array:
        lengths = LONG * clip_norm * jnp.stack([signs, jnp.zeros(size)])
        directions = jnp.broadcast_to(jnp.arange(size), lengths.shape)
        messages = make_messages(
            loss,
            spec,
            SiloData({"direction": directions, "size": lengths}, jnp.array([size] * 2, jnp.int32)),
            batch=jnp.array([noise.batch] * 2, jnp.float32),
            clip_norm=clip_norm,
            stddev=jnp.array([stddev] * 2, jnp.float32),
            rank=rank,
        )

        def one(turn: jax.Array, row: PyTree) -> tuple[jax.Array, jax.Array]:
            return -turn, turn * messages(jnp.full(size, turn), row)

        _, y = jax.lax.scan(one, jnp.ones(()), rows)
        return y.transpose(1, 2, 0) * noise.batch / stddev  # [silos, records, rounds]

    coins, seen, beside = [], [], []
    for run in range(_runs(trials, size)):
        inside = key.numpy("audit-coins", run).random(size) < 0.5
        schedule = make_schedule(
            key.child("audit-run", run), rounds, np.array([size] * 2), one_pass_batch=one_pass
        )
        y = sent(jnp.where(inside, 1.0, -1.0), schedule.rows(), schedule.rank)
        own, other = np.asarray(y, np.float64)
        if noise.sampling == "disjoint":  # a record's one message, whose number says nothing of it
            turn = np.asarray(schedule.rank)[0] // take
            last = own.shape[1] - 1

            def of(y: np.ndarray, turn: np.ndarray) -> np.ndarray:
                return np.take_along_axis(y, np.minimum(turn, last)[:, None], axis=1)  # noqa: B023

            # The message before or after it has nothing of the record, and the other sign.
            other = np.hstack([of(own, turn ^ 1), of(other, turn)])
            own = np.where(turn[:, None] <= last, of(own, turn), 0.0)
        coins.append(inside)
        seen.append(own)
        beside.append(other)
    return Trials(
        inside=np.concatenate(coins),
        seen=np.concatenate(seen),
        event=noise.event,
        delta=noise.budget.delta,
        beside=np.concatenate(beside),
        relation=REPLACE,
        name=f"isrl, {noise.sampling}",
        how=f"{len(coins)} simulated runs of {rounds} messages of a silo of {size} records",
    )
