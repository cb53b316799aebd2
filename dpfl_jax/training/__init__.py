"""dpfl_jax.training."""
