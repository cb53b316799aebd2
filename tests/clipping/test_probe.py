"""The compile-time memory probe: what it picks fits, and computes the same."""

import jax
import numpy as np
import pytest
from zoo import ZOO, transformer_loss, transformer_params

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.clipping.preflight import probe
from dpfl_jax.errors import BadInputError


@pytest.mark.nightly
def test_less_memory_means_smaller_microbatches():
    params, (_, _, batch) = transformer_params(), ZOO["transformer"]()
    units = jax.tree.leaves(batch)[0].shape[0]
    f = clipped_grad(transformer_loss, clip_norm=1.0, strategy="ghost")
    free = probe(f, params, batch, memory_limit=1e12)
    assert free.tried == (("ghost", None, free.temp_bytes),)
    tight = probe(f, params, batch, memory_limit=free.temp_bytes - 1)
    assert tight.temp_bytes < free.temp_bytes
    assert tight.gradient.microbatch_size is not None
    assert tight.gradient.microbatch_size < units
    assert len(str(tight).splitlines()) == len(tight.tried) >= 2
    # Shapes are enough, and the original is not changed.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    assert probe(f, *shapes, memory_limit=1e12).temp_bytes == free.temp_bytes
    assert f.microbatch_size is None
    want, got = jax.jit(f)(params, batch), jax.jit(tight.gradient)(params, batch)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)


@pytest.mark.nightly
def test_too_little_memory_is_one_sentence():
    params, (_, _, batch) = transformer_params(), ZOO["transformer"]()
    f = clipped_grad(transformer_loss, clip_norm=1.0, memory_limit=1000)
    with pytest.raises(BadInputError, match="MiB are allowed"):
        probe(f, params, batch)
