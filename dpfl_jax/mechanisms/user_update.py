"""What is clipped for each unit: its gradient, or, in federated rounds, a *user update*.

A user update is the sum of what some SGD steps on a user's data subtract from the parameters. These
steps have no noise; the update is clipped once. (In the local steps of a silo, every step has
noise.)

Source: McMahan, Ramage, Talwar and Zhang 2018, "Learning differentially private recurrent language
models" (arXiv 1710.06963), Algorithm 1, DP-FedAvg; with noise that is correlated between rounds it
is DP-FTRL as of Kairouz et al. 2021 (arXiv 2103.00039) and McMahan et al. 2024 (arXiv 2408.08868).

    UserUpdate, on a device with the examples D, at the server's parameters p:
      u = 0
      in each epoch, for each batch of D:
        u = u + learning rate * (gradient of the batch's mean loss at p - u)     # without noise
      gives clip(u, C) to the server, which adds up, adds noise, and divides by M

So a round is a step of central training in which u takes the place of a user's gradient.
Participation, noise and accounting are unchanged. The server's optimiser gets the noised mean (SGD
with learning rate 1 is federated averaging). With one local step at learning rate 1, u is the
gradient, as in ``uls``.

Departures: a device uses the at most ``group_size`` examples that the mechanism draws for its user,
in the order in which they were drawn, or stored if the user has no more. A device whose update is
not finite counts as failed: it adds nothing, and the divisor stays the same.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dpfl_jax.clipping import ClippedGrad, Rule, Trainable, clipped_grad, join, split
from dpfl_jax.config.kinds import UPDATES, Named
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.mechanisms.participation import (
    LossFn,
    Participation,
    PyTree,
    mean_of_examples,
    pieces_of_unit,
    require_positive,
)
from dpfl_jax.varying import vary, varying_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitUpdate(Named, abc.ABC, kinds=UPDATES):
    """What is clipped for each unit: its gradient, or an update."""

    @property
    def passes(self) -> int:
        """How often a step evaluates the gradient of each of its examples."""
        return 1

    @property
    def description(self) -> str:
        """What the guarantee's sampling description says after the examples of a unit."""
        return ""

    @abc.abstractmethod
    def clipped(
        self, participation: Participation, loss_fn: LossFn, rule: Rule, **options: Any
    ) -> ClippedGrad:
        """Returns the function that sums the units' clipped gradients or updates.

        Args:
          participation: the mechanism's, which says what a unit is.
          loss_fn: ``(params, example) -> scalar`` for one example.
          rule: the clip rule.
          **options: ``examples_at_once`` and ``example_sharding`` of ``Mechanism.clipped_grad``,
            and those of ``clipping.clipped_grad``.

        Raises:
          BadInputError: options that do not fit.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient(UnitUpdate):
    """The gradient of its loss.

    Examples:
      >>> from dpfl_jax.mechanisms import Gradient, uls
      >>> uls(group_size=4, cohort_size=64).update == Gradient()
      True
    """

    kind: ClassVar[str] = "gradient"

    def clipped(
        self, participation: Participation, loss_fn: LossFn, rule: Rule, **options: Any
    ) -> ClippedGrad:
        unit_loss = participation.unit_loss(loss_fn)
        at_once, sharding = (options.pop(n, None) for n in ("examples_at_once", "example_sharding"))
        if at_once is not None:
            at_least("examples_at_once", at_once, 1)
            unit_loss, options["pieces"] = participation.microbatched(loss_fn, at_once, sharding)
        return clipped_grad(unit_loss, rule=rule, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserUpdate(UnitUpdate):
    """Parameters before minus after some SGD steps on the user's examples, without noise.

    Attributes:
      user_learning_rate: learning rate of these steps.
      user_batch_size: most examples in one of these steps; None: all.
      user_epochs: passes over the user's examples.

    Examples:
      >>> from dpfl_jax.mechanisms import Mechanism, Users, UserUpdate
      >>> users = Users(group_size=32, cohort_size=64)
      >>> mechanism = Mechanism(participation=users, update=UserUpdate(user_learning_rate=0.1))
      >>> mechanism.update.user_epochs
      1
    """

    user_learning_rate: float
    user_batch_size: int | None = None
    user_epochs: int = 1

    kind: ClassVar[str] = "user_update"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("user_learning_rate", self.user_learning_rate)
        at_least("user_batch_size", self.user_batch_size, 1)
        at_least("user_epochs", self.user_epochs, 1)

    @property
    def passes(self) -> int:
        return self.user_epochs

    @property
    def description(self) -> str:
        # `dpfl verify` compares these words with those in guarantee files of earlier versions.
        epochs = "one epoch" if self.user_epochs == 1 else f"{self.user_epochs} epochs"
        size = self.user_batch_size
        batches = "" if size is None else f" in batches of {size}"
        return f" (for {epochs} of local steps{batches}, rate {self.user_learning_rate:g})"

    def clipped(
        self, participation: Participation, loss_fn: LossFn, rule: Rule, **options: Any
    ) -> ClippedGrad:
        pieces = [options.pop(name, None) for name in ("examples_at_once", "example_sharding")]
        if pieces != [None, None]:
            raise BadInputError(
                "a user update processes one batch after the other: set "
                "mechanism.user_batch_size, and leave out execution.examples_at_once and "
                "execution.split_users"
            )
        if options.get("unit_sharding") is not None:
            raise BadInputError(
                "user updates (mechanism.user_learning_rate) need all parameters on every device, "
                "but this mesh splits them: use execution.mesh with data alone"
            )
        asked = options.pop("strategy", "auto")
        if asked == "ghost":
            raise BadInputError(
                "execution.strategy=ghost forms no user's gradient, but user updates "
                "(mechanism.user_learning_rate) need it: set it to auto, scan or vmap"
            )
        loss = self.loss_of_update(loss_fn, options.get("trainable"))
        strategy: Any = "scan" if asked == "auto" else asked  # one user after the other
        return clipped_grad(loss, rule=rule, strategy=strategy, **options)

    def loss_of_update(self, loss_fn: LossFn, trainable: Trainable) -> LossFn:
        """Returns a loss of one user whose gradient is the user update.

        It is linear in the parameters, with the update as its slope, so that clipping, checks and
        sharding work as for any other loss. Its value is the mean loss over the local steps.
        """
        of_batch = mean_of_examples(loss_fn)
        rate, epochs = self.user_learning_rate, self.user_epochs

        def loss(params: PyTree, user: PyTree, **kwargs: Any) -> jax.Array:
            if "count" in user:
                raise BadInputError(
                    "execution.packing puts several sequences of a user into one row, which user "
                    "updates (mechanism.user_learning_rate) cannot cut into batches: set it to 0"
                )
            trained, frozen = split(params, trainable)
            start = jax.lax.stop_gradient(trained)
            size = user["mask"].shape[0]
            batches = pieces_of_unit(user, min(self.user_batch_size or size, size))
            del batches["count"]  # each batch is divided by its own count, not by the user's

            def mean(at: PyTree, batch: PyTree) -> jax.Array:
                return of_batch(join(at, frozen), batch, **kwargs)

            def sgd_step(moved: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
                now = jax.tree.map(lambda p, u: (p - u).astype(p.dtype), start, moved)
                value, gradient = jax.value_and_grad(mean)(now, batch)
                more = jax.tree.map(lambda u, g: u + rate * g.astype(u.dtype), moved, gradient)
                return more, value * jnp.sum(batch["mask"])

            def epoch(moved: PyTree, _: None) -> tuple[PyTree, jax.Array]:
                moved, values = jax.lax.scan(sgd_step, moved, batches)
                return moved, values.sum()

            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), start)
            nothing = vary(zeros, varying_axes(start, batches))
            update, values = jax.lax.scan(epoch, nothing, length=epochs)
            value = values.sum() / (epochs * jnp.maximum(jnp.sum(user["mask"]), 1))

            def slope(p: jax.Array, at: jax.Array, u: jax.Array) -> jax.Array:
                return jnp.sum((p - at).astype(jnp.float32) * jax.lax.stop_gradient(u))

            # Linear in the parameters, with the update as its gradient.
            # proof: user-update-sensitivity-1
            slopes = jax.tree.map(slope, trained, start, update)
            return jax.lax.stop_gradient(value) + sum(jax.tree.leaves(slopes))

        return loss
