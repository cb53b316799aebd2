"""dpfl_jax.clipping."""
