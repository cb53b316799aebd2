"""The central training engine: the jit-compiled private step, and the run around it."""

from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.run.state import TrainState
from dpfl_jax.training.central import FitResult, fit
from dpfl_jax.training.step import make_train_step

__all__ = ["FitResult", "TrainState", "data_parallel_mesh", "fit", "make_train_step"]
