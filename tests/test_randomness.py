"""One root key, many addresses."""

import jax
import numpy as np
import pytest

from dpfl_jax.randomness import RootKey


def test_addresses_never_share_bits():
    key = RootKey.from_seed(0)
    addresses = [("noise", t) for t in range(200)] + [("sampling", t) for t in range(200)]
    addresses += [("noise", 1, 2), ("noise", 1200), ("noise",)]
    assert len({key.derive(*a) for a in addresses}) == len(addresses)


def test_the_same_address_gives_the_same_draw():
    a, b = RootKey.from_seed(5), RootKey.from_seed(5)
    assert a.numpy("x", 3).random() == b.numpy("x", 3).random()
    assert (jax.random.key_data(a.jax("x", 3)) == jax.random.key_data(b.jax("x", 3))).all()
    assert a.numpy("x", 3).random() != a.numpy("x", 4).random()


def test_fresh_keys_are_secret_and_different():
    a, b = RootKey.generate(), RootKey.generate()
    assert a.secret != b.secret
    assert not a.public
    assert RootKey.from_seed(1).public
    assert a.secret.hex() not in repr(a)
    assert a.child("silo", 0).secret != a.child("silo", 1).secret != a.secret


def test_jax_keys_use_all_64_bits():
    words = np.stack([jax.random.key_data(RootKey.from_seed(s).jax("n")) for s in range(64)])
    assert (words > 2**31).any(axis=0).all()


def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        RootKey(b"short")
