"""What sections are made of, and those that are no part of what a run computes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A section: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# It names a folder, whose path is printed in commands that people paste.
NAME = r"^\w[\w .,:@+-]*$"
# What float32 holds with room for sums; infinity is none of them.
Positive = Annotated[float, Field(gt=0, le=1e30)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


def check(holds: Any, sentence: str) -> None:
    """Raises ValueError, in a validator, unless something holds."""
    if not holds:
        raise ValueError(sentence)


def exclude(**given: Any) -> None:
    """Raises ValueError if more than one of these keys (``section__key``) is set."""
    keys = [name.replace("__", ".") for name, value in given.items() if value is not None]
    check(len(keys) < 2, f"both {' and '.join(keys[:2])} are set: keep one")


NO_CHOICE_WITHIN_USERS = (
    "train.keep_best and train.patience would choose by examples of the people who are trained on, "
    "which their guarantee does not cover: hold out other people (data.split=by_user)"
)


class ProcessesConfig(Section):
    """One run in many processes; where and how many is no part of what a run computes.

    Where the others are is told by the variables DPFL_COORDINATOR, DPFL_NUM_PROCESSES and
    DPFL_PROCESS_ID, or by the cluster. A configuration names no address: whoever wrote it would
    hear what the processes tell each other.

    Attributes:
      mode: auto joins others if the variables or the cluster announce them (SLURM, Open MPI, TPU
        workers); detect always asks the cluster (TPU slices); one never does.
      start_timeout_s: how long to wait for the others at the start.
      lost_after_s: silence after which a process counts as lost.
    """

    mode: Literal["auto", "detect", "one"] = "auto"
    start_timeout_s: int = Field(300, gt=0)
    lost_after_s: int = Field(100, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _without_address(cls, raw: Any) -> Any:
        """Runs of before list these keys, as null."""
        if not isinstance(raw, dict):
            return raw
        for key in ("coordinator", "num_processes", "process_id"):
            if raw.get(key) is not None:
                raise ValueError(
                    f"processes.{key} is no setting: set the variable DPFL_{key.upper()} where "
                    "the command is started"
                )
            raw = {name: value for name, value in raw.items() if name != key}
        return raw


class MetricsSection(Section):
    """Where metrics go beside metrics.jsonl; no part of what a run computes.

    Attributes:
      sinks: tensorboard (a folder of the run), wandb, mlflow; each needs the extra of its name.
      not_private: also send what the guarantee does not cover (training and held-out losses,
        timings), under ``not_private/``.
    """

    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    not_private: bool = False

    def caveats(self) -> tuple[str, ...]:
        """What these settings mean for a guarantee."""
        result = []
        if self.sinks and self.not_private:
            result.append(
                f"{', '.join(self.sinks)} were sent, under `not_private/`, losses and timings that "
                "are computed without noise: do not publish them"
            )
        if live := [name for name in self.sinks if name != "tensorboard"]:
            result.append(f"{', '.join(live)} can tell how long steps took by when rows arrived")
        return tuple(result)
