"""dpfl_jax.mechanisms."""
