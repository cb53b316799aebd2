"""Answers under the pointer: every point with a cell is a dot that tells it."""

import xml.etree.ElementTree as ElementTree

import pytest

from dpfl_jax.planning import Planner, Sensitivities, UserStatistics
from dpfl_jax.planning.questions import Answer, Scenario, ask

CELL = {"kind": "uls", "group_size": 4, "size": 16, "steps": 100}


def point(x, score, low=None, high=None, cell=CELL):
    return {"x": x, "score": score, "low": low or score, "high": high or score, "cell": cell}


def test_dots_are_where_the_numbers_are_and_say_them():
    nothing = {"x": 4.0, "score": None, "low": None, "high": None, "cell": None}
    found = Answer(
        x="epsilon",
        y="held-out loss",
        series={"a < b": [point(1.0, 4.0, 3.8, 4.2), point(2.0, 3.0), nothing]},
        lines={"before training": 5.0},
        answer="1 < 2",
    )
    page = found._repr_html_()
    root = ElementTree.fromstring(f"<div>{page}</div>")  # well formed, names escaped
    dots = list(root.iter("circle"))
    assert len(dots) == 2
    assert float(dots[0].get("cx")) < float(dots[1].get("cx"))
    # Heights are those of the losses: 5.0, the dashed line, is the top of the axis, 3.0 its end.
    top = next(float(x.get("y1")) for x in root.iter("line") if x.get("stroke-dasharray"))
    first, second = (float(dot.get("cy")) for dot in dots)
    assert first - top == pytest.approx((second - top) / 2, abs=0.11)
    told = dots[0].find("title").text
    assert "4 (3.800 to 4.200)" in told
    assert "ULS G=4, 16 a step, 100 steps" in told
    assert "a < b" in told


def test_an_answer_without_cells_is_its_sentence():
    assert Answer(series={"a": []}, answer="none", lines={})._repr_html_() == "<p>none</p>"


def test_more_compute_and_more_epsilon_never_need_more_noise():
    norms = Sensitivities.assumed(0.25, [4])
    planner = Planner(UserStatistics(256), norms, epsilon=1.0, delta=1e-5, steps=10)
    found = ask("pareto", {"people": Scenario(planner, 640.0)})
    assert found["y"].startswith("noise")
    curves = [[p["score"] for p in points] for points in found["series"].values()]
    assert len(curves) == 3
    for curve in curves:
        assert curve == sorted(curve, reverse=True)
    assert all(a >= b >= c for a, b, c in zip(*curves))
