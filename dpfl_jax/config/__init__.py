"""Configuration of runs: one YAML file, typed and validated, whose keys can be overridden."""

from dpfl_jax.config.load import config_fingerprint, config_to_dict, load_config, validate_config
from dpfl_jax.config.schema import AuditConfig, RunConfig

__all__ = [
    "load_config",
    "validate_config",
    "config_to_dict",
    "config_fingerprint",
    "RunConfig",
    "AuditConfig",
]
