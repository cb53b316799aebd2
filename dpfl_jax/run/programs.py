"""Where what is made once for many runs is kept: compiled programs, pre-trained parameters."""

from __future__ import annotations

import os
import pathlib

import jax


def default_cache_dir() -> pathlib.Path:
    """``$DPFL_CACHE_DIR``, or dpfl_jax in the user's cache folder."""
    if "DPFL_CACHE_DIR" in os.environ:
        return pathlib.Path(os.environ["DPFL_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "dpfl_jax"


def keep_programs() -> None:
    """Keeps compiled programs in the cache folder, unless JAX was told where, from now on.

    Not in the run's own folder, which somebody may have sent: programs are read from there and run.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
