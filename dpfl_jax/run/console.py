"""A terminal that shows text as text: names, reports and messages come from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console
from rich.segment import Segment
from rich.text import Text

from dpfl_jax.errors import plain


class Console(console.Console):
    """One of ``rich`` that reads no markup, and writes no control characters of what it shows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As of ``rich``; a warning is seen."""
        found = super().render_str(text, **options)
        if text.startswith("warning:"):
            found.stylize("bold yellow", 0, len("warning:"))
        return found

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """As of ``rich``."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))
