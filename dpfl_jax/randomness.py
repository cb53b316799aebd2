"""Every random draw of a run comes from one root key, by name and counter.

A draw is addressed by a purpose and integer counters ("noise", step), never by the order in
which draws happen: step t can be produced without replaying steps 0..t-1, a resumed run draws
exactly what the interrupted one would have drawn, and no two purposes ever share bits.

The root key is 256 bits. Keys for one address are HMAC-SHA256(root, address), so knowing the
key of one step says nothing about another's. Sampling needs secrecy as much as noise does:
amplification by sampling is lost to whoever knows which units were drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import inspect
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_jax.errors import BadInputError, expect

if TYPE_CHECKING:
    import jax

_KEY_BYTES = 32


@dataclasses.dataclass(frozen=True, repr=False)
class RootKey:
    """A 256-bit secret from which all sampling and noise of one run is derived.

    Attributes:
      secret: 32 bytes. Whoever has them can subtract the noise: keep them out of what you publish.
      public: True if the key came from a seed that others may know (a config, a paper); a
        guarantee computed with a public key holds only against those who do not know it.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> key = dpfl.RootKey.from_seed(0)  # public: for tests; RootKey.generate() is secret
      >>> key.public, dpfl.RootKey.generate().public
      (True, False)
    """

    secret: bytes
    public: bool = False

    def __post_init__(self) -> None:
        if len(self.secret) != _KEY_BYTES:
            raise ValueError(f"a root key has {_KEY_BYTES} bytes, got {len(self.secret)}")

    @classmethod
    def generate(cls) -> RootKey:
        """Draws a key from the operating system's entropy (the default for private runs)."""
        return cls(secrets.token_bytes(_KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: int) -> RootKey:
        """Derives a key from a public integer seed, for tests and reproductions."""
        expect(seed, (int, np.integer), "the seed", "a whole number")
        return cls(hashlib.sha256(b"dpfl_jax public seed %d" % seed).digest(), public=True)

    def __repr__(self) -> str:
        return f"RootKey(fingerprint={self.fingerprint!r}, public={self.public})"

    @property
    def fingerprint(self) -> str:
        """16 hex digits that identify the key without revealing it."""
        return self.derive("fingerprint").hex()[:16]

    def derive(self, purpose: str, *counters: int) -> bytes:
        """Returns 32 pseudo-random bytes for one address.

        Args:
          purpose: What the bits are for, e.g. ``"noise"``; never shared between two uses.
          *counters: Non-negative integers (step, user, ...) below 2**64.
        """
        message = purpose.encode() + b"\x00" + b"".join(c.to_bytes(8, "little") for c in counters)
        return hmac.new(self.secret, message, hashlib.sha256).digest()

    def keyed_digest(self, name: str, content: str) -> str:
        """Returns 32 hex digits that identify ``content``, but only to those who have the key.

        Args:
          name: what the content belongs to.
          content: any text.
        """
        return self.derive(f"digest:{name}:{content}").hex()[:32]

    def child(self, purpose: str, *counters: int) -> RootKey:
        """Returns an independent root key, e.g. one per silo."""
        return RootKey(self.derive("child:" + purpose, *counters), public=self.public)

    def numpy(self, purpose: str, *counters: int) -> np.random.Generator:
        """Returns a counter-based NumPy generator (Philox, 128-bit key) for one address."""
        words = np.frombuffer(self.derive(purpose, *counters)[:16], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=words))

    def words(self, purpose: str, *counters: int) -> np.ndarray:
        """uint32 [8]: a key of 256 bits for one address (``noise/chacha.py``)."""
        return np.frombuffer(self.derive(purpose, *counters), np.uint32)

    def threefry(self, purpose: str, *counters: int) -> np.ndarray:
        """uint32 [2]: the words of the key that ``jax`` returns."""
        return self.words(purpose, *counters)[:2]

    def jax(self, purpose: str, *counters: int) -> jax.Array:
        """Returns a JAX threefry key (64 bits, the most JAX's default generator takes)."""
        import jax
        import jax.numpy as jnp

        words = jnp.asarray(self.threefry(purpose, *counters))
        return jax.random.wrap_key_data(words, impl="threefry2x32")


# ---- keys for losses that draw at random ---------------------------------------------------------
# For dropout, for instance. Each example has a key at each step, ``fold_in(step's key, place)``,
# with ``place`` the example's position in the store. The key does not depend on devices,
# processes, microbatches or the order of units, and noise and sampling never share it.


PyTree = Any
PURPOSE = "loss"


def key_argument(loss_fn: Callable[..., Any], *, needed_without: str | None = None) -> str | None:
    """The name under which a loss takes a key: ``rng`` or ``key``; None if it takes none.

    Only arguments after (params, example) count, without a default or with the default None.

    Raises:
      BadInputError: the key has no default, and ``needed_without`` names a use without keys.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())[2:]
    except (TypeError, ValueError):  # a callable without a signature
        return None
    for p in parameters:
        if p.name not in ("rng", "key") or p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            continue
        if p.default is p.empty and needed_without is not None:
            raise BadInputError(
                f"the loss needs its argument `{p.name}`, but {needed_without} is without "
                f"randomness: give it the default None, and leave dropout out there"
            )
        if p.default is p.empty or p.default is None:
            return p.name
    return None


def example_keys(root: RootKey, counters: tuple[int, ...], places: np.ndarray) -> np.ndarray:
    """Returns uint32 [..., 3], from which ``keyed`` derives the key of each example.

    Args:
      root: root key of the run.
      counters: address of the step; its key is ``root.jax("loss", *counters)``.
      places: int64 [...], positions in the store; any number for padding.
    """
    words = root.threefry(PURPOSE, *counters)
    out = np.empty((*places.shape, 3), np.uint32)
    out[..., :2] = words
    out[..., 2] = places.astype(np.uint32)  # modulo 2^32
    return out


def with_keys(examples: PyTree, keys: Any) -> PyTree:
    """Examples with their ``example_keys``, as a ``keyed`` loss takes them."""
    return {"example": examples, "key": keys}


def keyed(loss_fn: Callable[..., jax.Array], name: str) -> Callable[..., jax.Array]:
    """Returns the loss of examples ``with_keys``: it gets each example's key as ``name``."""
    import jax

    def loss(params: PyTree, example: PyTree, **kwargs: Any) -> jax.Array:
        step = jax.random.wrap_key_data(example["key"][:2], impl="threefry2x32")
        key = jax.random.fold_in(step, example["key"][2])
        return loss_fn(params, example["example"], **kwargs, **{name: key})

    return loss


def with_any_key(loss_fn: Callable[..., jax.Array], name: str | None) -> Callable[..., jax.Array]:
    """Returns a loss ``(params, example)`` for tracing only, with a constant for its key."""
    import jax

    return loss_fn if name is None else functools.partial(loss_fn, **{name: jax.random.key(0)})
