"""The schedule of a run: which silos answer in which round, with which records and keys."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.noise.chacha import subkey
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.state import content_words, mixed
from dpfl_jax.run.terms import value_digest

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of R rounds of N silos, drawn before the run.

    Attributes:
      present: bool [R, N], whether each silo answers. Public.
      turn: int32 [R, N], number of rounds in which the silo answered before.
      keys: uint32 [R, N, 2, 8], secret keys for sampling and for noise, each used once.
      rank: int32 [N, n_max], the place of each record in a random order of its silo's records.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.federation import isrl
      >>> key = dpfl.RootKey.from_seed(0)
      >>> schedule = isrl.make_schedule(key, rounds=4, sizes=np.array([20, 30, 40]))
      >>> schedule.rounds, schedule.rows(0, 2)["present"].shape
      (4, (2, 3))
    """

    present: jax.Array
    turn: jax.Array
    keys: jax.Array
    rank: jax.Array

    @property
    def rounds(self) -> int:
        """The number of rounds R."""
        return self.present.shape[0]

    def rows(self, start: int = 0, stop: int | None = None) -> dict[str, jax.Array]:
        """Returns the rounds from ``start`` to before ``stop`` as a pytree to scan over."""
        part = slice(start, stop)
        return {
            "present": self.present[part],
            "turn": self.turn[part],
            "keys": self.keys[part],
        }


def participation_law(available: int | Mapping[int, float] | None, silos: int) -> dict[int, float]:
    """Returns {m: probability}, the distribution of the number of silos that answer in a round.

    Args:
      available: a number of silos, or such a distribution; None: all silos.
      silos: number of silos N.

    Raises:
      BadInputError: it is not a probability distribution, or has more silos than there are.
    """
    law = {silos: 1.0} if available is None else available
    law = {law: 1.0} if isinstance(law, int) else dict(law)
    total = sum(law.values())
    if (
        not law
        or min(law) < 1
        or max(law) > silos
        or min(law.values()) < 0
        or abs(total - 1) > 1e-9
    ):
        raise BadInputError(
            f"the silos that answer in a round are {law}, but this must be a number from 1 to "
            f"{silos}, or probabilities of such numbers that sum to 1"
        )
    return law


def make_schedule(
    key: RootKey,
    rounds: int,
    sizes: np.ndarray,
    *,
    available: int | Mapping[int, float] | None = None,
    one_pass_batch: np.ndarray | None = None,
    most_rounds: int | None = None,
    silo_key: Callable[[int], RootKey] | None = None,
) -> Schedule:
    """Draws a schedule.

    Args:
      key: the run's root key, from which the keys of every silo and round are derived.
      rounds: number of rounds R.
      sizes: int [N], number of records of each silo.
      available: number M of silos that answer in every round; or {m: probability}, the distribution
        of this number M_r, which the network decides; None: all. Which silos answer is drawn
        uniformly, and independently of everything else.
      one_pass_batch: int [N], K_i: a silo stays silent once it has fewer than K_i unused records.
      most_rounds: number of answers after which a silo stays silent, because its budget is spent.
      silo_key: returns each silo's key, from which its keys and its order of records come; None:
        derived from ``key`` and all other arguments.

    Raises:
      BadInputError: ``available`` is not a probability distribution, or has more silos than there
        are.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.federation import isrl
      >>> key = dpfl.RootKey.from_seed(0)
      >>> schedule = isrl.make_schedule(key, rounds=4, sizes=np.array([20, 30, 40]), available=2)
      >>> schedule.present.sum(axis=1).tolist()  # silos that answer, by round
      [2, 2, 2, 2]
    """
    sizes = np.asarray(sizes)
    silos = len(sizes)
    law = participation_law(available, silos)
    # Two different schedules must not share noise, which would cancel in a difference of messages.
    given = [rounds, sizes, sorted(law.items()), one_pass_batch, most_rounds]
    key = key.child("isrl-schedule:" + value_digest(given))
    rng = key.numpy("isrl-participation")
    counts = rng.choice(list(law), size=rounds, p=list(law.values()))
    order = rng.random((rounds, silos)).argsort(axis=1).argsort(axis=1)
    present = order < counts[:, None]
    limit = np.full(silos, rounds if most_rounds is None else most_rounds)
    if one_pass_batch is not None:
        limit = np.minimum(limit, sizes // np.maximum(np.asarray(one_pass_batch), 1).astype(int))
    turn: np.ndarray = np.cumsum(present, axis=0) - present
    # proof: isrl-rounds-1
    present &= turn < limit
    key_of = silo_key or (lambda i: key.child("silo", i))
    capacity = int(sizes.max(initial=0))
    drawn = [silo_draws(key_of(i), rounds, int(size), capacity) for i, size in enumerate(sizes)]
    keys = np.stack([k for k, _ in drawn], axis=1)
    rank = np.stack([order for _, order in drawn])
    return Schedule(
        present=jnp.asarray(present),
        turn=jnp.asarray(turn, jnp.int32),
        keys=jnp.asarray(keys),
        rank=jnp.asarray(rank, jnp.int32),
    )


def silo_draws(
    key: RootKey, rounds: int, size: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what one silo draws before the run.

    Args:
      key: key of the silo, used for nothing else.
      rounds: number of rounds R.
      size: number of records n_i.
      capacity: number of records in the padded arrays, n_max.

    Returns:
      ``keys`` uint32 [R, 2, 8] and ``rank`` int64 [n_max], as in ``Schedule``.
    """
    keys = key.numpy("isrl-keys").integers(0, 2**32, (rounds, 2, 8), dtype=np.uint32)
    order = key.numpy("isrl-order").random(capacity)
    # Padding comes last, so that the first n_i places hold real records.
    order[size:] = 2.0
    return keys, order.argsort().argsort()


def rows_for_use(rows: PyTree, *what: Any) -> PyTree:
    """Returns rounds of a schedule with keys that are derived for one use of it.

    Otherwise two algorithms with one schedule would add the same noise to different messages, and
    the noise would cancel in the difference of these messages.

    Args:
      rows: rounds of a schedule, with ``keys`` uint32 [..., 8]; rows without keys are returned
        unchanged.
      *what: what identifies the use; see ``words_of``.
    """
    if not (isinstance(rows, Mapping) and "keys" in rows):
        return rows
    return {**rows, "keys": derived_keys(rows["keys"], words_of(*what))}


def words_of(*what: Any, key: jax.Array | None = None) -> jax.Array:
    """Returns a digest of names and pytrees of arrays, uint32 [4], which identifies a use of keys.

    Args:
      *what: names and pytrees of arrays.
      key: uint32 [8], key of the digest, needed if others choose the arrays: without a key, anyone
        can construct two arrays with the same digest.
    """
    words = jnp.zeros(4, jnp.uint32)
    secret = () if key is None else (key,)
    for part in what:
        if isinstance(part, str):
            digest = hashlib.sha256(part.encode()).digest()[:16]
            words = mixed(words, jnp.asarray(np.frombuffer(digest, np.uint32)))
            continue
        for leaf in jax.tree.leaves(part):
            words = mixed(words, content_words(jnp.asarray(leaf), *secret))
    return words


def derived_keys(keys: jax.Array, words: jax.Array) -> jax.Array:
    """Returns keys that are derived from ``keys`` and ``words``, uint32 [..., 8]."""
    return jax.vmap(lambda key: subkey(key, words))(keys.reshape(-1, 8)).reshape(keys.shape)
