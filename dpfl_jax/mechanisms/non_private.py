"""No privacy: the baseline that the private mechanisms are compared with.

Same sampling and same code path as ELS without contribution limit, no clipping, no noise.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax import accounting
from dpfl_jax.clipping import ClippedGradResult, join, split
from dpfl_jax.mechanisms.base import LossFn, Mechanism, Population, PyTree, require_positive
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import ExampleSampler, Poisson, check_probability


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonPrivate(Mechanism):
    """Plain SGD on Poisson-sampled examples: guarantees nothing.

    Attributes:
      batch_size: expected number of examples per step (the divisor).
    """

    batch_size: float

    kind: ClassVar[str] = "none"
    unit: ClassVar[str] = "none"
    private: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        require_positive("mechanism.batch_size", self.batch_size)

    @property
    def divisor(self) -> float:
        """The expected batch size."""
        return float(self.batch_size)

    def population(self, user_offsets: np.ndarray) -> Population:
        """Counts users and examples; the units are all examples."""
        num_examples = int(user_offsets[-1] - user_offsets[0])
        return Population(len(user_offsets) - 1, num_examples, num_examples)

    @classmethod
    def at_budget(cls, compute_budget: float, group_size: int, **common: Any) -> NonPrivate:
        """The budget is the batch."""
        return cls(batch_size=compute_budget)

    def sampling_probability(self, population: Population) -> float:
        """batch_size / number of examples."""
        return check_probability(
            self.batch_size / max(population.num_units, 1),
            f"expected batch of {self.batch_size:g} from {population.num_units} examples",
            f"set mechanism.batch_size to at most {population.num_units}, or use more data",
        )

    def scheme(self, population: Population) -> Poisson:
        """Each example by a coin."""
        return Poisson(self.sampling_probability(population))

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> ExampleSampler:
        """Poisson over all examples."""
        positions = np.arange(user_offsets[0], user_offsets[-1], dtype=np.int64)
        return ExampleSampler(self.scheme(self.population(user_offsets)), positions, key)

    def clipped_grad(self, loss_fn: LossFn, **options: Any) -> Any:
        """The plain gradient of the sum of losses, in the shape of a bounded sum."""
        trainable = options.get("trainable")

        def total(
            trained: PyTree, frozen: PyTree, batch: PyTree, mask: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            params = join(trained, frozen)
            losses = jax.vmap(lambda example: loss_fn(params, example))(batch)
            losses = jnp.where(mask, losses, 0.0)
            return losses.sum(), losses

        def summed(params: PyTree, batch: PyTree, mask: jax.Array) -> ClippedGradResult:
            trained, frozen = split(params, trainable)
            gradient = jax.value_and_grad(total, has_aux=True)
            (_, losses), grad = gradient(trained, frozen, batch, mask)
            grad = jax.tree.map(lambda g: g.astype(jnp.float32), grad)
            weights = mask.astype(jnp.float32)
            return ClippedGradResult(
                sum=grad,
                norms=jnp.zeros_like(weights),
                weights=weights,
                losses=losses,
                nonfinite=jnp.logical_and(mask, ~jnp.isfinite(losses)),
                aux=None,
            )

        return summed

    @property
    def noise_stddev(self) -> float:
        """None."""
        return 0.0

    def event(self, population: Population, steps: int) -> Any:
        """A non-private event: epsilon is infinite."""
        return dp_accounting.NonPrivateDpEvent()

    def told_sampling(self, population: Population) -> str:
        """Poisson over all examples."""
        return f"Poisson over {population.num_examples} examples"

    def guarantee(
        self, population: Population, steps: int, delta: float, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """A guarantee that says there is none."""
        return accounting.Guarantee(
            unit="none",
            adjacency="none",
            trust="central",
            epsilon=float("inf"),
            delta=delta,
            noise_multiplier=0.0,
            accountant="none",
            sampling=f"{self.told_sampling(population)}, {steps} steps",
            caveats=("this run is not private: it is a baseline", *caveats),
        )
