"""Sections that the configurations of all systems have."""

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


class LedgerSection(Section):
    """The budget that a run is charged to.

    Attributes:
      ledger: file (.jsonl) that records what the people of a data set have spent over all runs;
        relative to the folder of the configuration file.
      account: name of the people in the ledger. Give one name to all versions of a data set that
        hold the same people.
      budget: largest epsilon (at the run's delta) the ledger may reach; beyond it a run is refused.
        It is fixed by the first run and holds for all, also if one is chosen by what others showed.
    """

    ledger: str | None = None
    account: str | None = Field(None, pattern=r"^[\w .,:@+-]+$")
    budget: float | None = None


class TargetSection(LedgerSection):
    """A section ``privacy``: a target or the noise, and the ledger; see ``LedgerSection``, too.

    Attributes:
      noise_multiplier: sigma, instead of a target; the noise on the sum has stddev sigma times the
        largest contribution.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = Field(None, ge=0, le=1e6)


def check_target(privacy: TargetSection, private: bool) -> None:
    """Raises ValueError unless a private mechanism has either a target or noise."""
    if not private:
        return
    if privacy.epsilon is None and privacy.noise_multiplier is None:
        raise ValueError(
            "neither privacy.epsilon nor privacy.noise_multiplier is set: give the target "
            "epsilon, or the noise"
        )
    if privacy.epsilon is not None and privacy.noise_multiplier is not None:
        raise ValueError(
            "both privacy.epsilon and privacy.noise_multiplier are set: keep one, the other "
            "follows from it"
        )


class EvaluatedTrain(Section):
    """A section ``train``: what held-out loss decides on the way.

    Nobody who is held out is covered by the guarantee.

    Attributes:
      eval_every: steps (rounds, blocks) between evaluations on held-out data; 0 for before and
        after only.
      keep_best: keep the checkpoint with the lowest held-out loss, too.
      patience: stop once so many evaluations in a row found no lower held-out loss. Epsilon stays
        that of all steps. null: never.
    """

    eval_every: int = Field(0, ge=0)
    keep_best: bool = False
    patience: int | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check_evaluated(self) -> EvaluatedTrain:
        if self.chooses and not self.eval_every:
            raise ValueError("keep_best and patience look at evaluations: set train.eval_every")
        return self

    @property
    def chooses(self) -> bool:
        """Whether held-out loss decides anything."""
        return self.keep_best or self.patience is not None


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
        found = []
        if self.sinks and self.not_private:
            found.append(
                f"{', '.join(self.sinks)} were sent, under `not_private/`, losses and timings that "
                "are computed without noise: do not publish them"
            )
        if live := [name for name in self.sinks if name != "tensorboard"]:
            found.append(f"{', '.join(live)} can tell how long steps took by when rows arrived")
        return tuple(found)


class RunSection(Section):
    """The top level of a configuration.

    Attributes:
      name: names the run directory.
      seed: None draws the root key from the operating system and keeps it secret (the default for
        private runs); an integer makes the run reproducible and its noise known to all who read
        the config, which the report then says.
    """

    name: str = Field("run", pattern=NAME)
    seed: int | None = None
    privacy: Any
    processes: ProcessesConfig = ProcessesConfig()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _check_ledger(self) -> RunSection:
        privacy: LedgerSection = self.privacy
        if privacy.budget is not None and privacy.ledger is None:
            raise ValueError("privacy.budget needs privacy.ledger, the file it is charged to")
        if privacy.ledger is not None and not privacy.ledger.endswith(".jsonl"):
            # It is appended to: by no name that another program reads by itself.
            raise ValueError(
                f"privacy.ledger is {privacy.ledger!r}, but a ledger is a file NAME.jsonl"
            )
        if privacy.ledger is not None and privacy.account is None:
            raise ValueError(
                "privacy.ledger needs privacy.account: one name for these people, the same in "
                "every run on them, however their data are cut"
            )
        if privacy.ledger is not None and self.seed is not None:
            raise ValueError(
                "privacy.ledger adds up independent runs, but seed makes sampling and noise known "
                "and the same in every run with it: leave seed unset"
            )
        return self
