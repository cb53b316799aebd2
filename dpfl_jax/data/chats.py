"""Chats, instructions and preferences: rows to texts of which some characters are answers.

A row becomes one *document*, a JSON text of one sequence (a conversation, or a prompt with its
completion) or of two (a prompt with the chosen answer, and with the rejected one). Documents are
then handled like other texts, and each becomes one example.

Chat templates are Jinja templates, as in ``transformers``, in a sandbox. They know no date: the
same messages give the same text on every day.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.rows import no_column, text_of
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.tokenizers import Tokenizer, named_tokens, read_json_object, tokenizer_settings
from dpfl_jax.errors import BadInputError, extra, unrepeated
from dpfl_jax.files import local_path, read_text

# ---- chat templates ------------------------------------------------------------------------------


Spans = list[tuple[int, int]]
# Put around what a template marks as an answer: noncharacters (Unicode, section 23.7).
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the special tokens that it names.

    Attributes:
      source: Jinja source.
      tokens: special tokens by name, such as ``bos_token``.
      name: name for errors.
    """

    source: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    name: str = "the chat template"

    @functools.cached_property
    def _compiled(self) -> Any:
        with extra("chat", "a chat template"):
            from dpfl_jax.data.chat_templates import compiled
        return compiled(self.source, self.name, (_BEGIN, _END))

    def _render(self, messages: Sequence[Mapping[str, Any]], where: str, prompt: bool) -> str:
        compiled = self._compiled
        try:
            return compiled.render(
                messages=messages, add_generation_prompt=prompt, tools=None, **self.tokens
            )
        except Exception as error:  # whatever the template's expressions raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadInputError(f"{where}: {self.name} does not take it: {reason}") from error

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        """Renders messages, and the beginning of the answer that follows them."""
        return _unmarked(self._render(messages, where, True))[0]

    def render(self, messages: Sequence[Mapping[str, Any]], where: str) -> tuple[str, Spans]:
        """Renders a conversation.

        Args:
          messages: ``role`` and ``content`` of each.
          where: the row, for errors.

        Returns:
          text: the text of all messages.
          spans: first and last character (excluded) of each assistant message's answer: what the
            template marks with ``{% generation %}``, else what rendering the message adds to the
            text (the end of the turn is part of the answer, its beginning is not).

        Raises:
          BadInputError: the template does not take these messages, or their answers cannot be
            located.
        """
        written = json.dumps(messages, ensure_ascii=False, default=str)
        if _BEGIN in written or _END in written:
            raise BadInputError(f"{where}: a message holds U+FDD0 or U+FDD1: leave them out")
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._render(messages, where, False)
        if _MARKS.search(self.source):
            text, spans = _unmarked(text)
            if len(spans) != len(assistant):
                raise BadInputError(
                    f"{where}: {self.name} marks {len(spans)} answers, but the assistant has "
                    f"{len(assistant)} messages: put {{% generation %}} around each"
                )
            return text, spans
        spans = []
        for i in assistant:
            before = self._render(messages[:i], where, True)
            after = self._render(messages[: i + 1], where, False)
            if not (text.startswith(after) and after.startswith(before) and after != before):
                raise BadInputError(
                    f"{where}: with {self.name} the beginning of a conversation does not begin "
                    "the text of the whole, so that answers cannot be located: put "
                    "{% generation %} and {% endgeneration %} around them in a copy, and set "
                    "data.chat_template"
                )
            spans.append((len(before), len(after)))
        return text, spans


def _unmarked(text: str) -> tuple[str, Spans]:
    first, *rest = text.split(_BEGIN)
    parts, spans, length = [first], [], len(first)
    for piece in rest:
        answer, _, other = piece.partition(_END)
        spans.append((length, length + len(answer)))
        parts += [answer, other]
        length += len(answer) + len(other)
    return "".join(parts), spans


def load_chat_template(tokenizer: Any, file: str | None = None) -> ChatTemplate | None:
    """Reads the chat template in ``file``, else the tokeniser's; None if there is neither.

    A tokeniser (as ``load_tokenizer`` takes it) has ``chat_template.jinja`` next to its file, or
    ``tokenizer_config.json``, which also names special tokens.

    Raises:
      BadInputError: a file cannot be read.
    """
    config: Mapping[str, Any] = {}
    source, name = None, ""
    if isinstance(tokenizer, str | os.PathLike):
        path = pathlib.Path(local_path(tokenizer, "model"))
        folder = path if path.is_dir() else path.parent
        settings, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        if os.fspath(tokenizer) != "bytes" and settings.is_file():
            source, name = read_json_object(settings).get("chat_template"), os.fspath(settings)
            config = tokenizer_settings(settings)
        if os.fspath(tokenizer) != "bytes" and template.is_file():
            source, name = _read(template), os.fspath(template)
    else:
        source, name = getattr(tokenizer, "chat_template", None), "the tokeniser's chat template"
        config = getattr(tokenizer, "special_tokens_map", {})
    if isinstance(source, list):  # several by name
        source = {entry.get("name"): entry.get("template") for entry in source}
    if isinstance(source, dict):
        source = source.get("default")
    if file is not None:
        source, name = _read(pathlib.Path(file)), file
    if not isinstance(source, str):
        return None
    return ChatTemplate(
        source, named_tokens(config), f"the chat template {name}" if os.path.exists(name) else name
    )


def _read(path: pathlib.Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInputError(f"cannot read the chat template {path}: {reason}") from error


# ---- rows to documents, documents to examples ----------------------------------------------------


Messages = list[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
TOO_LONG = "no answer begins within seq_len={} tokens: raise it"


@dataclasses.dataclass(frozen=True)
class Conversations:
    """The columns of conversations; one of three kinds (``conversations_in``).

    Attributes:
      messages: column of a whole conversation.
      prompt: column of the text or messages that an answer follows.
      completion: column of the answer; or
      chosen: column of the better of two answers, and
      rejected: column of the other one. Without ``prompt`` both are whole conversations with a
        common beginning.
      template: chat template of messages; None without one.
    """

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    template: ChatTemplate | None = None

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        named = (self.messages, self.prompt, self.completion, self.chosen, self.rejected)
        return [name for name in named if name is not None]

    @property
    def _both(self) -> tuple[str, ...]:
        return tuple(name for name in (self.chosen, self.rejected) if name is not None)

    def schema(self, seq_len: int, tokenizer: Tokenizer) -> Schema:
        """The layout of the examples.

        Raises:
          BadInputError: the tokeniser does not say which characters make a token.
        """
        if not hasattr(tokenizer, "encode_with_offsets"):
            raise BadInputError(
                "answers are located by the characters that a token is made of, which this "
                "tokenizer does not tell: set data.tokenizer to a tokenizer.json, or to bytes"
            )
        pairs = self.chosen is not None
        return Schema.answers(seq_len, tokenizer.vocab_size, tokenizer.fingerprint, pairs)

    def document(self, row: Mapping[str, Any], where: str) -> str:
        """Returns the document of a row.

        Raises:
          BadInputError: naming ``where``, what is wrong with the row.
        """
        try:
            if self.messages is not None:
                messages = _messages(row, self.messages, where)
                _need_assistant(messages, self.messages, where)
                sequences = [(*self._rendered(messages, where), False)]
            elif self.completion is not None:
                sequences = [self._answer(row, self.completion, where)]
            else:
                sequences = [self._answer(row, name, where) for name in self._both]
            # A lone surrogate, escaped in JSON, would stop the tokeniser for all rows.
            json.dumps(sequences, ensure_ascii=False).encode()
        except BadInputError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInputError(f"{where}: it cannot be written as text ({error})") from error
        return json.dumps(sequences)

    def prompt_of(self, row: Mapping[str, Any], where: str) -> tuple[str, bool, Any]:
        """Returns a row's prompt: what comes before the last answer of a whole conversation.

        Returns:
          The prompt's text; whether the tokenizer adds its beginning-of-text token; and the prompt
          as the row has it.

        Raises:
          BadInputError: naming ``where``, if the row has no prompt.
        """
        column = self.prompt or self.messages
        if column is None:
            raise BadInputError(
                "these conversations have no prompts: data.prompt_column is not set"
            )
        if column not in row:
            raise no_column(where, column, sorted(row))
        if column == self.prompt and isinstance(row[column], str | bytes):
            return text_of(row, column, where), True, row[column]
        messages = _messages(row, column, where)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if self.template is None or not messages:
            raise BadInputError(f"{where}: {column!r} holds no message that an answer could follow")
        return self.template.render_prompt(messages, where), False, messages

    def _rendered(self, messages: Messages, where: str) -> tuple[str, Spans]:
        if self.template is None:
            raise BadInputError(
                f"{where}: messages need a chat template, and data.tokenizer has none: set "
                "data.chat_template to a file that holds it"
            )
        return self.template.render(messages, where)

    def _answer(self, row: Mapping[str, Any], column: str, where: str) -> tuple[str, Spans, bool]:
        """Text, spans of answers, and whether the end token follows, of one answer."""
        if self.prompt is None:
            first, second = (_messages(row, name, where) for name in self._both)
            messages = first if column == self.chosen else second
            prefix = 0
            while prefix < min(len(first), len(second)) - 1 and first[prefix] == second[prefix]:
                prefix += 1
        else:
            for name in (self.prompt, column):
                if name not in row:
                    raise no_column(where, name, sorted(row))
            texts = [isinstance(row[name], str | bytes) for name in (self.prompt, column)]
            if all(texts):
                prompt, answer = (text_of(row, name, where) for name in (self.prompt, column))
                if not answer:
                    raise BadInputError(f"{where}: the answer in {column!r} is empty")
                return prompt + answer, [(len(prompt), len(prompt + answer))], True
            if any(texts):
                raise BadInputError(
                    f"{where}: of {self.prompt!r} and {column!r} one is text, the other is not: "
                    "make both text or both messages, or, where the answers hold whole "
                    "conversations, set data.prompt_column=null"
                )
            first = _messages(row, self.prompt, where)
            prefix, messages = len(first), first + _messages(row, column, where)
        _need_assistant(messages[prefix:], column, where)
        text, spans = self._rendered(messages, where)
        skip = sum(message["role"] == "assistant" for message in messages[:prefix])
        return text, spans[skip:], False


def conversations_in(
    columns: Mapping[str, str | None], tokenizer: Any, chat_template: str | None = None
) -> Conversations | None:
    """Makes ``Conversations`` of columns, by name of its attributes; None if none is named.

    Messages are rendered by the tokeniser's chat template, or the one in the file
    ``chat_template``.

    Raises:
      BadInputError: the columns do not make exactly one kind of conversation.
    """
    given = {name for name, column in columns.items() if column is not None}
    kinds: tuple[set[str], ...]
    kinds = ({"messages"}, {"prompt", "completion"}, {"prompt", "chosen", "rejected"},
             {"chosen", "rejected"})  # fmt: skip
    if not given and chat_template is None:
        return None
    if given not in kinds:
        named = " and ".join(f"data.{name}_column" for name in sorted(given)) or "none of them"
        raise BadInputError(
            "conversations are named by data.messages_column, by prompt_column and "
            "completion_column, or by prompt_column, chosen_column and rejected_column, but "
            f"{named} is set"
        )
    template = load_chat_template(tokenizer, chat_template)
    return Conversations(**columns, template=template)


def _messages(row: Mapping[str, Any], column: str, where: str) -> Messages:
    """A cell as messages of role and content; JSON text, as in CSV files, is parsed."""
    if column not in row:
        raise no_column(where, column, sorted(row))
    cell = row[column]
    if isinstance(cell, str):
        try:
            cell = json.loads(cell, object_pairs_hook=unrepeated)
        except (ValueError, RecursionError):
            raise BadInputError(f"{where}: {column!r} holds text that is not a JSON list") from None
    if not isinstance(cell, list | tuple) or not cell:
        kind = "an empty list" if isinstance(cell, list | tuple) else type(cell).__name__
        raise BadInputError(f"{where}: {column!r} holds {kind}, not a list of messages")
    return [
        _message(message, f"{where}, message {number}") for number, message in enumerate(cell, 1)
    ]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadInputError(f"{where}: it is {type(message).__name__}, not an object with a role")
    # Parquet gives every message all keys, null where it has none.
    fields = {name: value for name, value in message.items() if value is not None}
    if "from" in fields and "value" in fields:
        role = fields.pop("from")
        fields = {
            "role": _SHAREGPT_ROLES.get(str(role), role),
            "content": fields.pop("value"),
        } | fields
    if fields.get("role") not in ROLES:
        raise BadInputError(f"{where}: the role is {fields.get('role')!r}, not one of {ROLES}")
    if not isinstance(fields.setdefault("content", None), str) and not fields.get("tool_calls"):
        raise BadInputError(f"{where}: the content is {fields['content']!r:.60}, not text")
    return fields


def _need_assistant(messages: Sequence[Mapping[str, Any]], column: str, where: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise BadInputError(f"{where}: no message in {column!r} is the assistant's")


def encode_conversations(
    documents: Sequence[str], tokenizer: Any, schema: Schema
) -> tuple[np.ndarray, int]:
    """Tokenises documents and truncates each to ``schema.seq_len`` tokens.

    A token belongs to an answer if one of its characters does. The beginning-of-sequence token is
    part of the sequence: the chat template writes it, or, if prompt and answer are text, the
    tokeniser. A model of these examples prepends no token, and does not predict the first one.

    Returns:
      records: [n] of ``schema.record_dtype``, in order.
      dropped: how many documents have a sequence in which no token of an answer is left.
    """
    length, dropped = schema.seq_len, 0
    parsed: list[list[tuple[str, Spans, bool]]] = [json.loads(document) for document in documents]
    encoded = iter(
        tokenizer.encode_with_offsets([text for sequences in parsed for text, _, _ in sequences])
    )
    kept: dict[str, list[np.ndarray]] = {"tokens": [], "mask": []}
    for sequences in parsed:
        tokens = np.zeros((len(sequences), length), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for row, (_, spans, ends) in enumerate(sequences):
            ids, offsets = next(encoded)
            answer = np.zeros(len(ids), bool)
            for start, stop in spans:
                answer |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
            first = tokenizer.bos_id if ends else None
            if first is not None and list(ids[:1]) != [first]:
                ids, answer = np.insert(ids, 0, first), np.insert(answer, 0, False)
            answer[:1] = False
            last = tokenizer.eos_id if ends else None
            if last is not None and list(ids[-1:]) != [last]:
                ids, answer = np.append(ids, last), np.append(answer, True)
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids[:length], answer[:length]
        if not mask.any(axis=1).all():
            dropped += 1
            continue
        kept["tokens"].append(tokens if schema.pairs else tokens[0])
        kept["mask"].append(mask if schema.pairs else mask[0])
    if not kept["tokens"]:
        return np.empty(0, schema.record_dtype), dropped
    return schema.pack({name: np.stack(arrays) for name, arrays in kept.items()}), dropped
