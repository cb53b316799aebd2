"""Sends rows of metrics to TensorBoard, Weights & Biases or MLflow.

Others can read a tracker. So it gets what the guarantee covers, and the rest only on request,
under ``not_private/``.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from dpfl_jax.errors import extra

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
NOT_PRIVATE = "not_private/"


class Sink:
    """Sends rows of metrics to a tracker; fits ``Hooks(on_step=sink, on_evaluation=sink)``."""

    def __init__(
        self,
        send: Callable[[dict[str, float], int], Any],
        close: Callable[[], Any],
        not_private: bool = False,
    ) -> None:
        """``sink_of`` opens one by name.

        Args:
          send: takes numbers by name, and the step.
          close: closes the tracker.
          not_private: also send what the guarantee does not cover.
        """
        self._send, self.close, self._all = send, close, not_private

    def __call__(self, row: Mapping[str, Any]) -> None:
        outside = row.get("outside_guarantee", {}) | {
            f"held_out_{name}": value for name, value in row.get("eval", {}).items()
        }
        values = _numbers(row)
        if self._all:
            values |= {NOT_PRIVATE + name: value for name, value in _numbers(outside).items()}
        if values:
            self._send(values, row["step"])


def sink_of(name: str) -> Callable[[pathlib.Path, bool], Sink]:
    """Returns a function that opens a sink: ``(run directory, whether to send all) -> Sink``.

    Args:
      name: ``"tensorboard"`` (writes into the run directory), ``"wandb"`` or ``"mlflow"`` (which
        read their own environment variables).

    Raises:
      BadInputError: its package is not installed.
    """
    with extra(name, f"metrics.sinks={name}"):
        package = importlib.import_module(_PACKAGES[name])
    return lambda path, everything: Sink(*_OPEN[name](package, path, everything), everything)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step"
    }


# The time at which a row was written shows how long steps take, which is as private as the data:
# unless all is sent, the step's number replaces the time.


def _tensorboard(package: Any, path: pathlib.Path, everything: bool) -> tuple[Any, Any]:
    writer = package.SummaryWriter(str(path / "tensorboard"))

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step, walltime=None if everything else step)

    return send, writer.close


def _wandb(package: Any, path: pathlib.Path, everything: bool) -> tuple[Any, Any]:
    del everything
    # By default it would also send what is printed (losses) and the machine's load.
    settings = package.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    run = package.init(project="dpfl_jax", name=path.name, dir=str(path), settings=settings)
    return lambda values, step: run.log(values, step=step), run.finish


def _mlflow(package: Any, path: pathlib.Path, everything: bool) -> tuple[Any, Any]:
    run = package.start_run(run_name=path.name, log_system_metrics=False)

    def send(values: dict[str, float], step: int) -> None:
        time = None if everything else step
        package.log_metrics(values, step=step, run_id=run.info.run_id, timestamp=time)

    return send, package.end_run


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
