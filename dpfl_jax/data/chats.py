"""Chats, instructions and preferences: rows to texts of which some characters are answers.

A row becomes one *document*, a JSON text: one sequence (a conversation, or a prompt with its
completion) or two (a prompt with the answer that was chosen, and with the one that was rejected).
From there on it goes the way of other documents, and each becomes one example.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.chat_template import ChatTemplate, Spans, load_chat_template
from dpfl_jax.data.rows import no_column, text_of
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.tokenizers import Tokenizer
from dpfl_jax.errors import BadInputError, unrepeated

Messages = list[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's names of the same.
_ALSO = {"human": "user", "gpt": "assistant"}
TOO_LONG = "no answer begins within seq_len={} tokens: raise it"


@dataclasses.dataclass(frozen=True)
class Conversations:
    """Which columns of a row hold what; one of three kinds (``conversations_in``).

    Attributes:
      messages: of a whole conversation.
      prompt: text or messages that an answer follows.
      completion: the answer; or
      chosen: the better of two, and
      rejected: the other one. Without ``prompt`` both are whole conversations that begin alike.
      template: of messages; None if there is none.
    """

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    template: ChatTemplate | None = None

    @property
    def columns(self) -> list[str]:
        """All that are read."""
        named = (self.messages, self.prompt, self.completion, self.chosen, self.rejected)
        return [name for name in named if name is not None]

    @property
    def _both(self) -> tuple[str, ...]:
        return tuple(name for name in (self.chosen, self.rejected) if name is not None)

    def schema(self, seq_len: int, tokenizer: Tokenizer) -> Schema:
        """The layout of the examples."""
        if not hasattr(tokenizer, "encode_placed"):
            raise BadInputError(
                "answers are told by the characters that a token is made of, which this tokenizer "
                "does not say: set data.tokenizer to a tokenizer.json, or to bytes"
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
                found = _messages(row, self.messages, where)
                _need_assistant(found, self.messages, where)
                sequences = [(*self._rendered(found, where), False)]
            elif self.completion is not None:
                sequences = [self._answer(row, self.completion, where)]
            else:
                sequences = [self._answer(row, name, where) for name in self._both]
            # Half of a character, escaped in JSON text: a tokenizer would stop at it, for all.
            json.dumps(sequences, ensure_ascii=False).encode()
        except BadInputError:
            raise
        except (TypeError, ValueError, RecursionError) as error:  # a row's own: no other's reading
            raise BadInputError(f"{where}: it cannot be written as text ({error})") from error
        return json.dumps(sequences)

    def _rendered(self, messages: Messages, where: str) -> tuple[str, Spans]:
        if self.template is None:
            raise BadInputError(
                f"{where}: messages need a chat template, and data.tokenizer has none: set "
                "data.chat_template to a file that holds it"
            )
        return self.template.answers(messages, where)

    def _answer(self, row: Mapping[str, Any], column: str, where: str) -> tuple[str, Spans, bool]:
        """Text, answers, and whether the end token follows, of one answer to the prompt."""
        if self.prompt is None:
            both = [_messages(row, name, where) for name in self._both]
            whole = _messages(row, column, where)
            before = 0
            while before < min(map(len, both)) - 1 and both[0][before] == both[1][before]:
                before += 1
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
            before, whole = len(first), first + _messages(row, column, where)
        _need_assistant(whole[before:], column, where)
        text, spans = self._rendered(whole, where)
        skip = sum(message["role"] == "assistant" for message in whole[:before])
        return text, spans[skip:], False


def conversations_in(
    columns: Mapping[str, str | None], tokenizer: Any, chat_template: str | None = None
) -> Conversations | None:
    """Which columns hold conversations; None if none is named.

    Args:
      columns: by attribute of ``Conversations``.
      tokenizer: as ``load_tokenizer`` takes it; its chat template is used.
      chat_template: file of another one.

    Raises:
      BadInputError: they are no kind, or several.
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
    """A cell as messages of role and content; JSON text, as in CSV files, is read."""
    if column not in row:
        raise no_column(where, column, sorted(row))
    found = row[column]
    if isinstance(found, str):
        try:
            found = json.loads(found, object_pairs_hook=unrepeated)
        except (ValueError, RecursionError):
            raise BadInputError(f"{where}: {column!r} holds text that is no JSON list") from None
    if not isinstance(found, list | tuple) or not found:
        kind = "an empty list" if isinstance(found, list | tuple) else type(found).__name__
        raise BadInputError(f"{where}: {column!r} holds {kind}, not a list of messages")
    return [_message(one, f"{where}, message {number}") for number, one in enumerate(found, 1)]


def _message(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise BadInputError(f"{where}: it is {type(found).__name__}, not an object with a role")
    # Parquet gives every message the keys of all, as null.
    held = {name: value for name, value in found.items() if value is not None}
    if "from" in held and "value" in held:
        role = held.pop("from")
        held = {"role": _ALSO.get(str(role), role), "content": held.pop("value")} | held
    if held.get("role") not in ROLES:
        raise BadInputError(f"{where}: the role is {held.get('role')!r}, not one of {ROLES}")
    if not isinstance(held.setdefault("content", None), str) and not held.get("tool_calls"):
        raise BadInputError(f"{where}: the content is {held['content']!r:.60}, not text")
    return held


def _need_assistant(messages: Sequence[Mapping[str, Any]], column: str, where: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise BadInputError(f"{where}: no message in {column!r} is the assistant's")


def encode_conversations(
    documents: Sequence[str], tokenizer: Any, schema: Schema
) -> tuple[np.ndarray, int]:
    """Tokenises documents and cuts each at the end to ``schema.seq_len`` tokens.

    A token is an answer's if one of its characters is. The beginning is a token like others: the
    chat template's, or, where prompt and answer are text, the tokeniser's. A model of these
    prepends none, and so predicts no first token.

    Args:
      documents: of ``Conversations.document``.
      tokenizer: with ``encode_placed``.
      schema: of ``Conversations.schema``.

    Returns:
      records: [n] of ``schema.record_dtype``, in order.
      dropped: how many documents have a sequence with no token of an answer left.
    """
    length, dropped = schema.seq_len, 0
    read: list[list[tuple[str, Spans, bool]]] = [json.loads(document) for document in documents]
    placed = iter(tokenizer.encode_placed([text for one in read for text, _, _ in one]))
    kept: dict[str, list[np.ndarray]] = {"tokens": [], "mask": []}
    for sequences in read:
        tokens = np.zeros((len(sequences), length), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for row, (_, spans, ends) in enumerate(sequences):
            ids, places = next(placed)
            answer = np.zeros(len(ids), bool)
            for start, stop in spans:
                answer |= (places[:, 0] < stop) & (places[:, 1] > start)
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
