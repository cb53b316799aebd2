"""The base class of sections, and the sections that do not change what a run computes.

No field of these enters the fingerprint of a configuration, so a run may resume with other values
(except that ``individual`` needs the same ``execution``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A section: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# A name becomes a folder, whose path is printed in commands that people paste.
NAME = r"^\w[\w .,:@+-]*$"
# Finite, with room for sums in float32.
Positive = Annotated[float, Field(gt=0, le=1e30)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


def check(holds: Any, sentence: str) -> None:
    """Raises ValueError, which pydantic reports, unless ``holds`` is true."""
    if not holds:
        raise ValueError(sentence)


def exclude(**given: Any) -> None:
    """Raises ValueError if more than one of these keys (``section__key``) is set."""
    keys = [name.replace("__", ".") for name, value in given.items() if value is not None]
    check(len(keys) < 2, f"both {' and '.join(keys[:2])} are set: keep one")


class ProcessesConfig(Section):
    """One run in many processes, which do not change what it computes.

    The variables DPFL_COORDINATOR, DPFL_NUM_PROCESSES and DPFL_PROCESS_ID, or the cluster, say
    where the others are. A configuration names no address: its author could then read what the
    processes send each other.

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
        """Configurations of earlier runs list these keys, as null."""
        if not isinstance(raw, dict):
            return raw
        for key in ("coordinator", "num_processes", "process_id"):
            if raw.get(key) is not None:
                raise ValueError(
                    f"processes.{key} is not a setting: set the variable DPFL_{key.upper()} where "
                    "the command is started"
                )
            raw = {name: value for name, value in raw.items() if name != key}
        return raw


class MetricsSection(Section):
    """Where metrics go besides metrics.jsonl; they do not change what a run computes.

    Attributes:
      sinks: tensorboard (a folder of the run), wandb, mlflow; each needs the extra of its name.
      not_private: also send what the guarantee does not cover (training and held-out losses,
        timings), under ``not_private/``.
    """

    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    not_private: bool = False

    def caveats(self) -> tuple[str, ...]:
        """Caveats of a guarantee that follow from these settings."""
        result = []
        if self.sinks and self.not_private:
            result.append(
                f"{', '.join(self.sinks)} were sent, under `not_private/`, losses and timings that "
                "are computed without noise: do not publish them"
            )
        if live := [name for name in self.sinks if name != "tensorboard"]:
            result.append(f"{', '.join(live)} can tell how long steps took by when rows arrived")
        return tuple(result)


Strategy = Literal["auto", "vmap", "scan", "ghost"]
AttentionForm = Literal["auto", "plain", "blockwise", "fused"]


class MeshConfig(Section):
    """How devices are arranged.

    Attributes:
      data: number of copies of the parameters, each with its share of the units; default as many
        as fit.
      fsdp: number of parts of parameters, optimiser state, sums and noise; units are split over
        them, too.
      tensor: number of parts of each layer's matrix products.
      sequence: number of parts of each example's positions, if not even one example fits on a
        device (language models).
    """

    data: int | None = Field(None, gt=0)
    fsdp: int = Field(1, gt=0)
    tensor: int = Field(1, gt=0)
    sequence: int = Field(1, gt=0)

    @property
    def axes(self) -> dict[str, Any]:
        """Arguments of ``mesh.make_mesh``."""
        return self.model_dump()


class Execution(Section):
    """How a run computes its steps: it changes speed and memory, never the guarantee.

    Attributes:
      profile: trace so many iterations of the loop (steps, rounds, blocks), after the first one,
        into ``profile/`` of the run directory, for xprof or Perfetto. The trace shows how long each
        took, and is outside the guarantee.
      microbatch_size: units per device processed at once (default 16), or in a silo (default 32);
        a unit there with more records (a person, a batch) is processed so many records at a time.
      strategy: how clipped gradients are computed.
      group_buckets: process users with few examples in buffers with a smaller group axis (1, 2, 4,
        ...), instead of padding them to the group size: less work, a longer compilation.
      packing: put short sequences of a unit one after the other into rows of at most so many
        shapes, without attention between them, instead of padding each to ``data.seq_len``; 0 does
        not. Few places are then padding (8 shapes: one in four, 16: one in six), and compilation
        takes as many times as long. The shapes follow from the lengths of the sequences, which step
        times and memory then reveal.
      examples_at_once: examples of a user (ULS) that a device processes at once; gradients are
        accumulated before the user's norm is taken. Needed if a user's examples do not fit
        together. Default: all.
      split_users: split each user's examples (ULS) over the fsdp devices, each of which then
        forms a part of the gradient, instead of one user on a device. Needed if no device holds a
        whole gradient.
      sum_over_fsdp: when gradients are summed over the fsdp devices. ``microbatch`` sends all
        gradients for every microbatch, and each device holds a part of their sum. ``step`` sends
        them once a step, and each device holds all of its sum (8 bytes a trained parameter).
        ``auto`` takes ``step`` if that is at most a quarter of a device's memory. With
        ``split_users`` it is always ``microbatch``.
      attention: how a transformer computes attention. ``plain`` holds the scores of all pairs of
        positions, ``blockwise`` those of two blocks, so that memory grows linearly with the length;
        ``auto`` is plain up to 1,024 positions. ``fused`` is a kernel: cuDNN's on NVIDIA GPUs (a
        model in bfloat16, JAX 0.12 or newer), and JAX's splash attention on TPUs (each device with
        all parameters; what is not differentiated by unit, such as evaluation, is ``auto`` there).
      mesh: how devices are arranged.
      width: silos that a device processes in one vmap (1 is fastest on a CPU).
      chunk_silos: silos whose data are on the devices at once; default by size.
      rounds_per_block: rounds from one row of metrics to the next, if silos trust no server.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> dpfl.Execution(microbatch_size=32).strategy
      'auto'
    """

    profile: int = Field(0, ge=0)
    microbatch_size: int = Field(16, gt=0)
    strategy: Strategy = "auto"
    attention: AttentionForm = "auto"
    group_buckets: bool = False
    packing: int = Field(0, ge=0)
    examples_at_once: int | None = Field(None, gt=0)
    split_users: bool = False
    sum_over_fsdp: Literal["auto", "microbatch", "step"] = "auto"
    mesh: MeshConfig = MeshConfig()
    width: int = Field(1, gt=0)
    chunk_silos: int | None = Field(None, gt=0)
    rounds_per_block: int = Field(5, gt=0)

    @property
    def unpacked(self) -> Execution:
        """The same settings without packing, which plans and bills price."""
        return self.model_copy(update={"packing": 0})

    @property
    def cut(self) -> dict[str, Any]:
        """How the examples of a user are split."""
        return {"examples_at_once": self.examples_at_once, "split_users": self.split_users}
