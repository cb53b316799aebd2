"""Shared fixtures: forced CPU devices and the optional data directory."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are compiled once for all workers, for the commands that tests start, and for the next
# time (`pytest --cache-clear` forgets them).
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "compiled"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compiled)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import chex
import jax
import pytest

# Tests about devices need several; must be set before JAX starts. Everything else uses one.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    chex.set_n_cpu_devices(8)
# Eight devices on one busy core may wait long for one another: by default they give up, and die.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"

# Compiling is most of the tests' work. What these folders show, book-keeping and mathematics, does
# not depend on how hard the compiler tries; rounding, and whole runs, are tested as they run.
_QUICKLY_COMPILED = {"clipping", "models", "isrl"}
_ABOUT_ROUNDING = {"test_float32_sums", "test_low_precision_bound", "test_isolation"}


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request: pytest.FixtureRequest) -> None:
    quickly = request.path.parent.name in _QUICKLY_COMPILED
    quickly &= request.path.stem not in _ABOUT_ROUNDING
    jax.config.update("jax_disable_most_optimizations", quickly)


# Tests that are slow for what they compile, not for what they are; those that protect privacy are
# left to CI, and to a release where CI runs others of their kind.
_LISTED = {"slow.txt": ("slow", "ci"), "release.txt": ("release",)}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of slow.txt ``slow`` and ``ci``, those of release.txt ``release``."""
    everything = config.args == [str(config.rootpath / "tests")] or config.args == ["tests"]
    for file, marks in _LISTED.items():
        lines = pathlib.Path(__file__).with_name(file).read_text().splitlines()
        listed = {line for line in lines if line and line[0] != "#"}
        for item in items:
            if item.nodeid in listed:
                for mark in marks:
                    item.add_marker(mark)
        if everything and (gone := listed - {item.nodeid for item in items}):
            raise pytest.UsageError(f"tests/{file} names tests that are not there: {sorted(gone)}")


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of real data sets, or a skip that says what to set."""
    path = os.environ.get("DPFL_DATA_DIR")
    if not path:
        pytest.skip("needs real data: set DPFL_DATA_DIR to a folder holding it")
    return pathlib.Path(path)
