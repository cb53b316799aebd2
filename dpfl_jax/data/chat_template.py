"""A tokeniser's chat template: messages to one text, and which of its characters are answers.

Templates are Jinja, as ``transformers`` has them, in a sandbox. They know no date: the same
messages give the same text on every day.
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

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dpfl_jax.data.tokenizers import json_of, named_tokens, tokenizer_settings
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import read_text
from dpfl_jax.hub import local_path

Spans = list[tuple[int, int]]
# Around what a template marks as an answer; no characters of any text (Unicode, section 23.7).
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: an answer."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it names.

    Attributes:
      source: in Jinja.
      tokens: ``bos_token`` and others, and what they are.
      name: what errors call it.
    """

    source: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    name: str = "the chat template"

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise BadInputError(
                f"{self.name} is no template of Jinja: line {error.lineno}, {error.message}"
            ) from error

    def _render(self, messages: Sequence[Mapping[str, Any]], where: str, prompt: bool) -> str:
        compiled = self._compiled
        try:
            return compiled.render(
                messages=messages, add_generation_prompt=prompt, tools=None, **self.tokens
            )
        except Exception as error:  # whatever the template's expressions raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadInputError(f"{where}: {self.name} does not take it: {reason}") from error

    def answers(self, messages: Sequence[Mapping[str, Any]], where: str) -> tuple[str, Spans]:
        """Renders a conversation.

        Args:
          messages: ``role`` and ``content`` of each.
          where: it is, for errors.

        Returns:
          text: of all messages.
          spans: from which character to which each assistant message's answer is: what the
            template marks with ``{% generation %}``, else what rendering it adds to the text
            before it (what ends the turn is part of it, what begins it is not).

        Raises:
          BadInputError: the template does not take these messages, or does not tell their answers.
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
                    "the text of the whole, so that answers cannot be told: put {% generation %} "
                    "and {% endgeneration %} around them in a copy, and set data.chat_template"
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
    """The template of a tokeniser, or the one in a file; None if there is neither.

    Args:
      tokenizer: as ``load_tokenizer`` takes it. Beside its file, ``chat_template.jinja`` or
        ``tokenizer_config.json`` hold the template, and the latter special tokens.
      file: holds a template, in the place of the tokeniser's own.

    Raises:
      BadInputError: a file that cannot be read.
    """
    config: Mapping[str, Any] = {}
    source, name = None, ""
    if isinstance(tokenizer, str | os.PathLike):
        path = pathlib.Path(local_path(tokenizer, "model"))
        folder = path if path.is_dir() else path.parent
        found = folder / "tokenizer_config.json"
        if os.fspath(tokenizer) != "bytes" and found.is_file():
            source, name = json_of(found).get("chat_template"), os.fspath(found)
            config = tokenizer_settings(found)
        found = folder / "chat_template.jinja"
        if os.fspath(tokenizer) != "bytes" and found.is_file():
            source, name = _read(found), os.fspath(found)
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
