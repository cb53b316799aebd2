"""dpfl_jax.noise."""
