"""A run that goes on after a kill compiles nothing again, and says what it does meanwhile."""

import jax
import pytest

from dpfl_jax.cli import train
from dpfl_jax.run import pipeline, processes


@pytest.fixture
def unset(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("DPFL_CACHE_DIR", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_are_kept_in_the_cache_folder_unless_jax_was_told_where(unset):
    pipeline.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(unset / "compiled")
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    pipeline.keep_programs()
    assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_dpfl_train_keeps_its_programs(unset, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "start", lambda config: None)
    monkeypatch.setattr(processes, "synchronized_shutdown", stop)
    with pytest.raises(KeyboardInterrupt):
        train._train(type("Config", (), {"processes": None}), unset / "run", None)
    assert jax.config.jax_compilation_cache_dir == str(unset / "compiled")
