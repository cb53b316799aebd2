"""dpfl_jax.bench."""
