"""An answer as an SVG for notebooks and browsers; hovering over a point shows its cell."""

from __future__ import annotations

import html
import math
from typing import Any

from dpfl_jax.planning.planner import in_words

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 80, 50, 30, 190
COLOURS = ("#1f5fbf", "#d1813a", "#3b8f5a", "#8a4fb0", "#b03a48", "#555555")
STYLE = (
    "<style>.dpfl-answer{font:12px sans-serif} .dpfl-answer g:hover polyline{stroke-width:4}"
    ".dpfl-answer circle:hover{r:7} .dpfl-answer .grid{stroke:#ddd}</style>"
)


class Answer(dict[str, Any]):
    """What ``ask`` returns: JSON; notebooks show it as a picture (an SVG without scripts)."""

    def _repr_html_(self) -> str:
        return to_svg(self)


def to_svg(answer: dict[str, Any]) -> str:
    """An answer of ``ask`` as SVG in HTML."""
    series = {n: [p for p in ps if p["cell"] is not None] for n, ps in answer["series"].items()}
    points = [point for some in series.values() for point in some]
    if not points:
        return f"<p>{html.escape(answer['answer'])}</p>"
    log = answer["y"].startswith("noise")
    across = _scale([p["x"] for p in points], LEFT, WIDTH - RIGHT, log=True)
    heights = [p[k] for p in points for k in ("low", "high")] + list(answer["lines"].values())
    up = _scale(heights, HEIGHT - BOTTOM, TOP, log=log)
    parts = [f'<svg class="dpfl-answer" width="{WIDTH}" height="{HEIGHT}">', STYLE]
    for x in sorted({p["x"] for p in points}):
        parts.append(_text(across(x), HEIGHT - BOTTOM + 18, f"{x:,.4g}", "middle"))
    for y in _ticks(heights, log):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" '
            f'y2="{up(y):.1f}"/>' + _text(LEFT - 6, up(y) + 4, f"{y:.3g}", "end")
        )
    for name, value in answer["lines"].items():
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
                f"{html.escape(_tooltip(p, name, answer))}</title></circle>"
            )
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 10 + 18 * i, name, "start") + "</g>")
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, answer["x"], "middle"))
    parts.append(_text(LEFT, TOP - 12, answer["y"], "start") + "</svg>")
    return f"<div>{''.join(parts)}<p>{html.escape(answer['answer'])}</p></div>"


def _tooltip(point: dict[str, Any], name: str, answer: dict[str, Any]) -> str:
    band = "" if point["low"] == point["high"] else f" ({point['low']:.3f} to {point['high']:.3f})"
    return (
        f"{name}\n{answer['x']} {point['x']:,.4g}\n{answer['y']} {point['score']:.4g}{band}\n"
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
