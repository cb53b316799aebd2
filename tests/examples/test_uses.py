"""The scripts of examples/ run, on small sizes, and end with what they promise."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "examples"
NOT_A_USE = {"pretrain_quickstart.py"}  # makes what the package comes with


def example(name):
    return importlib.import_module(f"examples.{name}")


def test_each_is_read_in_one_sitting():
    uses = [path for path in FOLDER.glob("*.py") if path.name not in NOT_A_USE]
    assert len(uses) >= 7
    assert {
        p.name: len(p.read_text().splitlines()) for p in uses if len(p.open().readlines()) > 60
    } == {}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", ["nnx_model", "equinox_model"])
def test_a_module_is_trained(name, capsys):
    module = example(name)
    result = module.main(count=100, steps=8)
    assert "differential privacy for each user" in capsys.readouterr().out
    assert result.guarantee.epsilon <= 4.0
    given = np.ones(8 if name == "nnx_model" else 6, np.float32)
    assert np.isfinite(np.asarray(result.params(given))).all()


@pytest.mark.slow
@pytest.mark.ci
def test_only_the_last_layer_of_the_equinox_model_moved():
    import equinox as eqx
    import jax

    result = example("equinox_model").main(count=100, steps=2)
    start = eqx.nn.MLP(6, 1, width_size=64, depth=1, key=jax.random.key(0))
    first, last = zip(*((m.layers[0].weight, m.layers[1].weight) for m in (start, result.params)))
    np.testing.assert_array_equal(*first)
    assert np.abs(np.asarray(last[0] - last[1])).max() > 0


@pytest.mark.slow
@pytest.mark.ci
def test_a_frame_of_posts(tmp_path):
    import pandas as pd

    module = example("pandas_posts")
    path = tmp_path / "posts.csv"
    module.invented(60).to_csv(path, index=False)
    result = module.main(pd.read_csv(path), "author", "body", steps=2)
    assert result.guarantee.epsilon <= 8.0
    assert result.guarantee.unit == "user"


@pytest.mark.slow
@pytest.mark.ci
def test_hospitals_learn_the_line_and_say_what_a_patient_spent(capsys):
    module = example("federated_table")
    result = module.main()
    np.testing.assert_allclose(result.params["w"], module.SLOPE, atol=0.2)
    epsilon = float(re.search(r"epsilon of a patient: ([\d.]+)", capsys.readouterr().out)[1])
    assert 7.9 < epsilon <= 8.0


@pytest.mark.slow
@pytest.mark.ci
def test_the_planner_prices_every_option(capsys):
    plan = example("plan_a_run").main()
    assert plan.best.noise == min(option.noise for option in plan.options)
    assert {option.kind for option in plan.options} == {"els", "uls"}
    assert "LS(" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ci
def test_two_processes_end_with_the_same_parameters():
    found = subprocess.run(
        [sys.executable, "examples/many_processes.py"],
        cwd=FOLDER.parent,
        env=os.environ | {"PYTHONPATH": str(FOLDER.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    said = re.findall(r"process (\d) of 2, 4 devices: (\[.*\])", found.stdout)
    assert sorted(process for process, _ in said) == ["0", "1"]
    assert said[0][1] == said[1][1]
    assert any(abs(w) > 0.1 for w in eval(said[0][1]))
