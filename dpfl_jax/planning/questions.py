"""Answers to the questions of ``dpfl plan --ask``, as curves of the best cell.

A cell is an algorithm, a group size, a size and a number of steps. Its score is the loss that a
scaling law predicts or, without a law, the noise on the averaged gradient. The accountant
calibrates every noise multiplier behind a score.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from dpfl_jax.errors import BadInputError
from dpfl_jax.planning.candidates import CANDIDATES, plain
from dpfl_jax.planning.planner import Option, Planner, UserStatistics, in_words
from dpfl_jax.planning.scaling_law import ScalingLaw, join_scaling_laws

PLAIN = (plain(examples=False), plain(examples=True))
NEEDS_LAW = ("feasible", "variants", "size")


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """A point of a curve: the best cell for a value of x.

    Attributes:
      x: value on the axis.
      score: predicted loss, or noise.
      low, high: 90 % band of the predicted loss; the score itself for noise.
      cell: the best cell as JSON; None if no cell is possible.
    """

    x: float
    score: float
    low: float
    high: float
    cell: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A population, a guarantee and compute, possibly with a scaling law.

    Attributes:
      planner: planner for the population and the guarantee, with the configuration's steps.
      gradients: gradient evaluations that the compute of the whole run pays for.
      law: scaling law of the loss; None: cells are compared by noise.
    """

    planner: Planner
    gradients: float
    law: ScalingLaw | None = None
    _planners: dict[Any, Planner] = dataclasses.field(default_factory=dict, repr=False)

    def at(self, steps: int, epsilon: float, times: float = 1.0) -> Planner:
        """Returns the planner for these steps and epsilon, and ``times`` as many users."""
        key = (steps, epsilon, times)
        if key not in self._planners:
            base, users = self.planner, self.planner.users
            norms = base.sensitivities if self.law is None else self.law.sensitivities
            if times != 1.0:
                limited = {g: max(1, round(users.left(g) * times)) for g in users.groups()}
                users = UserStatistics(max(1, round(users.num_users * times)), limited=limited)
            self._planners[key] = Planner(
                users, norms, epsilon=epsilon, delta=base.delta, steps=steps
            )
        return self._planners[key]

    def steps(self) -> list[int]:
        """Returns the numbers of steps to compare: those that the law covers, or the configured."""
        if self.law is None:
            return [self.planner.steps]
        low, high = (f(row["steps"] for row in self.law.rows) for f in (min, max))
        tried = {round(self.planner.steps * 2.0**k) for k in range(-12, 13)}
        return sorted(t for t in tried if low <= t <= 2 * high) or [self.planner.steps]

    def cells(
        self,
        epsilon: float,
        times: float = 1.0,
        gradients: float | None = None,
        kinds: Sequence[str] = PLAIN,
    ) -> list[tuple[Option, int]]:
        """Returns every way to spend the compute on these candidates: (option, steps)."""
        gradients = self.gradients if gradients is None else gradients
        cells = []
        for steps in self.steps():
            budget = int(gradients / steps)
            planner = self.at(steps, epsilon, times)
            cells += [
                (planner.option(kind, *cell), steps)
                for kind in kinds
                for cell in (planner.cells(kind, budget) if budget >= 1 else [])
            ]
        return cells

    def best(self, x: float, **where: Any) -> CurvePoint:
        """Returns the best cell as a point at ``x``; ``where`` are the arguments of ``cells``."""
        cells = self.cells(**where)
        if not cells:
            return CurvePoint(x, math.nan, math.nan, math.nan, None)
        if self.law is None:
            option, steps = min(cells, key=lambda cell: cell[0].noise)
            noise = option.noise
            return CurvePoint(x, noise, noise, noise, {**option.to_json(), "steps": steps})
        predicted = self.law.predict([as_cell(*cell) for cell in cells])
        (option, steps), best = min(zip(cells, predicted), key=lambda pair: pair[1]["loss"])
        cell = {**option.to_json(), "steps": steps, **best}
        return CurvePoint(x, best["loss"], best["low"], best["high"], cell)

    def least_epsilon(self, loss: float) -> tuple[float, dict[str, Any] | None]:
        """Returns the least epsilon at which a cell of this compute is predicted to reach a loss.

        Returns:
          Epsilon and the cell; infinity and None if not even runs without noise reach the loss.
        """
        assert self.law is not None
        best: tuple[float, dict[str, Any] | None] = (math.inf, None)
        for option, steps in self.cells(self.planner.epsilon):
            ratio = self.law.ratio_for(loss, as_cell(option, steps))
            if ratio > 0:
                option = dataclasses.replace(option, noise_multiplier=ratio * option.size)
                epsilon = self.at(steps, self.planner.epsilon).epsilon_of(option)
                if epsilon < best[0]:
                    best = (epsilon, {**option.to_json(), "steps": steps})
        return best


def as_cell(option: Option, steps: int) -> dict[str, Any]:
    """Returns an option in the form of a cell for ``ScalingLaw.predict``."""
    kind, group, size = option.kind, option.group_size, option.size
    ratio = option.noise_multiplier * option.error / size
    return {"kind": kind, "group_size": group, "size": size, "steps": steps, "ratio": ratio}


def ask(question: str, scenarios: dict[str, Scenario], target: float | None = None) -> Answer:
    """Answers a question (``dpfl plan --help`` lists them).

    Args:
      question: name of the question.
      scenarios: scenarios by the name of their fit. Only ``variants`` and ``size`` use more than
        the first.
      target: for ``users``: the loss for which to find the number of users.

    Returns:
      JSON: ``question``, ``x`` (name of the axis), ``y``, ``series`` ({label: points}), ``lines``
      ({label: score}), ``answer`` (sentences). A notebook shows it as a picture.
    """
    name, scenario = next(iter(scenarios.items()))
    if question in NEEDS_LAW and scenario.law is None:
        raise BadInputError(f"--ask {question} is about loss: give a fit (--with FIT.json)")
    curve: Callable[..., list[CurvePoint]] = functools.partial(_curve, scenario)
    epsilon = scenario.planner.epsilon
    lines: dict[str, float] = {}
    if question in ("algorithm", "overtake"):
        if question == "algorithm":
            x, axis, unit = "gradient evaluations of the run", "gradients", 1.0
            values = [scenario.gradients * 4.0**k for k in range(-3, 3)]
        else:
            x, axis, unit = "users", "times", scenario.planner.users.num_users
            values = [4.0**k for k in range(-1, 5)]
        series = {CANDIDATES[kind].name: curve(axis, values, unit, kinds=[kind]) for kind in PLAIN}
        answer = _overtaking(series, x)
    elif question == "users":
        x, users = "users", scenario.planner.users.num_users
        series = {f"epsilon {epsilon:g}": curve("times", [2.0**k for k in range(-2, 5)], users)}
        points = series[f"epsilon {epsilon:g}"]
        now, twice = points[2:4]
        answer = (
            f"{_in_words(now, scenario)} now; {_in_words(twice, scenario)} with twice as many users"
        )
        if target is not None:
            enough = next((p.x for p in points if p.score <= target), None)
            needed = "more users than these" if enough is None else f"at most {enough:,.0f} users"
            answer += f"; {target:g} needs {needed}"
    elif question == "size":
        x = "FLOPs of the run"
        series, answer = _by_size(list(scenarios.values()))
    elif question == "pareto":
        x = "epsilon"
        series = {
            f"{scenario.gradients * f:,.0f} gradients": curve(
                "epsilon", _EPSILONS, gradients=scenario.gradients * f
            )
            for f in (0.25, 1.0, 4.0)
        }
        answer = "each curve is the best split of its compute over algorithm, batch and steps"
    else:  # over epsilon
        x = "epsilon"
        used = scenarios if question == "variants" else {name: scenario}
        series = {n: _curve(o, "epsilon", _EPSILONS) for n, o in used.items()}
        answer = ""
        if scenario.law is not None:
            cells = [{**as_cell(*c), "ratio": 0.0} for c in scenario.cells(epsilon)]
            free = min(cell["loss"] for cell in scenario.law.predict(cells))
            lines = {"before training": scenario.law.about["initial"], "without privacy": free}
        points = series[name]
        if question == "epsilon":
            at = {point.x: point for point in points}
            eight, two = (_in_words(at[x], scenario) for x in (8.0, 2.0))
            change = at[2.0].score / at[8.0].score - 1
            answer = f"epsilon 8: {eight}; epsilon 2: {two}: {change:+.1%}"
        elif question == "feasible":
            answer = _feasible(points, lines)
        else:
            at_target = {n: min(p, key=lambda q: abs(q.x - epsilon)) for n, p in series.items()}
            first = min(at_target, key=lambda n: at_target[n].score)
            answer = f"{first} is best at epsilon {at_target[first].x:g}: " + "; ".join(
                f"{n} {_in_words(p, used[n])}" for n, p in at_target.items()
            )
    shown = [p.cell for points in series.values() for p in points if p.cell is not None]
    if beyond := sum(cell.get("outside", 1.0) > 1.5 for cell in shown):
        answer += (
            f" ({beyond} of {len(shown)} points lie beyond the steps or noise of the proxy runs: "
            "their bands are wide)"
        )
    return Answer(
        question=question,
        x=x,
        y="noise on the averaged gradient" if scenario.law is None else "held-out loss",
        series={name: [_json(p) for p in points] for name, points in series.items()},
        lines=lines,
        answer=answer,
    )


def _by_size(scenarios: Sequence[Scenario]) -> tuple[dict[str, list[CurvePoint]], str]:
    """Curves of loss over compute for each model size, predicted by one joint law.

    Only sizes that were fitted are compared. Between them the law is right to 2 or 3 %, but its
    bands are too narrow; beyond them it is not reliable.
    """
    first = scenarios[0]
    law = join_scaling_laws([scenario.law for scenario in scenarios if scenario.law is not None])
    assert first.law is not None
    flops = first.gradients * first.law.about["flops_per_gradient"]
    totals = [flops * 4.0**k for k in range(-2, 3)]
    series = {}
    for parameters, each in law.about["sizes"]:
        other = Scenario(first.planner, 0.0, dataclasses.replace(law, parameters=parameters))
        series[f"{parameters:,.0f} parameters"] = [
            other.best(total, epsilon=first.planner.epsilon, gradients=total / each)
            for total in totals
        ]
    texts = []
    for i, total in enumerate(totals):
        possible = {n: p[i] for n, p in series.items() if p[i].cell is not None}
        if possible:
            best = min(possible, key=lambda n: possible[n].score)
            texts.append(f"{total:.2g} FLOPs: {best}, {_in_words(possible[best], first)}")
    return series, "; ".join(texts) or "none of these amounts of compute pays for a run"


def _json(point: CurvePoint) -> dict[str, Any]:
    plain_point = dataclasses.asdict(point)
    return plain_point if point.cell else plain_point | dict.fromkeys(("score", "low", "high"))


_EPSILONS = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


def _curve(
    scenario: Scenario, axis: str, values: Sequence[float], unit: float = 1.0, **where: Any
) -> list[CurvePoint]:
    base = {"epsilon": scenario.planner.epsilon, **where}
    return [scenario.best(value * unit, **{**base, axis: value}) for value in values]


def _in_words(point: CurvePoint, scenario: Scenario) -> str:
    if point.cell is None:
        return "nothing can be run"
    if scenario.law is None:  # all cells have the same number of steps
        cell = {name: value for name, value in point.cell.items() if name != "steps"}
        return f"noise {point.score:.4g} ({in_words(cell)})"
    band = f"{point.low:.3f} to {point.high:.3f}"
    return f"loss {point.score:.3f} ({band}; {in_words(point.cell)})"


def _overtaking(series: dict[str, list[CurvePoint]], x: str) -> str:
    names = list(series)
    ahead = []
    for points in zip(*series.values(), strict=True):
        scores = [math.inf if math.isnan(point.score) else point.score for point in points]
        if min(scores) < math.inf:
            ahead.append((points[0].x, names[scores.index(min(scores))]))
    texts = [f"{ahead[0][1]} is ahead at {ahead[0][0]:,.0f} {x}"]
    for (_, before), (where, after) in itertools.pairwise(ahead):
        if after != before:
            texts.append(f"{after} from {where:,.0f} on")
    if len(texts) == 1:
        texts.append(f"and up to {ahead[-1][0]:,.0f}")
    return ", ".join(texts)


def _feasible(points: Sequence[CurvePoint], lines: dict[str, float]) -> str:
    gain = lines["before training"] - lines["without privacy"]
    if gain <= 0:
        return "no: training does not help even without privacy, with this compute"
    kept = {p.x: (lines["before training"] - p.score) / gain for p in points if p.cell}
    surely = [p.x for p in points if p.cell and p.high < lines["before training"]]
    verdict = f"yes, from epsilon {min(surely):g} on" if surely else "no, at none of these epsilons"
    shares = ", ".join(f"{k:.0%} at epsilon {e:g}" for e, k in kept.items())
    return f"{verdict}: the share of the non-private gain that is kept is {shares}"


def predict(
    result: dict[str, Any], plan: Any, scenario: Any, target: float | None
) -> dict[str, Any]:
    """Adds predictions to a plan's JSON: losses of options, the best split, the least epsilon."""
    cells = [as_cell(option, plan.steps) for option in plan.options]
    for option, predicted in zip(result["options"], scenario.law.predict(cells), strict=True):
        option |= predicted
    best = scenario.best(0.0, epsilon=scenario.planner.epsilon).cell
    prediction: dict[str, Any] = {
        "best_of_budget": min(result["options"], key=lambda o: o["loss"]),
        "best_split": best,
        "gradients": scenario.gradients,
        "initial_loss": scenario.law.about["initial"],
    }
    if target is not None:
        epsilon, cell = scenario.least_epsilon(target)
        prediction["least_epsilon"] = {
            "target_loss": target,
            "value": epsilon if math.isfinite(epsilon) else None,
            "cell": cell,
        }
    return prediction


# ---- answers as pictures -------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 400, 80, 50, 30, 190
_COLOURS = ("#1f5fbf", "#d1813a", "#3b8f5a", "#8a4fb0", "#b03a48", "#555555")
_STYLE = (
    "<style>.dpfl-answer{font:12px sans-serif} .dpfl-answer g:hover polyline{stroke-width:4}"
    ".dpfl-answer circle:hover{r:7} .dpfl-answer .grid{stroke:#ddd}</style>"
)


class Answer(dict[str, Any]):
    """An answer of ``ask``: plain JSON, which notebooks show as a picture (SVG without scripts)."""

    def _repr_html_(self) -> str:
        return to_svg(self)


def to_svg(answer: dict[str, Any]) -> str:
    """Returns an answer of ``ask`` as SVG in HTML."""
    series = {n: [p for p in ps if p["cell"] is not None] for n, ps in answer["series"].items()}
    points = [point for some in series.values() for point in some]
    if not points:
        return f"<p>{html.escape(answer['answer'])}</p>"
    log = answer["y"].startswith("noise")
    across = _scale([p["x"] for p in points], _LEFT, _WIDTH - _RIGHT, log=True)
    heights = [p[k] for p in points for k in ("low", "high")] + list(answer["lines"].values())
    up = _scale(heights, _HEIGHT - _BOTTOM, _TOP, log=log)
    parts = [f'<svg class="dpfl-answer" width="{_WIDTH}" height="{_HEIGHT}">', _STYLE]
    for x in sorted({p["x"] for p in points}):
        parts.append(_text(across(x), _HEIGHT - _BOTTOM + 18, f"{x:,.4g}", "middle"))
    for y in _ticks(heights, log):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(y):.1f}" '
            f'y2="{up(y):.1f}"/>' + _text(_LEFT - 6, up(y) + 4, f"{y:.3g}", "end")
        )
    for name, value in answer["lines"].items():
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}" '
            'stroke="grey" stroke-dasharray="4 3"/>'
            + _text(_LEFT + 4, up(value) - 4, name, "start")
        )
    for i, (name, some) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
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
        parts.append(_text(_WIDTH - _RIGHT + 12, _TOP + 10 + 18 * i, name, "start") + "</g>")
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, answer["x"], "middle"))
    parts.append(_text(_LEFT, _TOP - 12, answer["y"], "start") + "</svg>")
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
