"""dpfl_jax.data."""
