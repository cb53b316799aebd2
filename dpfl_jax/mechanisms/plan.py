"""A plan: a mechanism calibrated for a data set, a number of steps and a target.

It is what can be run and accounted, whether ``fit`` runs it or a loop of one's own.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dpfl_jax import accounting
from dpfl_jax.clipping import Trainable, self_check, split
from dpfl_jax.clipping.stats import StepStats
from dpfl_jax.config.execution import Execution
from dpfl_jax.data.example_keys import key_argument
from dpfl_jax.data.pipeline import Pipeline, StepBatch
from dpfl_jax.data.store import Readable, check_offsets, fingerprint_of
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import LossFn, Mechanism, Population, PyTree
from dpfl_jax.mechanisms.batches import example_loss, step_arguments, training_pipeline, units_of
from dpfl_jax.mechanisms.sums import bounded_sum_over_microbatches, in_pieces
from dpfl_jax.mesh import make_mesh, splits_parameters
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """What a step's units add up to.

    Attributes:
      sum: clipped sum, float32, in the shape of the trained parameters. Not private before noise.
      stats: what the units were like. Not private.
    """

    sum: PyTree
    stats: StepStats


@dataclasses.dataclass(frozen=True)
class Plan:
    """See ``Mechanism.plan``, which makes it.

    Attributes:
      mechanism: with its noise multiplier.
      data: whose units are sampled.
      steps: T.
      delta: of the guarantee.
      execution: how steps are computed.
      mesh: what they are computed on.
    """

    mechanism: Mechanism
    data: Readable
    steps: int
    delta: float
    execution: Execution
    mesh: Mesh

    @classmethod
    def make(
        cls,
        mechanism: Mechanism,
        data: Readable,
        *,
        steps: int,
        epsilon: float | None = None,
        delta: float | None = None,
        execution: Execution | None = None,
        mesh: Mesh | None = None,
    ) -> Plan:
        """See ``Mechanism.plan``."""
        if steps < 1:
            raise BadInputError(f"the number of steps is {steps}, but at least 1 is needed")
        check_offsets(data.user_offsets)
        population = mechanism.population(data.user_offsets)
        mechanism, delta = mechanism.calibrated(population, steps, epsilon, delta)
        execution = Execution() if execution is None else execution
        mesh = make_mesh(**execution.mesh.axes) if mesh is None else mesh
        return cls(mechanism, data, steps, delta, execution, mesh)

    # ---- what runs -------------------------------------------------------------------------

    def batches(
        self, key: RootKey, *, start: int = 0, loss_keys: bool = False
    ) -> Iterator[StepBatch]:
        """The units of every step from ``start`` on, read ahead and on the devices.

        Args:
          key: of this run alone, the same as for ``noise``. What is drawn from a secret key also
            depends on the plan: two plans share neither units nor noise.
          start: steps already taken.
          loss_keys: whether the loss takes a key of its own for each example (``rng`` or ``key``).
        """
        key = self._own(key)
        return self.pipeline(self.sampler(key), key if loss_keys else None).iterate(
            start, self.steps
        )

    def clipped_grad(
        self, loss_fn: LossFn, *, trainable: Trainable = None
    ) -> Callable[[PyTree, StepBatch], ClippedSum]:
        """The sum of a batch's clipped gradients.

        Norms are compared with plain per-unit gradients at the first call.

        Args:
          loss_fn: ``(params, example) -> scalar`` for one example.
          trainable: which parameters are trained, as for ``fit``.

        Returns:
          ``(params, batch) -> ClippedSum``.

        Raises:
          BadInputError: the plan's mesh splits parameters: that is for ``fit``.
        """
        if splits_parameters(self.mesh):
            raise BadInputError(
                "this plan splits parameters over devices (execution.mesh), which a loop of one's "
                "own does not: use fit, or a mesh with data alone"
            )
        shipped, random = example_loss(loss_fn, self.data), key_argument(loss_fn)
        summed = jax.jit(
            bounded_sum_over_microbatches(
                self.mechanism,
                shipped,
                self.mesh,
                strategy=self.execution.strategy,
                trainable=trainable,
                **self.execution.cut,
            )
        )
        checked = False

        def clipped(params: PyTree, batch: StepBatch) -> ClippedSum:
            nonlocal checked
            if random and batch.buckets[0].keys is None:
                raise BadInputError(
                    f"the loss takes its own randomness (`{random}`), but the batch has none: "
                    "give plan.batches loss_keys=True"
                )
            if not checked:
                any_key = RootKey.from_seed(0)  # it looks at the first units, whoever is drawn
                sampler = self.sampler(any_key)
                pipeline = self.pipeline(sampler, any_key if random else None)
                self.check_norms(shipped, params, pipeline, sampler.group_size, trainable)
                checked = True
            trained, frozen = split(params, trainable)
            return ClippedSum(*summed(trained, *step_arguments(self.mechanism, batch), frozen))

        return clipped

    def check_norms(
        self,
        loss_fn: LossFn,
        params: PyTree,
        pipeline: Pipeline,
        group_size: int | None,
        trainable: Trainable = None,
    ) -> None:
        """Compares norms that no gradient is formed for with plain ones, for each shape of units.

        Args:
          loss_fn: of one example, as the pipeline ships it.
          params: all parameters.
          pipeline: gives the first units.
          group_size: the sampler's.
          trainable: as for ``fit``.

        Raises:
          clipping.SelfCheckError: they disagree.
        """
        strategy = self.execution.strategy
        formed = strategy in ("vmap", "scan") or in_pieces(
            self.mechanism, self.mesh, **self.execution.cut
        )
        if formed or not self.mechanism.private:
            return
        bounded = self.mechanism.bounded_grad(loss_fn, strategy=strategy, trainable=trainable)
        for some in pipeline.first_units(2, group_size):
            rows = jax.tree.map(lambda leaf: leaf[0], units_of(self.mechanism, some))
            self_check(bounded, params, rows)

    def noise(self, key: RootKey) -> optax.GradientTransformation:
        """Turns a clipped sum into a private gradient: noise is added, and the sum divided.

        Args:
          key: as for ``batches``.

        Returns:
          ``init(params) -> state`` and ``update(sum, state, params=None) -> (gradient, state)``
          (``noise.transformation``).
        """
        return self.mechanism.noise_transform(self.noise_keys(self._own(key)))

    def sampler(self, key: RootKey) -> Sampler:
        """Which units each step has, under the key of a run."""
        return self.mechanism.sampler(self.data.user_offsets, key)

    def pipeline(self, sampler: Sampler, loss_key: RootKey | None = None) -> Pipeline:
        """Reads what a sampler draws, for the plan's mesh."""
        how = self.execution
        return training_pipeline(
            sampler, self.data, self.mesh, how.microbatch_size, how.group_buckets, loss_key
        )

    def noise_keys(self, key: RootKey) -> np.ndarray:
        """uint32 [steps, 2]: of the noise of each step, under the key of a run."""
        return key.words("noise", self.steps)

    def _own(self, key: RootKey) -> RootKey:
        """Who compares runs under a seed wants their draws; nothing about that key is secret."""
        return key if key.public else key.child("plan:" + self.digest)

    # ---- what is accounted -----------------------------------------------------------------

    @functools.cached_property
    def population(self) -> Population:
        """The public numbers of the data set."""
        return self.mechanism.population(self.data.user_offsets)

    @functools.cached_property
    def stated(self) -> dict[str, Any]:
        """The plan as a report tells it: plain JSON."""
        return {
            "mechanism": {"kind": self.mechanism.kind, **dataclasses.asdict(self.mechanism)},
            "population": dataclasses.asdict(self.population),
            "delta": self.delta,
            "steps": self.steps,
        }

    @functools.cached_property
    def data_digest(self) -> str:
        """Identifies the training data; a function of them, without noise."""
        offsets = np.asarray(self.data.user_offsets, np.int64)
        digest = hashlib.sha256(offsets.tobytes())
        digest.update(fingerprint_of(self.data, int(offsets[-1])).encode())
        return digest.hexdigest()

    @functools.cached_property
    def digest(self) -> str:
        """Identifies mechanism, data, steps and delta. Execution is no part of it."""
        content = json.dumps([self.stated, self.data_digest], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def event(self, steps: int | None = None) -> Any:
        """The ``dp_accounting.DpEvent`` of the first ``steps`` steps (all) for one unit."""
        return self.mechanism.event(self.population, self.steps if steps is None else steps)

    def epsilons(self, counts: Sequence[int]) -> list[float]:
        """Upper bounds on epsilon after these numbers of steps; inf where there is none."""
        total = self.guarantee().epsilon
        curve = accounting.epsilons_midway(self.event, self.steps, counts, self.delta)
        return [min(epsilon, total) for epsilon in curve]

    def guarantee(
        self, steps: int | None = None, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """What the first ``steps`` steps (all) guarantee.

        A loop of one's own adds caveats for what it releases beside the parameters.
        """
        steps = self.steps if steps is None else steps
        return self.mechanism.guarantee(self.population, steps, self.delta, caveats)
