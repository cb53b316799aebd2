"""dpfl_jax: training with differential privacy for people, at datacenter speed."""

__version__ = "0.1.0"
