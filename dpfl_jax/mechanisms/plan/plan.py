"""A plan: a mechanism calibrated for a data set, a number of steps and a target.

``fit`` runs a plan, or a loop that you write.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dpfl_jax import accounting
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.clipping import Adaptive, Trainable, split
from dpfl_jax.clipping.result import StepStats
from dpfl_jax.config.execution import Execution
from dpfl_jax.config.kinds import code_outside
from dpfl_jax.data.owners import Bounding, bounding_of
from dpfl_jax.data.pipeline import Pipeline, StepBatch
from dpfl_jax.data.store import (
    Readable,
    fingerprint_of,
    unit_key_of,
)
from dpfl_jax.errors import BadInputError, expect
from dpfl_jax.mechanisms.calibrated import Calibrated
from dpfl_jax.mechanisms.participation import LossFn, Population, PyTree
from dpfl_jax.mechanisms.plan.batches import (
    check_packed_loss,
    check_packing,
    example_loss,
    step_arguments,
    training_pipeline,
)
from dpfl_jax.mechanisms.plan.sum_check import check_sum
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import DATA_AXIS, place, replicated, splits_parameters
from dpfl_jax.noise import ONE_RELEASE, refuse_key_reuse
from dpfl_jax.randomness import RootKey, key_argument, with_any_key
from dpfl_jax.run.public_inputs import about, public_inputs
from dpfl_jax.run.terms import PUBLIC_KEY_CAVEAT, training_digest
from dpfl_jax.sampling import Sampler

if TYPE_CHECKING:
    from dpfl_jax.mechanisms.mechanism import Mechanism


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """The clipped sum of one step's units.

    Attributes:
      sum: clipped sum, a float32 pytree like the trained parameters. Not private before noise.
      stats: statistics of the units, such as norms and losses. Not private.

    Examples:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> store = dpfl.from_arrays({"x": np.ones((200, 1), "float32")}, users=np.arange(200) // 2)
      >>> mechanism = dpfl.uls(group_size=2, cohort_size=16)
      >>> plan = mechanism.plan(store, steps=20, epsilon=8.0, delta=1e-4)
      >>> def loss(params, example):
      ...     return jnp.sum(example["x"] * params)
      >>> batch = next(plan.batches(dpfl.RootKey.generate()))
      >>> plan.clipped_grad(loss)(jnp.zeros(1), batch).sum.shape
      (1,)
    """

    sum: PyTree
    stats: StepStats


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The units of one step, and the key of its noise.

    Attributes:
      step: number of the step, from 0.
      units: the data of the units, which ``Plan.clipped_grad`` reads.
      plan: digest of the plan that the batch belongs to.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
      >>> store = dpfl.from_arrays({"x": x, "label": x[:, 0] > 0}, users=np.arange(200) // 2)
      >>> mechanism = dpfl.uls(group_size=2, cohort_size=16)
      >>> plan = mechanism.plan(store, steps=20, epsilon=8.0, delta=1e-4)
      >>> batch = next(plan.batches(dpfl.RootKey.generate()))
      >>> batch.step
      0
    """

    step: int
    units: StepBatch
    plan: str
    _keys: list[np.ndarray] = dataclasses.field(repr=False)

    @property
    def noise_key(self) -> np.ndarray:
        """The secret noise key for ``Plan.noise``, uint32 [11] or longer. It can be read only once.

        Raises:
          BadInputError: it was read before.
        """
        if not self._keys:
            raise BadInputError(
                f"the noise key of step {self.step} was already taken from its batch (or this is a "
                f"copy of the batch, which has no key), but {ONE_RELEASE}"
            )
        return self._keys.pop()

    def __getstate__(self) -> dict[str, Any]:
        # Copies get no key: two copies of a batch would each give it once.
        return {**self.__dict__, "_keys": []}


# Fingerprint of a secret key and digest of a plan -> number of steps drawn in this process.
_drawn: dict[str, int] = {}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mechanism calibrated for a data set, made by ``Mechanism.plan``.

    Attributes:
      calibrated: the mechanism with its noise, for the data's population.
      data: the store whose units are sampled.
      execution: how steps are computed.
      mesh: the devices that compute.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
      >>> store = dpfl.from_arrays({"x": x, "label": x[:, 0] > 0}, users=np.arange(200) // 2)
      >>> mechanism = dpfl.uls(group_size=2, cohort_size=16)
      >>> plan = mechanism.plan(store, steps=20, epsilon=8.0, delta=1e-4)
      >>> plan.guarantee().epsilon <= 8.0
      True
    """

    calibrated: Calibrated
    data: Readable
    execution: Execution
    mesh: Mesh

    def __post_init__(self) -> None:
        """Checks the mesh, and that the noise was calibrated for these data.

        Raises:
          BadInputError: the mesh has no axis ``data``, or the data have other counts.
        """
        self._check_population()
        if DATA_AXIS not in self.mesh.axis_names:
            raise BadInputError(
                f"the mesh has the axes {self.mesh.axis_names}, but units are split over one "
                f"called {DATA_AXIS!r}: make it with dpfl_jax.mesh.make_mesh"
            )

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism, fitted to the number of steps."""
        return self.calibrated.mechanism

    @property
    def population(self) -> Population:
        """The public numbers of the data set."""
        return self.calibrated.population

    @property
    def steps(self) -> int:
        """T, the number of steps that are accounted."""
        return self.calibrated.steps

    @property
    def delta(self) -> float:
        """Delta of the guarantee."""
        return self.calibrated.delta

    # ---- what runs -------------------------------------------------------------------------

    def batches(self, key: RootKey, *, start: int = 0, loss_keys: bool = False) -> Iterator[Batch]:
        """Yields the batch of every step from ``start`` on, with the key of its noise.

        Every batch must be used, even an empty one. Batches are read ahead.

        Use a key for one run only. Draws depend on the key and the plan, but not on the loss or the
        parameters: two runs with one key would add the same noise, which cancels in the difference
        of their models. Within a process, a secret key gives each step once.

        Args:
          key: secret root key of this run. To resume a loop, save the key with the parameters and
            the state of the noise; with correlated noise, gradients are NaN without this state.
          start: number of steps already taken. If the mechanism ``is_stateful``, they must have
            been taken with this key and this plan, or a user may be drawn more often than is
            accounted.
          loss_keys: whether the loss takes a random key for each example (``rng`` or ``key``).

        Raises:
          BadInputError: ``start`` is no step of the plan, or was drawn from this key before; or the
            mechanism has individual budgets or an adaptive clip norm.
        """
        expect(key, RootKey, "key", "a RootKey, as RootKey.generate() makes")
        self._refuse_own_loop()
        if not 0 <= start <= self.steps:
            raise BadInputError(f"start is {start}, but the plan has {self.steps} steps")
        key = self._own(key)
        name = f"{key.fingerprint}:{self.digest}"
        pipeline = self.pipeline(self.sampler(key), key if loss_keys else None)
        if key.public:
            self._public_seeds.add(key.fingerprint)
        for units in pipeline.iterate(start, self.steps):
            if not key.public:
                if units.step < _drawn.get(name, 0):
                    raise BadInputError(
                        f"step {units.step} was already drawn from this key: its noise would be "
                        "added twice; take another key for another run (RootKey.generate()), or a "
                        "public one for a trial (RootKey.from_seed)"
                    )
                _drawn[name] = units.step + 1
            yield Batch(units.step, units, self.digest, [self.noise_key(key, units.step)])

    def clipped_grad(
        self, loss_fn: LossFn, *, trainable: Trainable = None
    ) -> Callable[[PyTree, Batch], ClippedSum]:
        """Returns the function that sums a batch's clipped gradients.

        Its first call checks, as ``fit`` does, that units do not mix, that the sum equals the sum
        computed on one device, and that norms equal those of plain per-unit gradients.

        Args:
          loss_fn: ``(params, example) -> scalar`` for one example.
          trainable: which parameters are trained, as for ``fit``.

        Returns:
          ``(params, batch) -> ClippedSum``.

        Raises:
          BadInputError: the plan's mesh splits parameters, the mechanism has individual budgets, or
            the clip norm adapts. Use ``fit`` for these.
        """
        self._refuse_own_loop()
        if splits_parameters(self.mesh):
            raise BadInputError(
                "this plan splits parameters over devices (execution.mesh), which only fit can "
                "run: use fit, or a mesh with data alone"
            )
        shipped, random = self.shipped_loss(loss_fn), self.key_argument_of(loss_fn)
        summed = jax.jit(
            clipped_sum_over_microbatches(
                self.mechanism,
                shipped,
                self.mesh,
                strategy=self.execution.strategy,
                trainable=trainable,
                **self.execution.cut,
            )
        )
        checked = not self.mechanism.private

        def check(params: PyTree) -> None:
            if self.execution.packing:
                check_packed_loss(loss_fn, self.data, params)
            trained, frozen = place(split(params, trainable), replicated(self.mesh))
            # Like ``fit``, refuses a loss whose traced computation does not say what it computes.
            traced = with_any_key(loss_fn, key_argument(loss_fn))
            training_digest(traced, trained, frozen, self.example, optax.identity())
            any_key = RootKey.from_seed(0)  # the check reads the first units, not a draw
            sampler = self.sampler(any_key)
            pipeline = self.pipeline(sampler, any_key if random else None)
            given = (summed, self.mechanism, shipped, trained, frozen, pipeline)
            check_sum(*given, sampler.group_size, trainable=trainable)

        def clipped(params: PyTree, batch: Batch) -> ClippedSum:
            nonlocal checked
            if batch.plan != self.digest:
                raise BadInputError(
                    "the batch belongs to another plan (other data, mechanism, steps or delta), "
                    "whose privacy cost this plan does not state: take batches from "
                    "plan.batches of this plan"
                )
            if random and batch.units.buckets[0].keys is None:
                raise BadInputError(
                    f"the loss takes its own randomness (`{random}`), but the batch has none: "
                    "give plan.batches loss_keys=True"
                )
            if not checked:
                check(params)
                checked = True
            trained, frozen = split(params, trainable)
            units = step_arguments(self.mechanism, batch.units)
            return ClippedSum(*summed(trained, *units, frozen))

        return clipped

    def noise(self) -> optax.GradientTransformationExtraArgs:
        """Returns the transformation of a clipped sum into a private gradient.

        It adds noise, and divides by the expected size. Always continue with the state that
        ``update`` returned.

        One release for each batch is accounted. A second release with the same noise key is
        refused where it can be noticed:

        * A batch gives its key once.
        * ``update`` takes the same key once outside ``jit``, and the same traced array once within.
        * From a state that has already released the step, ``update`` raises BadInputError outside
          ``jit``, and returns NaN within.

        It cannot be noticed if you keep a key and an old state, and pass both to a compiled
        function twice, or use them within ``vmap``, ``scan`` or ``lax.map``.

        Returns:
          ``init(params) -> state`` and ``update(sum, state, params=None, *, noise_key) ->
          (gradient, state)``, with the batch's ``noise_key`` (``noise.refuse_key_reuse``).
        """
        noise = self.calibrated.noise_transform()
        return refuse_key_reuse(noise) if self.mechanism.private else noise

    def _check_population(self) -> None:
        """Refuses data with other counts than those accounted, as the draw would differ.

        Called again before units are drawn, because a user-defined store may change.
        """
        drawn = self.mechanism.participation.population_of(self.data)
        if drawn != self.population:
            raise BadInputError(
                f"the noise was calibrated for {self.population.description}, but these data hold "
                f"{drawn.description}, so that the stated guarantee would not hold: make the plan "
                "from these data (mechanism.plan(data, ...)), and do not change them afterwards"
            )

    def sampler(self, key: RootKey) -> Sampler:
        """Returns the sampler that draws each step's units from the root key of a run.

        Raises:
          BadInputError: the data have other counts than when the plan was made.
        """
        self._check_population()
        return self.mechanism.sampler(self.data.user_offsets, key)

    def pipeline(self, sampler: Sampler, loss_key: RootKey | None = None) -> Pipeline:
        """Returns the pipeline that reads what a sampler draws, and ships it to the mesh."""
        how = self.execution
        return training_pipeline(
            sampler,
            self.data,
            self.mesh,
            how.microbatch_size,
            how.group_buckets,
            loss_key,
            how.packing,
        )

    def shipped_loss(self, loss_fn: LossFn) -> LossFn:
        """Returns the loss of an example in the form that the pipeline ships.

        Raises:
          BadInputError: ``execution.packing`` is set, but these examples or this loss cannot be
            packed.
        """
        check_packing(loss_fn, self.data, self.execution)
        return example_loss(loss_fn, self.data, bool(self.execution.packing))

    def key_argument_of(self, loss_fn: LossFn) -> str | None:
        """Returns the name of the argument by which a loss takes each example's key, or None."""
        return None if self.execution.packing else key_argument(loss_fn)

    def noise_key(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the noise key of a step, from the root key of a run: uint32 [11] or longer.

        It holds eight words for this step, eight for each step before it whose noise is drawn
        again, the number of the step, and two words that identify the run.
        """
        steps = range(step, step - self.mechanism.noise.keys_per_step, -1)
        words = [key.words("noise", max(s, 0)) for s in steps]
        return np.concatenate([*words, np.full(1, step, np.uint32), key.words("run-of-noise")[:2]])

    @functools.cached_property
    def _public_seeds(self) -> set[str]:
        """Fingerprints of the public keys that ``batches`` drew from."""
        return set()

    def _refuse_own_loop(self) -> None:
        if isinstance(self.mechanism.clip, Adaptive):
            raise BadInputError(
                "mechanism.clip is adaptive: the clip norm of a step follows from the release "
                "before it, which only fit keeps: use fit, or another clip rule"
            )
        if self.mechanism.budget is not None:
            raise BadInputError(
                f"mechanism.kind={self.mechanism.kind} tracks each user's budget with passes over "
                "all users, which only fit does: use fit, or another mechanism"
            )

    def _own(self, key: RootKey) -> RootKey:
        # Each plan gets its own key from a secret one. A public seed draws the same in every plan,
        # because runs under one seed are compared with each other.
        return key if key.public else key.child("plan:" + self.digest)

    # ---- what is accounted -----------------------------------------------------------------

    @property
    def bounding(self) -> Bounding | None:
        """What was left out of data whose examples have several owners; None for other data."""
        return bounding_of(self.data)

    @functools.cached_property
    def example(self) -> PyTree:
        """The first example, to trace losses with."""
        first = self.data.read(np.asarray(self.data.user_offsets)[:1])
        return jax.tree.map(lambda x: x[0], first)

    @functools.cached_property
    def stated(self) -> dict[str, Any]:
        """The plan as plain JSON, for reports."""
        stated = {
            "mechanism": self.calibrated.to_section(),
            "population": self.population.to_json(),
            "delta": self.delta,
            "steps": self.steps,
        }
        return json.loads(json.dumps(stated, default=lambda number: number.item()))

    @property
    def data_digest(self) -> str:
        """Hex digest that identifies the training data. Not private.

        Computed at each call: if a user-defined store has changed, the noise must differ.
        """
        offsets = np.asarray(self.data.user_offsets, np.int64)
        digest = hashlib.sha256(offsets.tobytes())
        digest.update(fingerprint_of(self.data, int(offsets[-1])).encode())
        return digest.hexdigest()

    @property
    def code_outside(self) -> list[str]:
        """Digests of the code of those parts of the mechanism that are not this package's."""
        return code_outside(self.mechanism, getattr(self.mechanism.participation, "scheme", None))

    @functools.cached_property
    def digest(self) -> str:
        """Hex digest that identifies mechanism, data, steps and delta, but not the execution."""
        content = json.dumps([self.stated, self.data_digest, *self.code_outside], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def event(self, steps: int | None = None) -> Any:
        """Returns the ``DpEvent`` of the first ``steps`` steps (None: all) for one privacy unit."""
        return self.calibrated.event(steps)

    def epsilons(self, counts: Sequence[int]) -> list[float]:
        """Returns upper bounds on epsilon after these numbers of steps; inf where there is none."""
        return self.calibrated.epsilons(counts)

    def guarantee(
        self,
        steps: int | None = None,
        caveats: tuple[str, ...] = (),
        *,
        key: RootKey | None = None,
    ) -> accounting.Guarantee:
        """Returns the guarantee of the first ``steps`` steps.

        It names public seeds that ``batches`` of this plan drew from. If your loop releases more
        than the parameters, say so in ``caveats``.

        Args:
          steps: number of steps taken; None: all.
          caveats: sentences to add.
          key: root key of draws that were not made by ``batches``; it is named if it is public.

        Raises:
          BadInputError: the plan has fewer steps.
        """
        public = bool(self._public_seeds) or (key is not None and key.public)
        if public and self.mechanism.private and PUBLIC_KEY_CAVEAT not in caveats:
            caveats = (*caveats, PUBLIC_KEY_CAVEAT)
        return self.with_public_inputs(self.calibrated.guarantee(steps, caveats))

    def with_public_inputs(self, guarantee: accounting.Guarantee) -> accounting.Guarantee:
        """Returns the guarantee with what makes a user in the data, and the public inputs."""
        inputs = public_inputs(self.population.description, self.mechanism.bounds)
        return about(guarantee, unit_key_of(self.data), inputs)

    def statement(self, guarantee: accounting.Guarantee, steps: int | None = None) -> Statement:
        """Returns the contents of guarantee.json for the first ``steps`` steps (None: all)."""
        return self.calibrated.statement(guarantee, steps)
