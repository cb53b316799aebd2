"""dpfl_jax.cli."""
