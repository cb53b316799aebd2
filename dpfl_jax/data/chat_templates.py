"""Chat templates, compiled by Jinja in its sandbox (extra ``chat``)."""

from __future__ import annotations

import functools
import json
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dpfl_jax.errors import BadInputError


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` marks an answer."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        begin, end = vars(self.environment)["marks_of_answers"]
        return f"{begin}{caller()}{end}"


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def compiled(source: str, name: str, marks: tuple[str, str]) -> jinja2.Template:
    """Returns a template that can be rendered.

    Args:
      source: Jinja source.
      name: name for errors.
      marks: what is put before and after an answer.

    Raises:
      BadInputError: it is not a Jinja template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.extend(marks_of_answers=marks)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise BadInputError(
            f"{name} is not a Jinja template: line {error.lineno}, {error.message}"
        ) from error
