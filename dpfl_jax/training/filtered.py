"""Training in which each user takes part only in the steps that their budget pays for.

The steps between two computations of all users' gradient norms are a *stretch*. What each user had
spent before it, and the bound on their gradients in it, decide who takes part in which of its
steps: this is what a state keeps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.accounting.filters import LEVELS, RenyiFilter, bounds, levels_of
from dpfl_jax.data.pipeline import StepBatch
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import csv_text
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mechanisms.plan.batches import units_of
from dpfl_jax.mechanisms.plan.sums import unit_norms
from dpfl_jax.mesh import place, replicated, splits_parameters
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.algorithm import RunResult, StepOutput
from dpfl_jax.run.directory import SPENT, RunDirectory, write_atomically
from dpfl_jax.run.state import TrainState
from dpfl_jax.run.terms import Terms, value_digest
from dpfl_jax.sampling import Draw, ExampleSampler, UserSampler, choose_within_users
from dpfl_jax.training.central import Central, CentralSteps

# Rows of a batch for norms, whatever the data: another shape may round differently.
_NORM_ROWS = 4
COLUMNS = ("user", "bound", "share_of_budget", "epsilon_spent")


@dataclasses.dataclass(frozen=True, eq=False)
class Spending:
    """What each user had spent before a stretch, and their bound in it: private.

    Attributes:
      spent: int64 [n], in units of ``RenyiFilter.costs``.
      levels: uint8 [n], indices into ``filters.bounds``.
    """

    spent: np.ndarray
    levels: np.ndarray

    @classmethod
    def none(cls, users: int) -> Spending:
        """The state before the first step: nothing is spent."""
        return cls(np.zeros(users, np.int64), np.zeros(users, np.uint8))

    def encrypt(self, key: RootKey, stretch: int) -> np.ndarray:
        """uint32 [n, 3], unreadable without the key."""
        spent = np.ascontiguousarray(self.spent).view(np.uint32).reshape(-1, 2)
        words = np.column_stack([spent, self.levels.astype(np.uint32)])
        return words ^ _pad(key, stretch, words.shape)

    @classmethod
    def decrypt(cls, encrypted: Any, key: RootKey, stretch: int) -> Spending:
        """Inverse of ``encrypt``."""
        words = np.asarray(encrypted) ^ _pad(key, stretch, encrypted.shape)
        spent = np.ascontiguousarray(words[:, :2]).view(np.int64).reshape(-1)
        return cls(spent, words[:, 2].astype(np.uint8))


def _pad(key: RootKey, stretch: int, shape: tuple[int, ...]) -> np.ndarray:
    """A one-time pad: under one key, a stretch always has the same content."""
    return key.numpy("spent-by-users", stretch).integers(1 << 32, size=shape, dtype=np.uint32)


@functools.cache
def rounding_digest() -> str:
    """A digest of some results: machines of one kind may still round differently."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(33, 784)), rng.normal(size=(784, 10)) / 28

    def some(x: jax.Array, w: jax.Array) -> Any:
        y, z = x @ w, jax.nn.gelu(x)
        return y, y.T @ z, x[:1] @ w, jax.nn.softmax(y), jnp.log1p(x * x).sum(1), z / jnp.cosh(x)

    result = jax.jit(some)(x.astype(np.float32), w.astype(np.float32))
    return value_digest([np.asarray(part).tobytes().hex() for part in result])


def check_filtered(plan: Plan) -> None:
    """Raises BadInputError if norms of all users cannot be computed as in the steps."""
    mechanism, how = plan.mechanism, plan.execution
    kind = mechanism.kind
    if splits_parameters(plan.mesh):
        raise BadInputError(
            f"mechanism.kind={kind} computes norms of all users' gradients on devices that hold "
            "all parameters: use execution.mesh with data alone"
        )
    if mechanism.participation.unit_examples is None and "bound" in plan.example:
        raise BadInputError(
            f"the data have a column 'bound', which is the name of what mechanism.kind={kind} "
            "adds to an example: rename it"
        )
    # proof: individual-bound-4
    if how.packing or how.group_buckets:
        name, off = ("packing", "0") if how.packing else ("group_buckets", "false")
        raise BadInputError(
            f"execution.{name} makes shapes depend on everybody's data, so that one user may move "
            f"the rounding of another's bound, which mechanism.kind={kind} charges by: set it to "
            f"{off}"
        )


class Filtered(Central):
    """A run in which each user has a budget."""

    def __init__(self, loss_fn: Any, params: Any, plan: Plan, *rest: Any) -> None:
        """See ``fit``.

        Raises:
          BadInputError: the run cannot have personal budgets (``check_filtered``).
        """
        check_filtered(plan)
        super().__init__(loss_fn, params, plan, *rest)
        mechanism: Any = self.mechanism
        self.filter: RenyiFilter = self.plan.calibrated.filter()
        self.bounds = bounds(mechanism.clip_norm)
        self.users, self.every = self.plan.population.num_users, mechanism.budget.refresh
        offsets = np.asarray(self.data.user_offsets)
        self.parts: np.ndarray = mechanism.participation.unit_counts(offsets)

    def terms(self) -> Terms:
        """Adds what bounds are computed with, as its rounding could move a level."""
        terms = super().terms()
        # proof: individual-event-3
        computed = value_digest([self.layout_fingerprint, rounding_digest()])
        secret = {"execution": computed, **terms.secret}
        return dataclasses.replace(terms, secret=secret)

    def init(self) -> TrainState:
        return dataclasses.replace(super().init(), units=self.placed(self.nothing_spent))

    @property
    def nothing_spent(self) -> np.ndarray:
        """What a state holds before the first norms are computed: uint32 [users, 3]."""
        return np.zeros((self.users, 3), np.uint32)

    def placed(self, encrypted: np.ndarray) -> Any:
        """The encrypted spending of users, on every device."""
        return place(encrypted, replicated(self.mesh))

    def begin(self, key: RootKey, start: int) -> FilteredSteps:
        self._key = key
        return FilteredSteps(self, key, start)

    def after(self, held: Spending, steps: int) -> Spending:
        """What users have spent after ``steps`` steps of a stretch that began with ``held``."""
        spent = self.filter.after(held.spent, held.levels, steps, self.parts)
        return dataclasses.replace(held, spent=spent)

    def private_state(self, state: TrainState) -> Spending:
        """What every user has spent after the last step taken, and their bounds in it."""
        if not (step := int(state.step)):
            return Spending.none(self.users)
        stretch, into = divmod(step - 1, self.every)
        return self.after(Spending.decrypt(state.units, self._key, stretch), into + 1)

    def write_private(self, directory: RunDirectory, result: RunResult) -> None:
        """Writes what every user has spent (owner only)."""
        spending, users = result.private_state, np.arange(self.users)
        # Bounds are lost of steps that a killed process released and that were not taken again.
        spent = self.filter.at_most(spending.spent, max(result.released - result.steps, 0))
        names = getattr(self.data, "user_ids", lambda users: users)(users)
        columns = (
            self.bounds[spending.levels].tolist(),
            (spent / self.filter.budget).tolist(),
            self.filter.epsilons(spent, self.delta).tolist(),
        )
        text = csv_text([COLUMNS, *zip(names, *columns)])
        write_atomically(directory.path / SPENT, text, mode=0o600)


@dataclasses.dataclass(frozen=True, eq=False)
class _AllUnits:
    """Draws all units, ``width`` at a time; of each user, examples as a step would."""

    sampler: UserSampler | ExampleSampler
    width: int
    key: RootKey

    def draw(self, part: int) -> Draw:
        last = min((part + 1) * self.width, self.sampler.population)
        units = np.arange(part * self.width, last)
        if isinstance(self.sampler, ExampleSampler):
            return Draw(units, self.sampler.positions[units])
        # proof: individual-bound-2
        rng = self.key.numpy("within-user", part)
        given = (self.sampler.user_offsets, units, self.sampler.group_size)
        return Draw(units, choose_within_users(rng, *given))


def _owners(sampler: UserSampler | ExampleSampler, user_offsets: np.ndarray) -> np.ndarray:
    """int64 [units]: the user of each unit."""
    if isinstance(sampler, UserSampler):
        return np.arange(len(user_offsets) - 1)
    return np.searchsorted(user_offsets, sampler.positions, side="right") - 1


class FilteredSteps(CentralSteps):
    """Steps over the users whose budget is not spent, each with a personal bound."""

    run: Filtered
    sampler: UserSampler | ExampleSampler

    def __init__(self, run: Filtered, key: RootKey, start: int) -> None:
        super().__init__(run, key, start)
        self.owners = _owners(self.sampler, np.asarray(run.data.user_offsets))
        # The check before the first step sees units with several bounds.
        units = max(len(self.owners), run.plan.population.num_examples)
        some = run.bounds[np.arange(units) % LEVELS]
        self.pipeline = dataclasses.replace(self.pipeline, per_unit=some)
        self.params, self.encrypted = run.trained, run.placed(run.nothing_spent)
        norms = unit_norms(run.mechanism, self.loss_fn, run.mesh, **self.options, **self.pieces)

        @functools.partial(jax.jit, out_shardings=replicated(run.mesh))
        def norms_of(params: Any, units: Any, mask: Any, who: Any, frozen: Any) -> Any:
            return norms(params, units, mask, frozen), mask, who

        self.norms_of_batch = norms_of

    def check(self, state: TrainState, say: Callable[[str], object] = str) -> None:
        """Also keeps the state that the steps begin with."""
        super().check(state, say)
        self.params, self.encrypted = state.params, state.units

    def inputs(self) -> Iterator[tuple[int, StepBatch]]:
        """Yields stretch by stretch; no batch is read before the stretch's norms are computed."""
        run, at = self.run, self.start
        while at < run.steps:
            stretch, into = divmod(at, run.every)
            first, end = at - into, min(at - into + run.every, run.steps)
            spending = self._before(stretch) if not into else self._restored(stretch)
            self.encrypted = run.placed(spending.encrypt(self.key, stretch))
            scheme: Any = self.sampler.scheme
            # proof: individual-sampling-1
            left = run.filter.steps_left(spending.spent, spending.levels, run.every, run.parts)
            staying = dataclasses.replace(scheme, until=first + left[self.owners])
            pipeline = dataclasses.replace(
                self.pipeline,
                sampler=dataclasses.replace(self.sampler, scheme=staying),
                per_unit=run.bounds[spending.levels][self.owners],
            )
            for batch in pipeline.iterate(at, end):
                yield batch.step + 1, batch
            at = end

    def step(self, state: TrainState, inputs: StepBatch) -> tuple[TrainState, StepOutput]:
        """Takes a step; the new state keeps what users had spent before its stretch."""
        state, output = super().step(dataclasses.replace(state, units=()), inputs)
        self.params = state.params
        return dataclasses.replace(state, units=self.encrypted), output

    def _restored(self, stretch: int) -> Spending:
        return Spending.decrypt(self.encrypted, self.key, stretch)

    def _before(self, stretch: int) -> Spending:
        """What users have spent before a stretch, and their bounds at the current parameters."""
        spending = Spending.none(self.run.users)
        if stretch:
            spending = self.run.after(self._restored(stretch - 1), self.run.every)
        # proof: individual-bound-1
        levels = levels_of(self.compute_norms(stretch), self.run.mechanism.clip_norm)
        return dataclasses.replace(spending, levels=levels)

    def compute_norms(self, stretch: int) -> np.ndarray:
        """Float32 [users]: the largest gradient norm among the units of each user."""
        key, pipeline = self.key.child("look-at-everybody", stretch), self.pipeline
        width = pipeline.row * _NORM_ROWS
        all_units, units = _AllUnits(self.sampler, width, key), len(self.owners)
        reader = dataclasses.replace(
            pipeline,
            sampler=all_units,
            # proof: individual-bound-3
            capacities=(_NORM_ROWS,),
            loss_key=None if pipeline.loss_key is None else key,
            per_unit=np.arange(units, dtype=np.int32),
        )
        of_units = np.full(units, np.nan, np.float32)
        for batch in reader.iterate(0, math.ceil(units / width)):
            for bucket in batch.buckets:
                unit_arrays = units_of(
                    self.run.mechanism, dataclasses.replace(bucket, per_unit=None)
                )
                given = (unit_arrays, bucket.unit_mask, bucket.per_unit, self.run.frozen)
                norms, there, who = map(np.asarray, self.norms_of_batch(self.params, *given))
                of_units[who[there]] = norms[there]
        largest = np.zeros(self.run.users, np.float32)
        # proof: individual-els-bound-1
        np.maximum.at(largest, self.owners, of_units)
        return largest
