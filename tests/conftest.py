"""Shared fixtures: forced CPU devices and the optional data directory."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are compiled once for all workers, for the commands that tests start, and for the next
# time (`pytest --cache-clear` forgets them).
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "compiled"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Compiling is most of the tests' work, and none of what most of them show depends on how hard LLVM
# tries. Commands that tests start compile quickly, too. (0: as users compile, for a release.)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# One worker a core: threads of their matrix products would wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import chex
import jax
import pytest

# Tests about devices need several; must be set before JAX starts. Everything else uses one.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    chex.set_n_cpu_devices(8)
# Eight devices on one busy core may wait long for one another: by default they give up, and die.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
# XLA starts as many threads as there are cores or devices. Where all of them wait in a sum over
# devices none is left for a matrix product that one of them waits for: 8 of 24 runs of
# test_sharded_parameters_and_units_change_nothing[model] never ended on two cores, none of 20 so.
os.environ.setdefault("NPROC", "16")

# What is rounded, and which units mix, is tested as it runs.
_COMPILED_AS_IT_RUNS = {
    *("test_float32_sums", "test_low_precision_bound", "test_isolation", "test_every_program"),
    *("test_exact", "test_gaussian", "test_convolutions", "test_sum_check"),
}


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request: pytest.FixtureRequest) -> None:
    quickly = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    quickly &= request.path.stem not in _COMPILED_AS_IT_RUNS
    jax.config.update("jax_disable_most_optimizations", quickly)


@pytest.fixture(autouse=True)
def _check_every_program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of an earlier run that are remembered as right are checked again."""
    if "kept" not in request.fixturenames:
        monkeypatch.setattr("dpfl_jax.mechanisms.plan.sum_check._PACKAGE", None)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drops ``slow("a", "b")`` from the cases whose id has neither; a mark with cases wins."""
    for item in items:
        marks = [mark for mark in item.own_markers if mark.name in ("slow", "nightly")]
        named = [mark for mark in marks if any(case in item.name for case in mark.args)]
        kept = named or [mark for mark in marks if not mark.args]
        item.own_markers = [m for m in item.own_markers if m not in marks or m in kept]


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of real data sets, or a skip that says what to set."""
    path = os.environ.get("DPFL_DATA_DIR")
    if not path:
        pytest.skip("needs real data: set DPFL_DATA_DIR to a folder holding it")
    return pathlib.Path(path)
