"""A run that goes on after a kill compiles nothing again, and says what it does meanwhile."""

import jax
import pytest

from dpfl_jax.cli import train
from dpfl_jax.run import pipeline, processes


@pytest.fixture
def unset(monkeypatch, tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("DPFL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_cache_folder_unless_jax_was_told_where(unset):
    pipeline.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(unset / "compiled")
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    pipeline.keep_programs()
    assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_small_programs_are_kept_too_unless_jax_was_told_otherwise(unset, monkeypatch):
    """A run has some eighty of them, each of which takes .1 s."""
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    pipeline.keep_programs()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3.0)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "3")
    pipeline.keep_programs()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 3


def test_dpfl_train_keeps_its_programs(unset, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "start", lambda config: None)
    monkeypatch.setattr(processes, "synchronized_shutdown", stop)
    with pytest.raises(KeyboardInterrupt):
        train._train(type("Config", (), {"processes": None}), unset / "run", None)
    assert jax.config.jax_compilation_cache_dir == str(unset / "compiled")
