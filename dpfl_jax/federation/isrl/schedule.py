"""The schedule, fixed before the run: which silos answer when, with which records and keys."""

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
    """R rounds of N silos.

    Attributes:
      present: bool [R, N], who answers. Public.
      turn: int32 [R, N], rounds in which the silo answered before.
      keys: uint32 [R, N, 2, 8], keys for sampling and for noise, each used once.
      rank: int32 [N, n_max], a random order of each silo's records, drawn before the run.

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
        """R, the leading axis of ``present``."""
        return self.present.shape[0]

    def rows(self, start: int = 0, stop: int | None = None) -> dict[str, jax.Array]:
        """Rounds ``start`` to ``stop`` as a pytree to scan over."""
        part = slice(start, stop)
        return {
            "present": self.present[part],
            "turn": self.turn[part],
            "keys": self.keys[part],
        }


def participation_law(available: int | Mapping[int, float] | None, silos: int) -> dict[int, float]:
    """{m: probability} of the number of silos that answer in a round.

    Raises:
      BadInputError: a law that is none, or names more silos than there are.
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
            f"the silos available in a round are {law}, but it must be a number, or a law of "
            f"numbers, between 1 and the {silos} silos"
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
      key: the run's root key; the keys of every (silo, round) are derived from it.
      rounds: R.
      sizes: int [N], records of each silo.
      available: M, silos that answer in every round; or {m: probability}, the law of M_r, which
        the network decides; None: all. Who they are is uniform and independent of everything.
      one_pass_batch: K_i [N]: a silo that has no K_i unused records left stays silent.
      most_rounds: a silo that has answered so often stays silent (its budget is for so many).
      silo_key: of each silo, from which its keys and its order of records come; default: made from
        ``key`` and everything else that is given.

    Raises:
      BadInputError: a law of M_r that is none, or names more silos than there are.

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
    # Schedules that differ in anything must not share noise: their messages could be subtracted.
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
    """What one silo draws before the run.

    Args:
      key: of the silo, used for nothing else.
      rounds: R.
      size: n_i.
      capacity: n_max, of the padded arrays.

    Returns:
      keys uint32 [R, 2, 8], and rank int64 [n_max] (``Schedule``).
    """
    keys = key.numpy("isrl-keys").integers(0, 2**32, (rounds, 2, 8), dtype=np.uint32)
    order = key.numpy("isrl-order").random(capacity)
    # Padding comes last in the order, so that the first n_i places hold real records.
    order[size:] = 2.0
    return keys, order.argsort().argsort()


def rows_for_use(rows: PyTree, *what: Any) -> PyTree:
    """Rounds of a schedule with keys for one use of it alone.

    Two algorithms that were given one schedule would otherwise add the same noise to different
    messages, whose difference is a difference of gradients.

    Args:
      rows: of a schedule; ``keys`` uint32 [..., 8]. Rows without keys are returned as they are.
      *what: see ``words_of``.
    """
    if not (isinstance(rows, Mapping) and "keys" in rows):
        return rows
    return {**rows, "keys": derived_keys(rows["keys"], words_of(*what))}


def words_of(*what: Any, key: jax.Array | None = None) -> jax.Array:
    """uint32 [4] that identify a use of keys: a digest of names and pytrees of arrays.

    Args:
      *what: of which names and arrays.
      key: uint32 [8], of a keyed digest, for arrays that others choose; None: a public
        one, for which two arrays with the same digest can be constructed.
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
    """Keys uint32 [..., 8] derived from ``keys`` and ``words``."""
    return jax.vmap(lambda key: subkey(key, words))(keys.reshape(-1, 8)).reshape(keys.shape)
