"""YAML as people write it: what would silently mean something else is refused.

YAML takes a key without a value for null, the second of two equal keys for both, `010` for 8 and
`1:30` for 90. An unset variable of the shell would turn a protection off.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from dpfl_jax.errors import BadInputError, one_line, repeated

# As of YAML 1.2; without one of these, PyYAML takes 1e-8 for text.
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
_CUT = re.compile(r" #\S")  # a comment begins with a blank, or is what a name went on with
_NUMBERS = ("int", "float")
_QUOTES = "put a value that holds one of : # & * ! @ % ` [ ] { } \\ in single quotes"


class _Loader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that takes 1e-8 for a number."""


class _Dumper(yaml.SafeDumper):
    """``yaml.SafeDumper`` that puts the text 1e-8 in quotes."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def write_yaml(content: Any) -> str:
    """What ``read_yaml`` reads as it was."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False)


def read_yaml(text: str, where: str, one_value: bool = False) -> Any:
    """What a YAML text holds.

    Args:
      text: the YAML.
      where: for errors.
      one_value: it is the value of one key, without comments.

    Raises:
      BadInputError: it is no YAML, or means something that nobody would write so.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _check(node, text, where, one_value)
        return loader.construct_document(node)
    except BadInputError:
        raise
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None or one_value else _line(error.problem_mark)
        why = f"{error.problem or error.context}"
        raise BadInputError(f"{where}{at} is not valid YAML ({one_line(why)}): {_QUOTES}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise BadInputError(f"{where} is not valid YAML: {why}") from None
    finally:
        loader.dispose()


def _line(mark: Any) -> str:
    return f", line {mark.line + 1},"


def _check(root: yaml.Node | None, text: str, where: str, one_value: bool) -> None:
    """Raises BadInputError for what YAML would read as something else than it says."""
    if root is None or (one_value and text[root.end_mark.index :].strip()):
        if "#" in text:
            raise BadInputError(f"{where}: YAML cuts a value off at the #: put it in quotes")
        if one_value:
            raise _empty(where)
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        key, node = left.pop()
        if node is None or id(node) in seen:  # aliases
            continue
        seen.add(id(node))
        at = where if one_value else f"{where}{_line(node.start_mark)} {key}".rstrip(", ")
        if isinstance(node, yaml.MappingNode):
            names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
            if (twice := repeated(names)) is not None:
                raise BadInputError(f"{at}: the key {twice!r} stands there twice: keep one")
            for name, value in node.value:
                shown = name.value if isinstance(name, yaml.ScalarNode) else "?"
                inner = f"{key}.{shown}" if key else shown
                left += [(inner, name), (inner, value)]
        elif isinstance(node, yaml.SequenceNode):
            left += [(key, entry) for entry in node.value]
        elif node.style is None:  # plain, without quotes
            _check_plain(node, text, at)


def _check_plain(node: yaml.ScalarNode, text: str, at: str) -> None:
    kind, value = node.tag.rpartition(":")[2], node.value
    if kind == "null" and not value:
        raise _empty(at)
    if (kind == "int" and re.match(r"[-+]?0[\d_]", value)) or (kind in _NUMBERS and ":" in value):
        raise BadInputError(
            f"{at} is {value}, which YAML reads as another number: write a decimal number, or put "
            "it in quotes if it is text"
        )
    if kind == "str" and _CUT.match(text, node.end_mark.index):
        raise BadInputError(
            f"{at} is cut off at the #, where YAML begins a comment: put the value in quotes, or a "
            "blank behind the #"
        )


def _empty(at: str) -> BadInputError:
    return BadInputError(
        f"{at} is empty, which YAML takes for null: write null if nothing is meant; a variable of "
        "the shell may not be set, and what begins with # or & needs quotes"
    )
