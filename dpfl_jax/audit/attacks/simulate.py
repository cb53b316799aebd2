"""Trials of a mechanism on designed gradients: no training, and many trials in one simulated run.

Sampler, clipping, noise, divisor and keys are the code that trains, not another implementation. The
loss is linear, so that each unit's gradient is as designed: long enough to be clipped, and in a
direction that no other unit has. So every unit is a trial.

The parameter ``turn`` flips the sign of all gradients from one release to the next, and the sign of
what is released is flipped back. So a unit's shift has the same sign in all steps, but noise that
is wrongly added twice has both signs, and cancels in the sum.

Units that are out are not in the data, as the event's adjacency says. Sampling rates are those of
the plan, which are public constants.
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
from rich.console import Console

from dpfl_jax.accounting import REPLACE, cells, events
from dpfl_jax.audit.trials import LONG, Trials
from dpfl_jax.clipping import Adaptive
from dpfl_jax.config import RunConfig
from dpfl_jax.config.execution import Execution
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import ArrayStore
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.engine import make_release
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.isrl.message import MessageSpec, SiloData, make_messages
from dpfl_jax.federation.isrl.privacy import SiloNoise
from dpfl_jax.federation.isrl.schedule import make_schedule
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.mechanisms import Calibrated, Mechanism
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mechanisms.plan.batches import example_loss, step_arguments
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.pipeline import prepare

PyTree = Any
_MOST_DIRECTIONS = 2000
_BESIDE = 16  # first steps of correlated noise that the attacker also sees one by one
_NOTHING = "this configuration has no guarantee, so that there is nothing to audit: choose a "


def _start(directions: int, turn: float = 1.0) -> PyTree:
    """Parameters: two leaves, in case a bug leaves the second unclipped, and ``turn``, 1 or -1."""
    return {"weight": jnp.zeros(directions), "bias": jnp.zeros(directions), "turn": jnp.array(turn)}


def _loss(params: PyTree, example: PyTree) -> jax.Array:
    """A linear loss, whose gradient has length ``size``, equal parts in both leaves, and a sign."""
    both = (params["weight"] + params["bias"]) / math.sqrt(2.0)
    component = both @ jax.nn.one_hot(example["direction"], both.shape[0])
    return jax.lax.stop_gradient(params["turn"]) * example["size"] * component


def _components(tree: PyTree) -> jax.Array:
    """The components of a gradient or sum along all directions, float [directions]."""
    return (tree["weight"] + tree["bias"]) / math.sqrt(2.0)


def _runs(trials: int, each: int) -> int:
    at_least("the number of trials", trials, 200)
    return math.ceil(trials / each)


def refuse_filtered(mechanism: Mechanism) -> None:
    """Raises BadInputError for adaptive clip norms and individual budgets: no audit tests them."""
    if isinstance(mechanism.clip, Adaptive):
        raise BadInputError(
            "mechanism.clip is adaptive, which clips to another norm at each step: audit the "
            "mechanism with the clip rule normalized, which has the same privacy cost"
        )
    if mechanism.budget is not None:
        raise BadInputError(
            f"mechanism.kind={mechanism.kind} is accounted by Renyi divergences only, which an "
            "audit cannot test: audit the same mechanism without mechanism.budget, with the same "
            "noise, for the least_steps steps in which all users take part"
        )


# ---- configurations ----------------------------------------------------------------------------


def trials_of(config: Any, key: RootKey, console: Console, trials: int) -> list[Trials]:
    """Simulates the mechanism of a configuration, and returns the trials.

    The data are read only for their public counts.

    Args:
      config: configuration of any kind of run.
      key: root key of the audit, which no run uses.
      console: shows progress.
      trials: least number of trials for each claim; a tenth of it if a trial takes a whole silo.

    Returns:
      One entry; with personal budgets one for the smallest and one for the largest budget.

    Raises:
      BadInputError: the configuration has no guarantee, or one that cannot be audited.
    """
    if config.variant == "isrl":
        return [_trials_of_messages(config, key, console, trials)]
    if config.variant == "silos":
        return _trials_of_silos(config, key, console, trials)
    if not config.mechanism.private:
        raise BadInputError(_NOTHING + "private mechanism.kind")
    ready: Any = prepare(config, console)
    with console.status("attacking"):
        return [central(ready.calibrated, key, trials=trials)]


def _trials_of_silos(
    config: RunConfig, key: RootKey, console: Console, trials: int
) -> list[Trials]:
    ready: Any = prepare(config, console)
    federation = ready.federation
    if not federation.mechanism.private:
        raise BadInputError(_NOTHING + "private mechanism.kind")
    reach = 1
    if federation.mechanism.privacy_unit != "record":
        reach = min(federation.max_silos_per_subject, federation.silos_per_round)
    # The silos that cost most, as in federation.accountant.worst_cases.
    members = sorted(
        federation.members,
        key=lambda p: (
            -p.mechanism.participation.sampling_prob_of(p.facts),
            p.sigma,
            -p.local_steps,
        ),
    )[:reach]
    rates: list[tuple[float | None, float | None]] = [(None, None)]
    if ready.personal is not None:
        ready.personal.check_rates(ready.data)
        drawn = ready.personal.assignment.rates
        ends = float(drawn[drawn > 0].min()), float(drawn.max())
        rates = [ends, ends[::-1]]
    if federation.mechanism.participation.one_unit:
        trials = max(200, trials // 10)
    trials_by_rate = []
    with console.status("attacking"):
        for rate, other in rates:
            given = (members, federation.rounds, ready.delta, key.child(f"rate {rate}"))
            cohort = federation.cohort if rate is not None else None
            trials_by_rate.append(
                silos(*given, trials=trials, rate=rate, other=other, cohort=cohort)
            )
    return trials_by_rate


def _trials_of_messages(config: RunConfig, key: RootKey, console: Console, trials: int) -> Trials:
    ready: Any = prepare(config, console)
    parameters = ready.parameters
    if not parameters.noise:
        raise BadInputError(_NOTHING + "budget")
    worst = int(np.argmax([z.epsilon for z in parameters.noise]))
    with console.status("attacking"):
        return messages(
            parameters.noise[worst],
            key,
            clip_norm=float(parameters.clip_norms[worst]),
            trials=trials,
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
    """Returns trials of a central mechanism.

    Args:
      calibrated: the mechanism with its noise, at the sampling rate of its population.
      key: root key of coins, sampling and noise, which no run uses.
      trials: least number of trials; each is a unit that is in or out.
      directions: number of units per simulated run; None: chosen by the sampling rate.
      others: number of units that are in the data of every run, all along one more direction.
      mesh: devices; None: one device.
      execution: how steps are computed.
    """
    refuse_filtered(calibrated.mechanism)
    rate, steps = calibrated.scheme.draw_prob, calibrated.steps
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
            who = np.array([-1], np.int32)  # a user without a gradient
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

    # With correlated noise, the worst case is a unit whose gradients all have the same sign, so
    # signs are not flipped. Noise that is added twice shows in the first steps, seen one by one.
    alone = mechanism.noise.keys_per_step == 1 and not jax.tree.leaves(noise.init(params).memory)

    @jax.jit
    def released(total: PyTree, state: Any, noise_key: Any) -> tuple[jax.Array, Any]:
        gradient, state = noise.update(total, state, noise_key=noise_key)
        return _components(gradient) / unit, state

    coins, seen, beside = [], [], []
    for run in range(_runs(trials, units)):
        inside = key.numpy("audit-coins", run).random(units) < 0.5
        data = store(inside)
        there = mechanism.participation.population_of(data)  # the rate stays the accounted one
        plan = Plan(dataclasses.replace(calibrated, population=there), data, execution, mesh)
        run_key, state, rows = key.child("audit-run", run), noise.init(params), []
        for batch in plan.pipeline(plan.sampler(run_key)).iterate(0, steps):
            turn = (-1.0) ** batch.step if alone else 1.0
            now = params | {"turn": jnp.array(turn)}
            total, _ = summed(now, *step_arguments(mechanism, batch), None)
            row, state = released(total, state, plan.noise_key(run_key, batch.step))
            rows.append(turn * row)
        components = np.asarray(jnp.stack(rows, axis=1))
        coins.append(inside)
        seen.append(
            cells.audit_statistic(
                calibrated.matrix, components[:units], inside, plan.sampler(run_key)
            )
        )
        more = [np.broadcast_to(components[units:], (units, steps))] if others else []
        if not alone:
            more.append(components[:units, :_BESIDE])
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
    """Returns trials of everything that silos release: the noised gradient of every local step.

    One more silo holds no records of the units: what it sends must not help the attacker.

    Args:
      plans: the silos that hold records of a unit, with their noise.
      rounds: number of rounds R.
      delta: delta of the claim.
      key: root key of coins, sampling and noise, which no run uses.
      trials: least number of trials; each is a unit that is in or out.
      rate: sampling rate of the records, if each has its own (rPDP).
      other: rate of every second record, which is no trial, to show if rates are mixed up.
      cohort: scheme by which silos take part in a round; None: all silos in all rounds.
      against: number of other people's records in every silo, whose gradients are opposite to the
        unit's. All of them are drawn in every step, and each unit has silos of its own.
    """
    first = plans[0].mechanism
    if first.participation.one_unit:  # a silo clips one gradient, whose sign the unit decides
        against = 1
    prob = (
        1.0 if against else max(p.mechanism.participation.sampling_prob_of(p.facts) for p in plans)
    )
    units = 1 if against else max(200, min(_MOST_DIRECTIONS, round(200 / (rate or prob)), trials))
    groups, each = min(trials, 200) if against else 1, len(plans) + 1
    every = 1 if other is None else 2  # one of so many units is a trial
    units *= every
    steps = max(plan.local_steps for plan in plans)
    size = LONG * first.clip_norm
    made = [_designed(plan, against) for plan in (*plans, plans[0])]
    mesh, recorder = data_parallel_mesh(jax.devices()[:1]), _recorder(units, steps)
    release = make_release(made[0].mechanism, _loss, recorder, mesh, keep_state=True)
    start = recorder.init(_start(units))
    coins, seen, beside = [], [], []
    for run in range(_runs(trials, units // every * groups)):
        run_key = key.child("audit-run", run)
        inside = key.numpy("audit-coins", run).random((groups, units)) < 0.5
        data = _records(made, inside, size, against)
        if rate is not None:
            rates = np.where(data.subjects % 2 == 0, rate, rate if other is None else other)
            data = data.with_rates(rates)
        all_plans = tuple(made * groups)
        drawn = None if cohort is None else dataclasses.replace(cohort, population=len(all_plans))
        federation = Federation(all_plans, rounds, len(plans), drawn)
        builder = RoundBuilder(federation, data, run_key, mesh, microbatch_size=64)
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
        components = sent.reshape(groups, each, rounds, steps, units).transpose(0, 4, 1, 2, 3)[
            :, ::every
        ]
        inside = inside[:, ::every].ravel()
        columns = []
        for i, plan in enumerate(made):
            participation = plan.mechanism.participation
            unit = plan.noise_stddev / participation.divisor(plan.facts)
            mine = components[:, :, i, :, : plan.local_steps].reshape(len(inside), -1) / unit
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
    """The silo with its public sampling rate as a constant, whatever records it has here."""
    mechanism, drawn = plan.mechanism, plan.mechanism.participation
    fixed = drawn.at_sampling_prob(1.0 if against else drawn.sampling_prob_of(plan.facts))
    return dataclasses.replace(plan, mechanism=dataclasses.replace(mechanism, participation=fixed))


def _event(plan: SiloPlan, rounds: int, rate: float | None) -> Any:
    drawn: Any = plan.mechanism.participation
    if rate is not None:
        return drawn.setting.event(rate, rounds)
    return plan.event(rounds)


def _records(
    plans: Sequence[SiloPlan], inside: np.ndarray, size: float, against: int
) -> FederatedData:
    """The records of the units that are in, as many as allowed, in all silos of a group but one."""
    owner, silo, direction, length = [], [], [], []
    groups, units = inside.shape
    for g in range(groups):
        for i, plan in enumerate(plans):
            drawn = plan.mechanism.participation
            many = 1 if plan.mechanism.privacy_unit == "record" else drawn.max_records_per_subject
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
        raise BadInputError("by chance no unit takes part: ask for more trials")
    return FederatedData.from_assignment(
        ArrayRecords(arrays), np.concatenate(owner), np.concatenate(silo), groups * len(plans)
    )


def _recorder(units: int, steps: int) -> optax.GradientTransformation:
    """A local optimiser that records gradients, with their signs flipped back, and flips turns."""

    def init(params: PyTree) -> PyTree:
        return {"step": jnp.zeros((), jnp.int32), "seen": jnp.zeros((steps, units))}

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        seen = state["seen"].at[state["step"]].set(params["turn"] * _components(gradient))
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
    """Returns trials of an ISRL silo's messages: every record has one of two opposite gradients.

    The records of a second silo have no gradients: what it sends must not help the attacker.

    Args:
      noise: the silo's noise.
      key: root key of coins, sampling and noise, which no run uses.
      clip_norm: clip norm of the silo.
      trials: least number of trials; each is a record.
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
        mine, other = np.asarray(y, np.float64)
        if noise.sampling == "disjoint":  # a record is in one message, whose number reveals nothing
            turn = np.asarray(schedule.rank)[0] // take
            last = mine.shape[1] - 1

            def of(y: np.ndarray, turn: np.ndarray) -> np.ndarray:
                return np.take_along_axis(y, np.minimum(turn, last)[:, None], axis=1)  # noqa: B023

            # The message before or after it does not hold the record, and has the other sign.
            other = np.hstack([of(mine, turn ^ 1), of(other, turn)])
            mine = np.where(turn[:, None] <= last, of(mine, turn), 0.0)
        coins.append(inside)
        seen.append(mine)
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
