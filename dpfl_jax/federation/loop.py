"""The loop over rounds: resumable, logged, and the same whatever stops it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.clipping import SelfCheckError, bounded_grad, self_check
from dpfl_jax.data.example_keys import key_argument, keyed, with_any_key
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import federated_epsilon, worst_cases
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.engine import Chunk, Released, make_release, mean_update
from dpfl_jax.federation.federation import Federation
from dpfl_jax.federation.rounds import Piece, RoundBuilder
from dpfl_jax.federation.server import OptimizerServer, ServerRule
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.checkpoint import Checkpoints
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.interrupt import StopRequest
from dpfl_jax.run.mesh import data_parallel_mesh, replicated
from dpfl_jax.run.progress import StepProgress
from dpfl_jax.run.state import TrainState, hardware
from dpfl_jax.run.terms import Terms, begin, computation_digest, training_digest, value_digest
from dpfl_jax.training.loop import MOVED_CAVEAT, PUBLIC_KEY_CAVEAT
from dpfl_jax.training.step import StepStats

PyTree = Any
_MILESTONES = 20


@dataclasses.dataclass(frozen=True)
class FederatedResult:
    """What a federated run returns.

    Attributes:
      params: of the server's model after the last round.
      rounds: rounds taken in all.
      metrics: one row per round and evaluation.
      interrupted: name of the signal that stopped the run, or None.
      caveats: what the run itself adds to the guarantee's caveats.
      seconds: wall time of the rounds of this process, the first one left out.
      records: records processed in that time.
    """

    params: PyTree
    rounds: int
    metrics: list[dict[str, Any]]
    interrupted: str | None
    caveats: tuple[str, ...]
    seconds: float
    records: int

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """The evaluation logged after ``step`` rounds, if there is one."""
        return _evaluation(self.metrics, step)


class _Spent:
    """An upper bound on epsilon after any number of rounds, cheap enough for a progress bar."""

    def __init__(self, federation: Federation, delta: float, wanted: bool) -> None:
        rounds = federation.rounds
        self._at = np.unique(np.ceil(np.linspace(0, rounds, _MILESTONES + 1)[1:]).astype(int))
        self._epsilons = np.full(len(self._at), np.inf)
        mechanism = federation.mechanism
        if wanted and mechanism.private and not mechanism.unsound():
            counts = [int(m) for m in self._at]
            cases = worst_cases(federation, 1)
            curves = [
                np.max([accounting.epsilon_curve(e, counts, delta) for e in case], axis=0)
                for case in cases
            ]
            # The curves are coarse; what all rounds cost is known more finely.
            total = federated_epsilon(federation, delta)
            self._epsilons = np.minimum(np.min(curves, axis=0), total)

    def __call__(self, rounds: int) -> float | None:
        epsilon = 0.0
        if rounds > 0:
            epsilon = float(self._epsilons[int(np.searchsorted(self._at, rounds))])
        return epsilon if math.isfinite(epsilon) else None


class SiloStates:
    """The optimiser states that silos keep between their rounds, [silos, ...]."""

    def __init__(self, optimizer: optax.GradientTransformation, params: PyTree, silos: int) -> None:
        def start(params: PyTree) -> PyTree:
            one = optimizer.init(params)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (silos, *jnp.shape(x))), one)

        self.all = jax.jit(start)(params)

    def take(self, silos: np.ndarray, size: int) -> PyTree:
        """States of a chunk; padding silos get a copy of the first one's."""
        index = np.concatenate([silos, np.full(size - len(silos), silos[0])])
        return _take(self.all, index)

    def put(self, silos: np.ndarray, states: PyTree) -> None:
        """Writes back the states of a chunk's real silos."""
        self.all = _put(self.all, silos, states)


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
    key: RootKey | None = None,
    evaluate: Callable[[PyTree], dict[str, Any]] | None = None,
    eval_every: int = 0,
    mesh: Mesh | None = None,
    width: int = 1,
    microbatch_size: int = 32,
    chunk_silos: int | None = None,
    strategy: str = "auto",
    run_dir: RunDirectory | None = None,
    checkpoint_every: int = 5,
    keep_checkpoints: int = 2,
    show_spent: bool = True,
    console: Console | None = None,
) -> FederatedResult:
    """Runs a federation whose noise is set.

    Args:
      loss_fn: ``(params, record) -> scalar``. If it also takes ``rng`` (or ``key``), with default
        None, each record of each local step gets a key of its own there.
      params: initial parameters; not modified.
      data: what the silos hold; must keep the federation's caps.
      federation: who does what, with which noise.
      local_optimizer: of the silos.
      delta: for the epsilon shown on the way.
      server: what the server does with the mean update; default: adds it.
      keep_local_state: whether local optimiser states live on between a silo's rounds.
      key: root key; default a fresh secret one (or the run directory's).
      evaluate: ``params -> dict`` with at least ``loss``; called before, during and after.
      eval_every: rounds between evaluations; 0 for before and after only.
      mesh: default: silos over all devices.
      width: silos of a device that are vmapped.
      microbatch_size: units processed at once in a silo.
      chunk_silos: silos on the devices at once; default by size.
      strategy: how bounded gradients are computed.
      run_dir: where to log and checkpoint; an unfinished one is resumed.
      checkpoint_every: rounds between checkpoints.
      keep_checkpoints: checkpoints kept.
      show_spent: whether epsilon is computed for the log of every round.
      console: where the progress bar goes; None for none.

    Raises:
      BadInputError: data that do not keep what the plan promises, or a mechanism without noise.
      clipping.SelfCheckError: the strategy's norms disagree with plain per-unit gradients, or units
        mix; no round was run.
    """
    mechanism = federation.mechanism
    federation.check(data)
    if not len(federation.participants):
        raise BadInputError("no silo holds any record: check the data and federation sections")
    for plan in federation.silos:
        _ = plan.mechanism.sigma
    mesh = data_parallel_mesh() if mesh is None else mesh
    server = OptimizerServer() if server is None else server
    root = run_dir.root_key if run_dir is not None else key or RootKey.generate()
    caveats = (PUBLIC_KEY_CAVEAT,) if root.public and mechanism.private else ()

    params = jax.tree.map(
        lambda p: jax.device_put(jnp.array(p, copy=True), replicated(mesh)), params
    )
    state = jax.jit(server.init, out_shardings=replicated(mesh))(params)
    silo_states = (
        SiloStates(local_optimizer, params, len(federation.silos)) if keep_local_state else None
    )
    log = _Log(run_dir)
    checkpoints, resumed, start = None, None, 0

    def packed(done: int) -> TrainState:
        kept = {} if silo_states is None else {"silos": silo_states.all}
        return TrainState(server.model(state), {"server": state} | kept, jnp.int32(done))

    if run_dir is not None:
        checkpoints = Checkpoints(run_dir.path / "checkpoints", keep_checkpoints)
        resumed = checkpoints.latest_step()
    random = key_argument(loss_fn)
    record = jax.tree.map(lambda x: x[0], data.read(np.zeros(1, np.int64)))
    traced = with_any_key(loss_fn, random)

    def serves(params: PyTree, r: jax.Array) -> Any:
        now = server.init(params)
        after = server.apply(now, params, r)
        return server.broadcast(now), server.broadcast(after), after, server.model(after)

    computation = [
        training_digest(traced, params, None, record, local_optimizer),
        computation_digest(serves, params, jnp.int32(0)),
    ]
    key, terms = begin(
        _terms(federation, delta, keep_local_state, data, value_digest(computation)),
        root,
        run_dir,
        hardware(mesh),
        resumed,
        lambda: content_digest(params),
        [hardware(mesh), strategy, width, microbatch_size, chunk_silos],
    )
    if run_dir is not None and checkpoints is not None:
        if run_dir.computed_with(hardware(mesh))[1:]:
            caveats = (*caveats, MOVED_CAVEAT)
        if resumed is not None:
            restored = checkpoints.restore(packed(0), root, terms)
            state, start = restored.opt_state["server"], int(restored.step)
            if silo_states is not None:
                silo_states.all = restored.opt_state["silos"]
        log.start_at(start)

    def evaluated(done: int) -> None:
        if evaluate is not None and _evaluation(log.rows, done) is None:
            log.append({"step": done, "eval": evaluate(server.model(state))})

    if start == 0:
        evaluated(0)
    shipped_loss = keyed(loss_fn, random) if random else loss_fn
    release = make_release(
        mechanism,
        shipped_loss,
        local_optimizer,
        mesh,
        width=width,
        keep_state=keep_local_state,
        strategy=strategy,
    )
    apply = jax.jit(lambda s, total, r: server.apply(s, mean_update(total), r))
    builder = RoundBuilder(
        federation, data, key, mesh, width, microbatch_size, chunk_silos, loss_keys=bool(random)
    )
    first = _first_work(builder) if mechanism.private and start < federation.rounds else None
    if first is not None:
        kept = None if silo_states is None else silo_states.take(first.silos, builder.size)
        _check_unmixed(release, server.broadcast(state), kept, first.chunk)
        if strategy not in ("vmap", "scan"):
            _check_norms(first.chunk, mechanism, shipped_loss, params, strategy)
    spent, meter = _Spent(federation, delta, show_spent), _Meter()
    quiet = Console(quiet=True)
    done = start
    with (
        StopRequest() as stop,
        StepProgress(console or quiet, "rounds", federation.rounds, start) as bar,
    ):
        for r, pieces in builder.prefetch(start, federation.rounds):
            total: Released | None = None
            stats: StepStats | None = None
            for piece in pieces:
                kept = None if silo_states is None else silo_states.take(piece.silos, builder.size)
                released, kept, seen = release(server.broadcast(state), kept, piece.chunk)
                if silo_states is not None:
                    silo_states.put(piece.silos, kept)
                total = released if total is None else _add(total, released)
                stats = seen if stats is None else _add(stats, seen)
                meter.records += piece.num_records
            if total is not None:
                state = apply(state, total, r)
            done = r + 1
            row = _row(done, total, stats, spent(done), mechanism.private)
            row["seconds"] = meter.lap()
            log.append(row)
            bar.update(done, _status(row))
            last = done == federation.rounds
            if eval_every and done % eval_every == 0 and not last:
                evaluated(done)
                meter.restart()
            if checkpoints is not None and (done % checkpoint_every == 0 or last or stop.requested):
                checkpoints.save(
                    packed(done), root, {"epsilon": spent(done), "delta": delta}, terms
                )
                meter.restart()
            if stop.requested:
                break
    if checkpoints is not None:
        checkpoints.close()
    finished = done == federation.rounds
    if finished:
        evaluated(done)
    return FederatedResult(
        params=server.model(state),
        rounds=done,
        metrics=log.rows,
        interrupted=None if finished else stop.requested,
        caveats=caveats,
        seconds=meter.seconds,
        records=meter.counted,
    )


def _terms(
    federation: Federation, delta: float, keep_state: bool, data: FederatedData, computation: str
) -> Terms:
    return Terms(
        stated={
            "mechanism": federation.mechanism.to_json(),
            "noise_multipliers": [plan.mechanism.noise_multiplier for plan in federation.silos],
            "rounds": federation.rounds,
            "keep_local_state": keep_state,
            "delta": delta,
        },
        secret={
            "plan": value_digest(federation),
            "data": data.fingerprint,
            "computation": computation,
        },
    )


_take = jax.jit(lambda states, index: jax.tree.map(lambda x: x[index], states))
_put = jax.jit(
    lambda states, index, new: jax.tree.map(
        lambda x, n: x.at[index].set(n[: len(index)]), states, new
    )
)
_add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))


def _check_unmixed(release: Any, params: PyTree, states: PyTree, chunk: Chunk) -> None:
    """Looks whether data that are masked out change what silos release, in the run's own program.

    One microbatch of each local step of a chunk, without noise, a random half of its units and then
    the other half left out; not a bit may change when their data become zeros (a device that adds
    up in no fixed order shows nothing). Silos are split over devices by hand, so no compiler could
    split their sums wrongly: these are compared with no other program's.

    Raises:
      SelfCheckError: it changes.
    """
    places = jax.tree.map(lambda x: x.sharding, chunk)
    chunk = dataclasses.replace(
        chunk,
        stddev=jnp.zeros_like(chunk.stddev),
        microbatches=jnp.minimum(chunk.microbatches, 1),
    )
    half = np.random.default_rng(0).random(chunk.mask.shape) < 0.5

    def run(left: np.ndarray, blank: bool) -> list[bytes]:
        mask = np.asarray(chunk.mask) & left

        def kept(x: jax.Array) -> np.ndarray:
            return np.where(
                mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, np.zeros((), x.dtype)
            )

        units = jax.tree.map(kept, chunk.units) if blank else chunk.units
        changed = dataclasses.replace(chunk, units=units, mask=mask)
        released, _, stats = release(params, states, jax.device_put(changed, places))
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((released, stats))]

    for left in (half, ~half):
        full = run(left, False)
        if full != run(left, True) and full == run(left, False):
            raise SelfCheckError(
                "units mix: what the silos release changes with the data of units that are left "
                "out, so no round was run: use another train.strategy or train.width=1, and report "
                "this"
            )


def _check_norms(chunk: Chunk, mechanism: Any, loss_fn: Any, params: PyTree, strategy: Any) -> None:
    """Compares the strategy with plain per-unit gradients on the first units of the run."""
    real = np.argwhere(np.asarray(chunk.mask))[:2]
    index = tuple(real.T)
    units = jax.tree.map(lambda u: np.asarray(u)[index], chunk.units)
    bounded = bounded_grad(
        mechanism.unit_loss(loss_fn), rule=mechanism.rule(mechanism.clip_norm), strategy=strategy
    )
    self_check(bounded, params, units, group=jnp.asarray(np.asarray(chunk.group)[index]))


def _first_work(builder: RoundBuilder) -> Piece | None:
    """The first chunk that holds a unit; rounds and whole runs may hold none."""
    for r in range(builder.federation.rounds):
        for piece in builder.pieces(r):
            if any(draw.size for silo in piece.tolist() for draw in builder.draws(silo, r)):
                return builder.build(r, piece)
    return None


def _row(
    done: int,
    total: Released | None,
    stats: StepStats | None,
    epsilon: float | None,
    private: bool,
) -> dict[str, Any]:
    """One row of metrics. What is computed from private data without noise is set apart."""
    raw: dict[str, Any] = {
        "units": 0,
        "train_loss": None,
        "fraction_clipped": None,
        "mean_norm": None,
        "nonfinite_units": 0,
    }
    if stats is not None:
        units, finite = float(stats.units), float(stats.units - stats.nonfinite)
        raw = {
            "units": int(units),
            "train_loss": float(stats.loss) / finite if finite else None,
            "fraction_clipped": float(stats.clipped) / finite if finite and private else None,
            "mean_norm": float(stats.norm) / finite if finite and private else None,
            "nonfinite_units": int(stats.nonfinite),
        }
    return {
        "step": done,
        "epsilon_spent": epsilon,
        "silos": 0 if total is None else int(total.silos),
        "dropped_silos": 0 if total is None else int(total.dropped),
        "outside_guarantee": raw,
    }


def _status(row: dict[str, Any]) -> str:
    raw = row["outside_guarantee"]
    parts = [f"{row['silos']} silos"]
    if row["dropped_silos"]:
        parts.append(f"[red]dropped {row['dropped_silos']}[/red]")
    if raw["train_loss"] is not None:
        parts.append(f"loss {raw['train_loss']:.3f}")
    if raw["fraction_clipped"] is not None:
        parts.append(f"clipped {raw['fraction_clipped']:.0%}")
    if raw["nonfinite_units"]:
        parts.append(f"[red]non-finite {raw['nonfinite_units']}[/red]")
    if row["epsilon_spent"] is not None:
        parts.append(f"ε ≤ {row['epsilon_spent']:.2f}")
    return "  ".join(parts)


def _evaluation(rows: Sequence[dict[str, Any]], step: int) -> dict[str, Any] | None:
    return next((r["eval"] for r in rows if r["step"] == step and "eval" in r), None)


class _Meter:
    """Records per second, compilation, evaluation and checkpoints left out."""

    def __init__(self) -> None:
        self.seconds, self.counted, self.records = 0.0, 0, 0
        self._last: float | None = None

    def restart(self) -> None:
        """Leaves out the time since the last round."""
        self._last, self.records = time.perf_counter(), 0

    def lap(self) -> float | None:
        """Seconds since the last round, counted; None for the first one, which compiles."""
        elapsed = None
        if self._last is not None:
            elapsed = time.perf_counter() - self._last
            self.seconds += elapsed
            self.counted += self.records
        self.restart()
        return None if elapsed is None else round(elapsed, 6)


class _Log:
    """Rows of metrics, in memory and (with a run directory) on disk."""

    def __init__(self, run_dir: RunDirectory | None) -> None:
        self._run_dir = run_dir
        self.rows: list[dict[str, Any]] = []

    def start_at(self, step: int) -> None:
        assert self._run_dir is not None
        self._run_dir.drop_metrics_after(step)
        self.rows = self._run_dir.read_metrics()

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._run_dir is not None:
            self._run_dir.append_metrics(row)
