"""What a silo sends: the noisy gradient of a sample of its records, and nothing else.

The adversary of ISRL-DP sees every message of a silo. So records are read only here, and here each
record's gradient is clipped and noise is added, before messages are averaged over silos.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dpfl_jax.accounting import NoiseLaw
from dpfl_jax.clipping import Flat, clipped_grad
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.algorithms import Oracle
from dpfl_jax.federation.isrl.schedule import derived_keys, words_of
from dpfl_jax.noise import Noise
from dpfl_jax.noise.chacha import uniform
from dpfl_jax.run.state import mixed
from dpfl_jax.run.terms import computation_digest

PyTree = Any
Loss = Callable[[jax.Array, PyTree], jax.Array]
Sampling = Literal["poisson", "full", "disjoint"]
# The message of one silo; ``make_message`` says what the arguments are.
Message = Callable[..., jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SiloData:
    """The records of N silos, padded to the largest.

    Attributes:
      examples: pytree of arrays [N, n_max, ...].
      sizes: int32 [N], number of real records in each silo, which come first. Public.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import isrl
      >>> data = isrl.SiloData({"x": jnp.zeros((2, 5, 3))}, sizes=jnp.array([5, 4]))  # 2 silos
      >>> data.examples["x"].shape
      (2, 5, 3)
    """

    examples: PyTree
    sizes: jax.Array

    @property
    def num_silos(self) -> int:
        """The number of silos N, which is the leading axis."""
        return self.sizes.shape[0]

    @property
    def capacity(self) -> int:
        """The number of records for which arrays have room in each silo, n_max."""
        return jax.tree.leaves(self.examples)[0].shape[1]


@dataclasses.dataclass(frozen=True)
class MessageSpec:
    """How a silo samples and adds noise.

    Attributes:
      sampling: ``"poisson"`` (each record with probability K/n; the default), ``"full"`` (all
        records), or ``"disjoint"`` (each record at most once in the run: one pass).
      noise: how noise is drawn and added, ``"exact"`` or ``"float"``.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> isrl.MessageSpec("disjoint").noise
      'exact'
    """

    sampling: Sampling = "poisson"
    noise: NoiseLaw = "exact"


def make_message(loss: Loss, spec: MessageSpec) -> Message:
    """Returns ``message(w, examples, size, rank, turn, batch, clip_norm, stddev, keys)``.

    The arguments of the returned function are those of one silo: ``w``; ``examples`` [n_max, ...];
    ``size`` int; ``rank`` int [n_max], the place of each record in a random order that is drawn
    before the run; ``turn`` int, the number of rounds in which the silo has answered; ``batch``
    float, K; ``clip_norm`` float; ``stddev`` float, standard deviation of the noise on the *sum* of
    gradients; ``keys`` uint32 [2, 8], for sampling and for noise. It returns an array like w: the
    sum of clipped gradients plus noise, over K, which is a constant and never the actual number.

    Args:
      loss: ``(w, example) -> scalar`` for one record; w is one array of any shape.
      spec: sampling and noise.
    """

    def message(
        w: jax.Array,
        examples: PyTree,
        size: jax.Array,
        rank: jax.Array,
        turn: jax.Array,
        batch: jax.Array,
        clip_norm: jax.Array,
        stddev: jax.Array,
        keys: jax.Array,
    ) -> jax.Array:
        n = rank.shape[0]
        real = jnp.arange(n) < size
        if spec.sampling == "poisson":
            # proof: isrl-sampling-1
            mask = real & (uniform(keys[0], n) < batch / size)
        elif spec.sampling == "full":
            mask = real
        else:
            # proof: isrl-sampling-2
            mask = real & (rank >= turn * batch) & (rank < (turn + 1) * batch)
        total = clipped_sum(loss, w, examples, mask, clip_norm)
        # proof: isrl-noise-1
        noised = Noise(stddev, clip_norm, spec.noise).add(keys[1], total)
        return noised / jnp.maximum(batch, 1.0)

    return message


def clipped_sum(
    loss: Loss, w: jax.Array, examples: PyTree, mask: jax.Array, clip_norm: jax.Array
) -> jax.Array:
    """Returns the sum of the clipped gradients of the examples in the mask, like w."""

    def one(params: PyTree, example: PyTree) -> jax.Array:
        return loss(params["w"], example)

    # Ghost norms: gradients of linear models are products of two vectors, and are never formed.
    # proof: isrl-sensitivity-1
    rule = Flat(clip_norm)  # type: ignore[arg-type]
    bounded = clipped_grad(one, rule=rule, strategy="ghost")
    return bounded({"w": w}, examples, mask=mask).sum["w"]


def loss_name(loss: Loss, w: Any, data: SiloData) -> str:
    """Returns a digest of what a loss computes, as traced by JAX."""
    record = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), data.examples)
    return computation_digest(jax.value_and_grad(loss), w, record)


def make_messages(
    loss: Loss,
    spec: MessageSpec,
    data: SiloData,
    *,
    batch: jax.Array,
    clip_norm: jax.Array | float,
    stddev: jax.Array,
    rank: jax.Array | None = None,
) -> Callable[[jax.Array, PyTree], jax.Array]:
    """Returns ``messages(w, round) -> [N, ...]`` of all silos; arguments as for ``make_oracle``."""
    if rank is None and spec.sampling == "disjoint":
        raise BadInputError(
            "sampling is disjoint, which needs a random order of records: give rank=schedule.rank"
        )
    message, name = make_message(loss, spec), repr(spec)
    return of_all_silos(message, name, loss, data, batch, clip_norm, stddev, rank)


def of_all_silos(
    message: Message,
    name: str,
    loss: Loss,
    data: SiloData,
    batch: jax.Array,
    clip_norm: jax.Array | float,
    stddev: jax.Array,
    rank: jax.Array | None = None,
) -> Callable[[jax.Array, PyTree], jax.Array]:
    """Returns ``make_messages`` for a given ``message``, whose ``name`` keys depend on.

    A silo's message does not depend on other silos' records.
    """
    silos = data.num_silos
    clip_norms = jnp.broadcast_to(jnp.asarray(clip_norm, jnp.float32), (silos,))
    if rank is None:
        rank = jnp.zeros((silos, data.capacity), jnp.int32)
    every = jax.vmap(message, in_axes=(None, 0, 0, 0, 0, 0, 0, 0, 0))
    words = jax.vmap(functools.partial(words_of, name))(
        data.examples, data.sizes, batch, clip_norms, stddev
    )

    def messages(w: jax.Array, row: PyTree) -> jax.Array:
        # Keys also depend on w: otherwise messages at two points would have the same noise, which
        # would cancel in their difference. The digest is keyed, because others choose w.
        of_w = functools.partial(words_of, loss_name(loss, w, data), w)
        point = jax.vmap(lambda keys: of_w(key=keys.reshape(-1, 8)[0]))(row["keys"])
        keys = jax.vmap(derived_keys)(row["keys"], mixed(words, point))
        return every(
            w, data.examples, data.sizes, rank, row["turn"], batch, clip_norms, stddev, keys
        )

    return messages


def mean_message(
    sent: jax.Array, present: jax.Array, silo_weights: jax.Array | None = None
) -> jax.Array:
    """Returns the mean of the messages of the silos that are present; zero if none is.

    Args:
      sent: float32 [N, ...], messages of all silos.
      present: bool [N], whether each silo is present.
      silo_weights: float32 [N]; see ``make_oracle``.
    """
    silos = present.shape[0]
    scale = jnp.ones(silos) if silo_weights is None else silos * silo_weights
    mean = jnp.tensordot(present * scale, sent, axes=1, precision="highest")
    return mean / jnp.maximum(present.sum(), 1)


def make_oracle(
    loss: Loss,
    spec: MessageSpec,
    data: SiloData,
    *,
    batch: jax.Array,
    clip_norm: jax.Array | float,
    stddev: jax.Array,
    rank: jax.Array | None = None,
    silo_weights: jax.Array | None = None,
) -> Oracle:
    """Returns ``oracle(w, round) -> mean of the messages of the silos that answer``.

    ``round`` is one row of ``Schedule``: ``present`` bool [N], ``turn`` int [N], ``keys`` uint32
    [N, 2, 8]. **Call the oracle once for each row: only one call is accounted.** It derives keys
    for its data and w from the row's (``schedule.derived_keys``). If no silo answers, the mean is
    zero.

    Args:
      loss: ``(w, example) -> scalar`` for one record.
      spec: sampling and noise.
      data: the records of the silos.
      batch: float32 [N], expected batch sizes K_i.
      clip_norm: scalar or [N].
      stddev: float32 [N], standard deviation of the noise on each silo's sum (noise multiplier
        times clip norm).
      rank: int32 [N, n_max], from the schedule; needed for ``"disjoint"``.
      silo_weights: float32 [N], p_i that sum to 1, for F = sum p_i F_i; None: all 1/N. (Appendix H
        scales f_i by N p_i; scaling the noised message is equivalent.)

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.federation import isrl
      >>> data = isrl.SiloData({"x": jnp.ones((2, 8, 3))}, sizes=jnp.array([8, 8]))
      >>> def loss(w, record):
      ...     return 0.5 * jnp.sum((w - record["x"]) ** 2)
      >>> oracle = isrl.make_oracle(
      ...     loss, isrl.MessageSpec(), data,
      ...     batch=jnp.full(2, 4.0), clip_norm=1.0, stddev=jnp.full(2, 2.0),
      ... )
      >>> key = dpfl.RootKey.from_seed(0)
      >>> schedule = isrl.make_schedule(key, rounds=1, sizes=np.array([8, 8]))
      >>> row = jax.tree.map(lambda x: x[0], schedule.rows())
      >>> oracle(jnp.zeros(3), row).shape
      (3,)
    """
    messages = make_messages(
        loss, spec, data, batch=batch, clip_norm=clip_norm, stddev=stddev, rank=rank
    )
    return lambda w, row: mean_message(messages(w, row), row["present"], silo_weights)
