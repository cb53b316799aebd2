"""dpfl_jax.accounting."""
