"""The subjects of a federation: the users of a data set, with a part of it held out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dpfl_jax.data import DataConfig
from dpfl_jax.data.load import hold_out, load_examples, rule_of
from dpfl_jax.data.store import Store
from dpfl_jax.task import Task


@dataclasses.dataclass(frozen=True)
class SubjectData:
    """Subjects, split.

    Attributes:
      train: what is spread over silos; a user of the store is a subject.
      held_out: what is evaluated.
      description: one line.
      task: what is learned.
      rule: how ``held_out`` was chosen, in words.
    """

    train: Store
    held_out: Store
    description: str
    task: Task
    rule: str = ""


def load_subjects(config: DataConfig, keep: Sequence[str] = ()) -> SubjectData:
    """Reads and splits the data of a configuration.

    Args:
      config: the section.
      keep: further columns that a table's records carry, such as a budget.

    Raises:
      BadInputError: files or packages that are not there, or a part that is empty.
    """
    found = load_examples(config, keep)
    fractions = {"held_out": config.validation_fraction}
    parts = hold_out(found.store, config, fractions, config.split)
    train, held_out = parts["train"], parts["held_out"]
    description = (
        f"{config.source}: {train.num_users} subjects with {train.num_examples} records "
        f"(before the cap per silo) in training, {held_out.num_users} with "
        f"{held_out.num_examples} held out; a subject is {found.unit}{found.left_out}"
    )
    rule = rule_of(config, config.split, "validation", config.validation_fraction)
    return SubjectData(train, held_out, description, found.task, rule)
