"""The data section of a configuration: which examples, who owns them, how some are held out."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from dpfl_jax.data.rows import CsvFormat
from dpfl_jax.errors import BadInputError


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("yes, no, on and off are true and false in YAML: put them in quotes")
    return value


_Count = Annotated[int, Field(gt=0)]
_Number = Annotated[int | float, Field(allow_inf_nan=False), BeforeValidator(_no_bool)]
_Word = Annotated[str | int, BeforeValidator(_no_bool)]
# NAME_column of a section is NAME of ``chats.Conversations``.
CONVERSATION = ("messages", "prompt", "completion", "chosen", "rejected")


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Which examples a run uses, and who owns them.

    A *user* owns examples. In a federation a user is a subject, whose examples may lie in several
    silos.

    Attributes:
      source: ``python_source`` (needs no files); files: ``jsonl``, ``csv``, ``tsv``, ``parquet``,
        ``arrow``, ``huggingface``, ``folder``; ``store`` (made by ``dpfl data build``); the name of
        a data set (``dpfl_jax.data.sets``); or ``package.module:NAME``, your own ``DataSource``.
      path: file, files or glob pattern; the folder of a store or of a named set; or
        ``hf:org/name``, a data set in the local Hugging Face cache.
      user_column: column of the user's id, or of a list of owners, or a key expression; null: every
        row is a user.
      text_column: column of the text, if files hold text.
      messages_column: column of a conversation: a list of messages with role and content, or JSON
        of one. The assistant's messages are learned.
      prompt_column: column of a prompt, text or messages, that is followed by
      completion_column: the answer that is learned; or by
      chosen_column, rejected_column: two answers, of which the first was preferred (``model.dpo``);
        without a prompt_column both are whole conversations.
      chat_template: file of a Jinja template for messages; default the tokeniser's.
      template: how columns make a text, such as "<label> | <title> | <text>", instead of a
        text_column: their words are ``categories``, their numbers ``ranges``, others are any text.
        A language model of such texts writes rows (``dpfl synthesize``).
      ranges: by column of a template, its least and largest number, known without these data; how
        they are written is how many decimals each number gets ([18, 65], [15.0, 55.0]).
      rows_per_text: rows of a user in a text of a template, one in a line, in their order.
      target_column: column of a table that is predicted from others; in a store of arrays the field
        (default ``label``).
      input_columns: columns that it is predicted from, names or shell patterns; default all others.
        In a store of arrays one field (default the only one that is not a plain number).
      categories: by column, its words, known without these data (the target's are its classes).
      missing: inputs, names or shell patterns, whose cells may be empty: an empty cell counts as
        the middle of its ``scale``, or as none of its ``categories``.
      dates: by column, how dates that are text are written, such as "%d.%m.%Y"; all become years
        since 2000.
      classes: number of classes of the target, a public number: labels are 0, 1, ... Without it, or
        with 0, the target is a number (regression).
      silo_column: which silo holds a row. The silos' names are taken as public.
      delimiter, encoding: format of CSV files (``CsvFormat``).
      decimal: the decimal separator of numbers in tables that are text.
      on_bad_row: what to do with a row of a file without a user or text, or with a bad number:
        error, or drop and count it. Each row is judged by itself.
      scale: by column (the target too): middle and half width, known without these data; a value v
        becomes (v - middle) / half width.
      features: scattering replaces images by normalised scattering coefficients
        (``data.scattering``); each depends only on its image, so the guarantee is the same.
      seq_len: tokens in an example (a store keeps its own), or characters in a window.
      stride: characters from one window to the next (``characters``).
      tokenizer: ``"bytes"``, a tokenizers ``.json`` or a SentencePiece ``.model`` file; in a
        central run also ``"checkpoint"``, that of model.checkpoint.
      records_per_user: if every record is a user, make synthetic users of so many records, drawn at
        random.
      max_users: keep that many users (a choice fixed by their ids).
      max_examples_per_user: keep each user's first examples.
      public_fraction: share of all records that is declared public: they set the scale of features
        and target, and are neither trained on nor evaluated. Only for silos that trust no server,
        if ``scale`` is not declared; default 0.1 there.
      split_seed: seed of what is held out, and of synthetic users; public.

    Examples:
      >>> from dpfl_jax.data import SourceConfig
      >>> SourceConfig(source="shakespeare", seq_len=64).seq_len
      64
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    source: str = "python_source"
    path: str | tuple[str, ...] | None = None
    user_column: str | None = "user"
    text_column: str = "text"
    messages_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    chosen_column: str | None = None
    rejected_column: str | None = None
    chat_template: str | None = None
    template: str | None = None
    ranges: dict[str, tuple[_Number, _Number]] = dataclasses.field(default_factory=dict, hash=False)
    rows_per_text: _Count = 1
    target_column: str | None = None
    input_columns: tuple[str, ...] | None = None
    categories: dict[str, tuple[_Word, ...]] = dataclasses.field(default_factory=dict, hash=False)
    missing: tuple[str, ...] = ()
    dates: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    classes: Literal[0] | Annotated[int, Field(ge=2)] | None = None
    silo_column: str | None = None
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    encoding: str | None = None
    decimal: Literal["point", "comma"] = "point"
    on_bad_row: Literal["error", "drop"] = "error"
    scale: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict, hash=False)
    features: Literal["scattering"] | None = None
    seq_len: _Count = 128
    stride: _Count = 1
    tokenizer: str = "bytes"
    records_per_user: _Count | None = None
    max_users: _Count | None = None
    max_examples_per_user: _Count | None = None
    public_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    split_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    def __post_init__(self) -> None:
        for column, (middle, width) in self.scale.items():
            if not (math.isfinite(middle) and 0 < width < math.inf):
                raise BadInputError(
                    f"data.scale of {column!r} is ({middle}, {width}), but it must be a number and "
                    "a half width above 0"
                )

    @property
    def conversations(self) -> tuple[str, ...]:
        """The names of the settings of conversations that are set."""
        names = [f"{kind}_column" for kind in CONVERSATION]
        return tuple(n for n in (*names, "chat_template") if getattr(self, n) is not None)

    def caveats(self) -> tuple[str, ...]:
        """Caveats of a guarantee that follow from these settings."""
        caveats = list[str]()
        table = self.target_column is not None
        if self.max_users is not None:
            caveats.append(
                "data.max_users keeps a fixed number of users, so that adding a person to the raw "
                "data can displace another: the guarantee is for one of the users kept"
            )
        if self.records_per_user is not None:
            caveats.append(
                f"users are synthetic, {self.records_per_user} records each drawn at random: the "
                "guarantee is for such a group, not for a real person, who would deal all anew"
            )
        if (table or self.template) and self.user_column is None:
            caveats.append(
                "every row counts as a person of its own (data.user_column is null): somebody with "
                "several rows is protected less"
            )
        if table and self.silo_column is not None:
            caveats.append("which silos there are, by data.silo_column, is taken as public")
        if self.on_bad_row == "drop":
            caveats.append(
                "how many rows were left out (data.on_bad_row=drop) is counted without noise: the "
                "guarantee does not cover that number"
            )
        if self.conversations:
            caveats.append(
                "the chat template is taken as known without these data; how many conversations "
                "were too long is counted without noise: the guarantee does not cover that number"
            )
        declared = ("template", "scale", "categories", "ranges", "missing", "dates")
        if named := [f"data.{name}" for name in declared if getattr(self, name)]:
            are = "is" if len(named) == 1 else "are"
            caveats.append(f"{', '.join(named)} {are} taken as known without these data")
        return tuple(caveats)

    @property
    def csv(self) -> CsvFormat:
        """Delimiter, encoding and decimal mark of CSV files."""
        return CsvFormat(self.delimiter, self.encoding)


@dataclasses.dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The data of a run.

    Attributes:
      validation_fraction: expected share of users held out for tuning (of subjects, if silos train;
        of each silo's records, if they trust no server). Default 0.1, or 0.2 with silos.
      test_fraction: expected share of users held out for the report.
      split: ``"by_user"`` (a user is on one side; default), or ``"within_user"`` (the fractions are
        the leading share of each user's examples, at most ``held_out_max`` of them; users with one
        example are left out; Charles et al. 2024 split CC-News like this, with 0 and 0.1). A named
        set with a test part keeps it, and ``test_fraction`` is not used.
      held_out_max: most held-out examples of a user in each part (``within_user``).
      public: public corpus for pre-training: ``"auto"`` (the standard library for
        ``python_source``, nothing otherwise), ``"stdlib"``, ``"none"``, a text file or folder, or
        ``"template"``: random rows of ``template``, whose words and numbers are equally likely.
      max_norm: each record's features (with their constant) are scaled down to this norm.
      max_target: each record's target (regression, scaled) is clipped to this.

    Examples:
      >>> from dpfl_jax.data import DataConfig
      >>> DataConfig(source="csv", path="visits.csv", user_column="patient").user_column
      'patient'
    """

    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    split: Literal["by_user", "within_user"] = "by_user"
    held_out_max: int = 32
    public: str = "auto"
    max_norm: Annotated[float, Field(gt=0)] = 4.0
    max_target: Annotated[float, Field(gt=0)] = 3.0
