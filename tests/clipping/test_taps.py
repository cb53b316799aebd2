"""The tap engine equals per-unit gradients, for every kind of model and every way to a norm."""

import jax
import numpy as np
import pytest
from zoo import ZOO

from dpfl_jax.clipping import Standard, bounded_grad


def relative_error(got, want):
    """Largest error of the sum over all leaves, relative to the sum's norm."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    size = np.sqrt(sum(float((np.asarray(w, np.float64) ** 2).sum()) for _, w in pairs))
    off = np.sqrt(
        sum(float(((np.asarray(g, np.float64) - np.asarray(w)) ** 2).sum()) for g, w in pairs)
    )
    return off / max(size, 1e-30)


def compare(loss, params, batch, methods, mask=None):
    """Compares the ghost strategy with vmap at a clip norm that clips about half of the units."""
    n = jax.tree.leaves(batch)[0].shape[0]
    mask = np.ones(n, bool) if mask is None else mask

    def run(**options):
        f = bounded_grad(loss, clip_norm=1.0, **options)
        return jax.jit(lambda p, b, m, c: f(p, b, m, rule=Standard(c)))

    reference = run(strategy="vmap")
    norms = np.asarray(reference(params, batch, mask, 1.0).norms)
    clip_norm = float(np.median(norms[mask]))
    want = reference(params, batch, mask, clip_norm)
    for method in methods:
        got = run(strategy="ghost", norm_method=method)(params, batch, mask, clip_norm)
        np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5, err_msg=str(method))
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
        np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5)
        assert relative_error(got.sum, want.sum) < 1e-5, method


@pytest.mark.privacy
@pytest.mark.parametrize("name", list(ZOO))
def test_equals_vmap(name):
    loss, params, batch = ZOO[name]()
    n = jax.tree.leaves(batch)[0].shape[0]
    # Every way to a norm for every model but the large ones, which share their rules.
    every = not name.startswith("transformer_")
    methods = ["gram", "direct", "keep"] if every else ["gram"]
    compare(loss, params, batch, methods, mask=np.arange(n) != 1)
