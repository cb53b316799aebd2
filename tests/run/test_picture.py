"""The picture of a run: what stands in it, and what does not."""

import matplotlib
import pytest

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from dpfl_jax.run.report import draw, plot_curves


def words(figure):
    return [t.get_text() for t in figure.findobj(plt.Text) if t.get_text()]


def lines(figure):
    return {tuple(line.get_ydata()) for line in figure.axes[0].get_lines()}


@pytest.fixture
def run():
    def row(step):
        return {"step": step, "epsilon_spent": 2.0 * step, "outside_guarantee": {"train_loss": 9.0}}

    losses = [(0, 5.25), (2, 4.5), (4, 4.125)]
    metrics = [row(step) for step in range(1, 5)]
    metrics += [{"step": step, "eval": {"loss": loss}} for step, loss in losses]
    report = {
        "name": "plays",
        "status": "finished",
        "steps": 4,
        "planned_steps": 4,
        "privacy": {"unit": "user", "epsilon": 8.0},
        "data": {"users": 1234},
        "outside_guarantee": {},
    }
    return metrics, report


def test_what_was_held_out_and_what_was_spent_are_drawn_with_their_last_values(run):
    figure = draw(*run)
    said = words(figure)
    assert "4.12  with privacy" in said
    assert "5.25  before" in said
    assert "8 in the end" in said
    assert any("1,234 people" in text for text in said)
    assert (5.25, 4.5, 4.125) in lines(figure)
    # What is computed from the people themselves is not.
    assert not any(9.0 in line for line in lines(figure))
    plt.close(figure)


def test_a_run_without_privacy_is_a_line_that_says_so(run):
    metrics, report = run
    beside = [{"step": 0, "loss": 5.25}, {"step": 4, "loss": 3.75}]
    figure = draw(metrics, report | {"outside_guarantee": {"without_privacy": beside}})
    assert (5.25, 3.75) in lines(figure)
    assert "3.75  without privacy\n(comparison only)" in words(figure)
    plt.close(figure)


def test_a_choice_among_steps_is_shown_with_what_it_costs(run):
    metrics, report = run
    stopped = {"best_step": 2, "planned_steps": 6, "privacy": {"unit": "user", "epsilon": 11.0}}
    figure = draw(metrics, report | stopped)
    assert "stated: 11, of all 6 planned steps" in words(figure)
    assert "dashed: the best checkpoint, 2" in figure.axes[0].get_xlabel()
    assert figure.axes[1].get_ylim()[1] > 11
    plt.close(figure)


def test_without_held_out_people_the_training_loss_is_marked(run):
    metrics, report = run
    figure = draw([row for row in metrics if "eval" not in row], report)
    assert (9.0,) * 4 in lines(figure)
    assert "training loss (not to be published)" in words(figure)
    plt.close(figure)


def test_where_nothing_tells_of_a_loss_no_empty_axis_is_drawn(run):
    metrics, report = run
    rows = [row for row in metrics if "eval" not in row]
    for row in rows:
        row["outside_guarantee"] = {"train_loss": None}
    figure = draw(rows, report)
    assert [axis.get_title() for axis in figure.axes] == ["privacy spent: epsilon, at most"]
    plt.close(figure)


def test_samples_are_shown_as_they_are(run):
    metrics, report = run
    texts = {"before": "$x_1 = \\frac$\x07", "after": "My lord,\n" + "word " * 500}
    figure = draw(metrics, report | {"samples": texts})
    figure.canvas.draw()  # a formula that is none would stop it
    said = words(figure)
    assert "$x_1 = \\frac$" in said
    shown = next(text for text in said if text.startswith("My lord,\nword"))
    assert len(shown) < 700  # it has to be read in passing
    plt.close(figure)


def test_the_picture_of_a_run_leaves_a_notebook_its_backend(run, tmp_path):
    matplotlib.use("svg")
    try:
        plot_curves(tmp_path / "curves.png", *run)
        assert matplotlib.get_backend() == "svg"
        assert plt.get_fignums() == []
    finally:
        matplotlib.use("Agg")
    assert (tmp_path / "curves.png").stat().st_size > 1000
