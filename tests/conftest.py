"""Shared fixtures: forced CPU devices and the optional data directory."""

import os
import pathlib

# Tests about devices need several; must be set before JAX starts. Everything else uses one.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of real data sets, or a skip that says what to set."""
    path = os.environ.get("DPFL_DATA_DIR")
    if not path:
        pytest.skip("needs real data: set DPFL_DATA_DIR to a folder holding it")
    return pathlib.Path(path)
