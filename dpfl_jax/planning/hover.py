"""An answer as a picture for notebooks and browsers: SVG alone, a point tells its cell when met."""

from __future__ import annotations

import html
import math
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 80, 50, 30, 190
COLOURS = ("#1f5fbf", "#d1813a", "#3b8f5a", "#8a4fb0", "#b03a48", "#555555")
STYLE = (
    "<style>.dpfl-answer{font:12px sans-serif} .dpfl-answer g:hover polyline{stroke-width:4}"
    ".dpfl-answer circle:hover{r:7} .dpfl-answer .grid{stroke:#ddd}</style>"
)


class Answer(dict[str, Any]):
    """What ``ask`` returns: JSON, and in a notebook a picture under the pointer."""

    def _repr_html_(self) -> str:
        """An SVG without scripts: point at a dot to see its cell."""
        return drawn(self)


def drawn(found: dict[str, Any]) -> str:
    """An answer as SVG in HTML.

    Args:
      found: ``x``, ``y``, ``series``, ``lines`` and ``answer``, as ``ask`` returns them.
    """
    series = {n: [p for p in ps if p["cell"] is not None] for n, ps in found["series"].items()}
    points = [point for some in series.values() for point in some]
    if not points:
        return f"<p>{html.escape(found['answer'])}</p>"
    log = found["y"].startswith("noise")
    across = _scale([p["x"] for p in points], LEFT, WIDTH - RIGHT, log=True)
    heights = [p[k] for p in points for k in ("low", "high")] + list(found["lines"].values())
    up = _scale(heights, HEIGHT - BOTTOM, TOP, log=log)
    parts = [f'<svg class="dpfl-answer" width="{WIDTH}" height="{HEIGHT}">', STYLE]
    for x in sorted({p["x"] for p in points}):
        parts.append(_text(across(x), HEIGHT - BOTTOM + 18, f"{x:,.4g}", "middle"))
    for y in _ticks(heights, log):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" '
            f'y2="{up(y):.1f}"/>' + _text(LEFT - 6, up(y) + 4, f"{y:.3g}", "end")
        )
    for name, value in found["lines"].items():
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}" '
            'stroke="grey" stroke-dasharray="4 3"/>' + _text(LEFT + 4, up(value) - 4, name, "start")
        )
    for i, (name, some) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = " ".join(f"{across(p['x']):.1f},{up(p['score']):.1f}" for p in some)
        parts.append(
            f'<g fill="{colour}"><polyline points="{line}" fill="none" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        for p in some:
            if p["low"] < p["high"]:
                parts.append(
                    f'<line x1="{across(p["x"]):.1f}" x2="{across(p["x"]):.1f}" '
                    f'y1="{up(p["low"]):.1f}" y2="{up(p["high"]):.1f}" stroke="{colour}" '
                    'stroke-opacity="0.4" stroke-width="4"/>'
                )
            parts.append(
                f'<circle cx="{across(p["x"]):.1f}" cy="{up(p["score"]):.1f}" r="5"><title>'
                f"{html.escape(_told(p, name, found))}</title></circle>"
            )
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 10 + 18 * i, name, "start") + "</g>")
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, found["x"], "middle"))
    parts.append(_text(LEFT, TOP - 12, found["y"], "start") + "</svg>")
    return f"<div>{''.join(parts)}<p>{html.escape(found['answer'])}</p></div>"


def _told(point: dict[str, Any], name: str, found: dict[str, Any]) -> str:
    from dpfl_jax.planning.questions import in_words

    band = "" if point["low"] == point["high"] else f" ({point['low']:.3f} to {point['high']:.3f})"
    return (
        f"{name}\n{found['x']} {point['x']:,.4g}\n{found['y']} {point['score']:.4g}{band}\n"
        f"{in_words(point['cell'])}"
    )


def _scale(values: list[float], first: float, last: float, log: bool) -> Any:
    low, high = min(values), max(values)
    by = math.log if log else float
    span = (by(high) - by(low)) or 1.0
    return lambda value: first + (last - first) * (by(value) - by(low)) / span


def _ticks(values: list[float], log: bool) -> list[float]:
    low, high = min(values), max(values)
    if log:
        return [low * (high / low) ** (k / 4) for k in range(5)]
    return [low + (high - low) * k / 4 for k in range(5)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
