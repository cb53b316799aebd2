"""dpfl_jax.config."""
