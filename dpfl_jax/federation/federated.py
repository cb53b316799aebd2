"""``run_rounds``: rounds over silos, as an algorithm for ``run.driver``."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dpfl_jax import accounting
from dpfl_jax.clipping import SelfCheckError, clipped_grad, self_check
from dpfl_jax.clipping.result import StepStats
from dpfl_jax.config.execution import Execution
from dpfl_jax.config.kinds import code_outside
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import federated_epsilon, worst_cases
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.engine import (
    Chunk,
    OptimizerServer,
    Released,
    ServerRule,
    make_release,
    mean_update,
)
from dpfl_jax.federation.federation import Federation
from dpfl_jax.federation.rounds import PlacedChunk, RoundBuilder
from dpfl_jax.mechanisms.plan.sum_check import HostSum, only, per_unit_reference
from dpfl_jax.mesh import data_parallel_mesh, place, replicated
from dpfl_jax.randomness import RootKey, key_argument, keyed, with_any_key
from dpfl_jax.run.algorithm import Algorithm, StepOutput, Steps
from dpfl_jax.run.driver import RunResult, drive
from dpfl_jax.run.state import TrainState
from dpfl_jax.run.terms import (
    Terms,
    computation_digest,
    secret_of_code,
    training_digest,
    value_digest,
)

PyTree = Any


class FederatedAlgorithm(Algorithm):
    """Rounds of a calibrated federation, with silos split over the devices of all hosts."""

    word = "rounds"
    memory_hint = "lower execution.microbatch_size, execution.chunk_silos or execution.width"

    def __init__(
        self,
        *,
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        data: FederatedData,
        federation: Federation,
        local_optimizer: optax.GradientTransformation,
        delta: float,
        mesh: Mesh,
        server: ServerRule,
        keep_local_state: bool,
        execution: Execution,
        show_spent: bool = True,
        here: int | None = None,
    ) -> None:
        """See ``run_rounds``; ``here`` is the only silo whose records are here (None: all are).

        Raises:
          BadInputError: the data do not keep the plan's limits, or noise multipliers are not set.
        """
        federation.check(data, here)
        if not len(federation.participants):
            raise BadInputError("no silo holds any record: check the data and federation sections")
        for plan, silo in zip(federation.silos, data.silos, strict=True):
            _ = plan.sigma
            plan.mechanism.participation.check(silo)
        self.loss_fn, self.data, self.federation = loss_fn, data, federation
        self.local_optimizer, self.server = local_optimizer, server
        self.delta, self.mesh = delta, mesh
        self.keep, self.execution, self.show_spent = keep_local_state, execution, show_spent
        self.steps, self.private = federation.rounds, federation.mechanism.private
        self.layout_fingerprint = [self.hardware, execution.model_dump()]
        self.random = key_argument(loss_fn)
        self.given, self.start = params, place(params, replicated(mesh))

    def terms(self) -> Terms:
        """Returns the terms: mechanism, noise, rounds and delta, and secret digests of the rest."""
        record = jax.tree.map(lambda x: x[0], self.data.read(np.zeros(1, np.int64)))
        traced, server = with_any_key(self.loss_fn, self.random), self.server

        def serves(params: PyTree, r: jax.Array) -> Any:
            now = server.init(params)
            after = server.apply(now, params, r)
            return server.broadcast(now), server.broadcast(after), after, server.model(after)

        computation = [
            training_digest(traced, self.start, None, record, self.local_optimizer),
            computation_digest(serves, self.start, jnp.int32(0)),
        ]
        return Terms(
            stated={
                "mechanism": self.federation.mechanism.to_json(),
                "noise_multipliers": [p.noise_multiplier for p in self.federation.silos],
                "rounds": self.steps,
                "keep_local_state": self.keep,
                "delta": self.delta,
            },
            secret={
                **secret_of_code(code_outside(self.federation.mechanism)),
                "plan": value_digest(self.federation),
                "data": self.data.fingerprint,
                "computation": value_digest(computation),
            },
        )

    def init(self) -> TrainState:
        """Returns the server's state, and the silos' optimiser states [silos, ...] if kept."""
        everywhere = replicated(self.mesh)
        server = jax.jit(self.server.init, out_shardings=everywhere)(self.start)
        kept = {}
        if self.keep:

            def start(params: PyTree) -> PyTree:
                one, silos = self.local_optimizer.init(params), len(self.federation.silos)
                return jax.tree.map(lambda x: jnp.broadcast_to(x, (silos, *jnp.shape(x))), one)

            kept = {"silos": jax.jit(start, out_shardings=everywhere)(self.start)}
        return self.packed({"server": server} | kept, 0)

    def packed(self, state: dict[str, PyTree], done: int) -> TrainState:
        """Returns the state of a run after ``done`` rounds."""
        step = place(np.int32(done), replicated(self.mesh))
        return TrainState(self.server.model(state["server"]), state, step)

    def params(self, state: TrainState) -> PyTree:
        return state.params

    def row(self, stats: tuple[Released | None, StepStats]) -> dict[str, Any]:
        released, step_stats = stats
        return {
            "silos": 0 if released is None else int(released.silos),
            "dropped_silos": 0 if released is None else int(released.dropped),
            "outside_guarantee": step_stats.row(self.private),
        }

    def epsilons(self, counts: Sequence[int]) -> Sequence[float]:
        if not (self.show_spent and self.private):
            return [math.inf] * len(counts)
        curves = [
            np.max([accounting.epsilon_curve(e, list(counts), self.delta) for e in case], axis=0)
            for case in worst_cases(self.federation, 1)
        ]
        # The curves are coarse; the total is known more precisely.
        total = federated_epsilon(self.federation, self.delta)
        return np.minimum(np.min(curves, axis=0), total).tolist()

    def compiled_apply(self) -> Callable[..., PyTree]:
        """Returns the compiled server rule, ``(server's state, Released, round) -> state``."""
        return jax.jit(lambda s, total, r: self.server.apply(s, mean_update(total), r))

    def begin(self, key: RootKey, start: int) -> FederatedSteps:
        return FederatedSteps(self, key, start)


class FederatedSteps(Steps):
    """Runs rounds: sends chunks of silos from a builder through the compiled round."""

    def __init__(
        self,
        run: FederatedAlgorithm,
        key: RootKey,
        start: int,
        builder: Callable[..., RoundBuilder] = RoundBuilder,
        release: Callable[..., Any] | None = None,
    ) -> None:
        """Builds the rounds; ``release`` may be the compiled round of a run with equal layout."""
        self.run, self.start, how = run, start, run.execution
        self.loss_fn = keyed(run.loss_fn, run.random) if run.random else run.loss_fn
        self.release = release or make_release(
            run.federation.mechanism,
            self.loss_fn,
            run.local_optimizer,
            run.mesh,
            width=how.width,
            keep_state=run.keep,
            strategy=how.strategy,
            examples_at_once=how.microbatch_size,
        )
        self.apply = run.compiled_apply()
        self.builder = builder(
            run.federation,
            run.data,
            key,
            run.mesh,
            how.width,
            how.microbatch_size,
            how.chunk_silos,
            loss_keys=bool(run.random),
        )

    def agreed(self) -> dict[str, Any]:
        return {
            "size of a chunk": [self.builder.size, self.builder.capacity, self.builder.row],
            "strategy": self.run.execution.model_dump(),
        }

    def check(self, state: TrainState, say: Callable[[str], object] = str) -> None:
        """Checks that units do not mix, and that norms equal those of plain per-unit gradients."""
        first = self._first_work()
        if first is None:
            return
        chunk, units, weight = first
        params = self.run.server.broadcast(state.opt_state["server"])
        say("that silos' units do not mix (it is compiled for this)")
        _check_unmixed(self.release, params, self._kept(state.opt_state, chunk), chunk.chunk)
        if self.run.execution.strategy not in ("vmap", "scan"):
            mechanism = self.run.federation.mechanism
            gradient = clipped_grad(
                mechanism.participation.unit_loss(self.loss_fn),
                rule=mechanism.rule(mechanism.clip_norm),
                strategy=self.run.execution.strategy,
            )
            say("norms of two units")
            self_check(gradient, self.run.given, units, weight=weight)

    def inputs(self) -> Iterator[tuple[int, Iterator[PlacedChunk]]]:
        for r, chunks in self.builder.prefetch(self.start, self.run.steps):
            yield r + 1, chunks

    def step(
        self, state: TrainState, inputs: Iterator[PlacedChunk]
    ) -> tuple[TrainState, StepOutput]:
        """Runs a round: adds up what the silos release, and applies the server rule."""
        run, now, done = self.run, dict(state.opt_state), int(state.step)
        total: Released | None = None
        stats, records = StepStats.zero(), 0
        for placed in inputs:
            params, kept = run.server.broadcast(now["server"]), self._kept(now, placed)
            released, kept, seen = self.release(params, kept, placed.chunk)
            if run.keep:
                now["silos"] = _put(now["silos"], placed.silos, kept)
            total = released if total is None else add_released(total, released)
            stats = _add(stats, seen)
            records += placed.num_records
        if total is not None:
            now["server"] = self.apply(now["server"], total, done)
        return run.packed(now, done + 1), StepOutput((total, stats), records)

    def _kept(self, state: dict[str, PyTree], placed: PlacedChunk) -> PyTree:
        """Optimiser states of a chunk's silos; padding silos get those of the first silo."""
        if not self.run.keep:
            return None
        padding = np.full(self.builder.size - len(placed.silos), placed.silos[0])
        return _take(state["silos"], np.concatenate([placed.silos, padding]))

    def _first_work(self) -> tuple[PlacedChunk, PyTree, jax.Array] | None:
        """The first chunk with a unit, its first two units and their weights; None without any."""
        builder = self.builder
        for r in range(self.run.steps):
            for silos in builder.chunks(r):
                if any(draw.size for silo in silos.tolist() for draw in builder.draws(silo, r)):
                    host, records = builder.gather(r, silos)
                    index = tuple(np.argwhere(host["mask"])[:2].T)
                    units = jax.tree.map(operator.itemgetter(index), host["units"])
                    return (
                        builder.ship(silos, host, records),
                        units,
                        jnp.asarray(host["unit_weight"][index]),
                    )
        return None


def run_rounds(
    *,
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    data: FederatedData,
    federation: Federation,
    local_optimizer: optax.GradientTransformation,
    delta: float,
    server: ServerRule | None = None,
    keep_local_state: bool = False,
    execution: Execution | None = None,
    mesh: Mesh | None = None,
    show_spent: bool = True,
    **options: Any,
) -> RunResult:
    """Runs a federation whose noise multipliers are set.

    Args:
      loss_fn: ``(params, record) -> scalar``. If it also takes ``rng`` (or ``key``), with default
        None, it gets a new random key there for each record and local step.
      params: initial parameters; not modified.
      data: the records of all silos, which must keep the federation's caps.
      federation: what every silo does, with which noise.
      local_optimizer: Optax optimiser of the silos' local steps.
      delta: delta of the epsilon in the log.
      server: server rule for the mean update; None: the update is added.
      keep_local_state: whether silos keep their optimiser's state between rounds.
      execution: how rounds are computed.
      mesh: devices; None: silos are split over all devices.
      show_spent: whether to compute epsilon for the log of every round.
      **options: for ``run.driver.drive`` (key, run_dir, evaluate, loop, hooks, console, ...).

    Raises:
      BadInputError: the data do not keep the plan's limits, or noise multipliers are not set.
      clipping.SelfCheckError: the strategy's norms disagree with plain per-unit gradients, or units
        mix; no round was run.

    Examples:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax
      >>> from dpfl_jax import federation as fed
      >>> records = fed.ArrayRecords({"x": np.ones((8, 2), "float32")})
      >>> data = fed.FederatedData.from_assignment(records, np.arange(8), np.arange(8) // 4, 2)
      >>> mechanism = fed.local_item(sampling_prob=0.5)
      >>> plans = tuple(
      ...     fed.SiloPlan(mechanism, fed.SiloFacts.of(silo), local_steps=1, noise_multiplier=1.0)
      ...     for silo in data.silos
      ... )
      >>> silos = fed.Federation(plans, rounds=2, max_silos_per_subject=1)
      >>> def loss(params, record):
      ...     return jnp.vdot(params, record["x"])
      >>> result = fed.run_rounds(
      ...     loss_fn=loss, params=jnp.zeros(2), data=data, federation=silos,
      ...     local_optimizer=optax.sgd(0.1), delta=1e-2,
      ... )
      >>> result.steps, result.params.shape
      (2, (2,))
    """
    algorithm = FederatedAlgorithm(
        loss_fn=loss_fn,
        params=params,
        data=data,
        federation=federation,
        local_optimizer=local_optimizer,
        delta=delta,
        mesh=data_parallel_mesh() if mesh is None else mesh,
        server=OptimizerServer() if server is None else server,
        keep_local_state=keep_local_state,
        execution=Execution(microbatch_size=32) if execution is None else execution,
        show_spent=show_spent,
    )
    return drive(algorithm, **options)


_take = jax.jit(lambda states, index: jax.tree.map(lambda x: x[index], states))
_put = jax.jit(
    lambda states, index, new: jax.tree.map(
        lambda x, n: x.at[index].set(n[: len(index)]), states, new
    )
)
_add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))


def add_released(total: Released, more: Released) -> Released:
    """Returns the sum of what the silos of two chunks released."""
    return _add(total, more)


def _check_unmixed(release: Any, params: PyTree, states: PyTree, chunk: Chunk) -> None:
    """Checks, with the run's program, that masked data do not change what silos release.

    Runs one microbatch of each local step of a chunk, without noise, and leaves out a random half
    of its units, then the other half (``sum_check.per_unit_reference``). Sums are not compared with
    those of one device, because ``shard_map`` splits silos over devices, not the compiler.

    Raises:
      SelfCheckError: masked data change the release.
    """
    half = np.random.default_rng(0).random(chunk.mask.shape) < 0.5

    @functools.partial(
        jax.jit, static_argnums=2, out_shardings=jax.tree.map(lambda x: x.sharding, chunk)
    )
    def left_out(chunk: Chunk, left: jax.Array, blank: bool) -> Chunk:
        mask = chunk.mask & left
        return dataclasses.replace(
            chunk,
            units=only(chunk.units, mask) if blank else chunk.units,
            mask=mask,
            stddev=jnp.zeros_like(chunk.stddev),
            microbatches=jnp.minimum(chunk.microbatches, 1),
        )

    def run(left: np.ndarray, blank: bool) -> HostSum:
        changed = left_out(chunk, place(left, chunk.mask.sharding), blank)
        released, _, stats = release(params, states, changed)
        return HostSum(released.update, stats)

    for left in (half, ~half):
        _, wrong = per_unit_reference(functools.partial(run, left))
        if wrong is not None:
            raise SelfCheckError(
                f"what the silos release: {wrong}; no round was run: use another "
                "execution.strategy or execution.width=1, and report this"
            )
