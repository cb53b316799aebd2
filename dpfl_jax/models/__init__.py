"""dpfl_jax.models."""
