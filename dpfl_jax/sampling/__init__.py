"""dpfl_jax.sampling."""
