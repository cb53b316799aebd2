"""What a model's texts begin with, and how they become rows."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.accounting import digests
from dpfl_jax.data import prompt_ids
from dpfl_jax.data.chats import Conversations, conversations_in
from dpfl_jax.data.load import template_of
from dpfl_jax.data.rows import FORMATS, BadRows, expand_paths, guess_format, read_file_rows, text_of
from dpfl_jax.data.sections import CONVERSATION
from dpfl_jax.data.table import user_key
from dpfl_jax.data.templates import RowTemplate
from dpfl_jax.errors import BadInputError
from dpfl_jax.models.generate import Sampled
from dpfl_jax.training.export import TrainedModel
from dpfl_jax.training.start import data_section


@dataclasses.dataclass(frozen=True)
class Writer:
    """The prompts of rows, which texts can be rows, and the rows that they are read as.

    Attributes:
      tokenizer: of the model.
      template: of the rows; None for other texts.
      column: the column of a plain text, or of an answer.
      given: the column of prompts, each prompt and its ids; only for a model of answers.
      digest: of the prompts' file.
    """

    tokenizer: Any
    template: RowTemplate | None
    column: str
    given: tuple[str, Sequence[tuple[Any, list[int]]]] | None = None
    digest: str | None = None

    def prompts(self, rows: int, counts: Mapping[str, int], seed: int) -> list[list[int]]:
        """The ids that each text begins with; labels are in a random order."""
        if self.given is not None:
            return [self._given(number)[1] for number in range(rows)]
        if not counts:
            return [self._begun(None)] * rows
        begun = {label: self._begun(label) for label in counts}
        labels = np.repeat(list(counts), list(counts.values()))
        return [begun[label] for label in np.random.default_rng([seed, 1]).permutation(labels)]

    def _given(self, number: int) -> tuple[Any, list[int]]:
        assert self.given is not None
        return self.given[1][number % len(self.given[1])]

    def _begun(self, label: str | None) -> list[int]:
        # A blank may be part of the token after it: the model writes it, and it is validated.
        words = "" if self.template is None else self.template.prompt(label).rstrip()
        if not words and self.tokenizer.bos_id is None and self.tokenizer.eos_id is not None:
            return [self.tokenizer.eos_id]
        return prompt_ids(self.tokenizer, words)

    def validate(self, prompt: Sequence[int], text: Sampled, over: bool) -> int | None:
        """How many tokens are kept of a text that cannot be read back; None if it can so far."""
        if self.given is not None:
            return None
        words, template = self.tokenizer.decode([*prompt, *text.tokens]), self.template
        if template is None:
            return 0 if over and not words.strip() else None
        if not over:
            words = words.rstrip("\ufffd")  # the first bytes of a character
        is_whole = over and (text.ended or template.ends_in_text)
        fault = template.fault(words, is_whole)
        if fault is None:
            return 0 if over and not is_whole else None
        # The token that ended the text is drawn again, too.
        for keep in range(len(text.tokens) - (not text.ended), -1, -1):
            begun = self.tokenizer.decode([*prompt, *text.tokens[:keep]])
            if len(begun) <= fault and words.startswith(begun):
                return keep
        return 0

    def _answered(self, number: int, answer: str) -> list[dict[str, Any]]:
        assert self.given is not None
        column, shown = self.given[0], self._given(number)[0]
        if column == self.column:
            return [{column: [*shown, {"role": "assistant", "content": answer}]}]
        return [{column: shown, self.column: answer}]

    def may_hold(self, number: int, rows: list[dict[str, Any]]) -> bool:
        """Whether a text of this number can be read as these rows; none are of one given up."""
        if self.template is not None:
            more = {"person": number} if self.template.rows > 1 else {}
            texts = [self.template.write([row], "") for row in rows]
            read = [{**more, **self.template.read(text)[0]} for text in texts]
            return rows == read and len(rows) <= self.template.rows
        if not rows:
            return True
        words = rows[0][self.column]
        words = words[-1]["content"] if isinstance(words, list) else words
        own = [{self.column: words}] if self.given is None else self._answered(number, words)
        return isinstance(words, str) and rows == own

    def read(self, prompt: Sequence[int], text: Sampled) -> list[dict[str, Any]]:
        """The rows of a text; none of one that was given up."""
        if not text.valid:
            return []
        if self.given is not None:
            return self._answered(text.number, self.tokenizer.decode(text.tokens))
        words = self.tokenizer.decode([*prompt, *text.tokens])
        if self.template is None:
            return [{self.column: words}]
        rows = self.template.read(words)
        return [{"person": text.number, **row} for row in rows] if self.template.rows > 1 else rows


def real_rows(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields whose it is, and what it holds, of each row of a run's files, as synthetic ones are.

    Raises:
      BadInputError: the run is not on files of texts.
    """
    section = data_section(config)
    if section.source not in FORMATS or section.source == "folder" or section.conversations:
        raise BadInputError(
            "rows are compared with those of files of texts (data.source jsonl, csv, parquet), and "
            f"this run has data.source={section.source}: leave it out"
        )
    template = template_of(section)
    whose = user_key(section.user_column)
    paths = expand_paths(section.path)
    bad = BadRows(section.on_bad_row == "drop")
    for where, row in read_file_rows(paths, section.source, csv=section.csv, bad=bad):
        try:
            user = whose(row, where)
            if template is None:
                values = {section.text_column: text_of(row, section.text_column, where)}
            else:
                (values,) = template.read(template.write([row], where, section.decimal))
        except BadInputError:
            if section.on_bad_row == "drop":
                continue
            raise
        yield user, values


def writer_of(trained: TrainedModel, prompts: str | os.PathLike[str] | None) -> Writer:
    """Makes the writer of a model's rows.

    Args:
      trained: the model.
      prompts: file of public prompts, for a model of answers.

    Raises:
      BadInputError: prompts are given to a model of texts, or not to one of answers.
    """
    section, tokenizer = data_section(trained.config), trained.tokenizer
    columns = {name: getattr(section, f"{name}_column") for name in CONVERSATION}
    talks = conversations_in(columns, section.tokenizer, section.chat_template)
    if talks is None:
        if prompts is not None:
            raise BadInputError(
                "--prompts is for models of answers (data.messages_column, data.prompt_column), "
                "and this one writes whole texts: leave it out"
            )
        return Writer(tokenizer, template_of(section), section.text_column)
    if prompts is None:
        raise BadInputError(
            "this model learned answers alone, and not what comes before them: give a file of "
            f"public prompts with the column {talks.prompt or talks.messages!r} (--prompts FILE)"
        )
    return _of_answers(tokenizer, talks, section, prompts)


def _of_answers(
    tokenizer: Any, talks: Conversations, section: Any, prompts: str | os.PathLike[str]
) -> Writer:
    paths = expand_paths(os.fspath(prompts))
    if {path.resolve() for path in paths} & {path.resolve() for path in expand_paths(section.path)}:
        raise BadInputError(
            f"--prompts is {prompts}, which the model was trained on: prompts must be public, as "
            "they are written beside the answers"
        )
    given = []
    for where, row in read_file_rows(paths, guess_format(pathlib.Path(prompts)), csv=section.csv):
        text, begins, shown = talks.prompt_of(row, where)
        given.append((shown, prompt_ids(tokenizer, text) if begins else tokenizer.encode(text)))
    column = talks.prompt or talks.messages
    assert column is not None
    answer = talks.messages or talks.completion or talks.chosen
    assert answer is not None
    whole = isinstance(given[0][0], list)
    answer = column if whole else answer
    each = ",".join(digests.digest(path) for path in paths)
    return Writer(tokenizer, None, answer, (column, given), each)
