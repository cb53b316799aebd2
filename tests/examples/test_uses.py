"""The scripts of examples/ run, on small sizes, and end with what they promise."""

import importlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import types

import numpy as np
import pytest

import dpfl_jax as dpfl

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


def test_an_export_is_scored_on_tasks(tmp_path, monkeypatch, capsys):
    def simple_evaluate(model, model_args, tasks, limit):
        assert (model, model_args, limit) == ("hf", f"pretrained={tmp_path}", 5)
        numbers = {"acc,none": 0.5, "alias": "the task"}
        return {"results": dict.fromkeys(tasks, numbers)}

    harness = types.SimpleNamespace(simple_evaluate=simple_evaluate)
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    privacy = {"epsilon": 2.0, "delta": 1e-6, "unit": "user", "accountant": "PLD"}
    (tmp_path / "guarantee.json").write_text(json.dumps({"privacy": privacy}))
    example("evaluate_on_tasks").main([str(tmp_path), "--tasks", "one", "--limit", "5"])
    privacy.pop("accountant")
    assert json.loads(capsys.readouterr().out) == {
        "privacy": privacy,
        "tasks": {"one": {"acc,none": 0.5}},
    }


@pytest.mark.slow
@pytest.mark.nightly("nnx_model")
@pytest.mark.parametrize("name", ["nnx_model", "equinox_model"])
def test_a_module_is_trained(name, capsys):
    module = example(name)
    result = module.main(count=100, steps=8)
    assert "differential privacy for each user" in capsys.readouterr().out
    assert result.guarantee.epsilon <= 4.0
    given = np.ones(8 if name == "nnx_model" else 6, np.float32)
    assert np.isfinite(np.asarray(result.params(given))).all()


@pytest.mark.nightly
def test_only_the_last_layer_of_the_equinox_model_moved():
    import equinox as eqx
    import jax

    result = example("equinox_model").main(count=100, steps=2)
    start = eqx.nn.MLP(6, 1, width_size=64, depth=1, key=jax.random.key(0))
    first, last = zip(*((m.layers[0].weight, m.layers[1].weight) for m in (start, result.params)))
    np.testing.assert_array_equal(*first)
    assert np.abs(np.asarray(last[0] - last[1])).max() > 0


@pytest.mark.nightly
def test_a_frame_of_posts(tmp_path):
    import pandas as pd

    module = example("pandas_posts")
    path = tmp_path / "posts.csv"
    module.invented(60).to_csv(path, index=False)
    result = module.main(pd.read_csv(path), "author", "body", steps=2)
    assert result.guarantee.epsilon <= 8.0
    assert result.guarantee.unit == "user"


@pytest.mark.nightly
def test_sentences_that_may_be_shared(tmp_path):
    example("synthetic_sentences").main(str(tmp_path / "out"), rows=20, steps=2, people=16)
    rows = (tmp_path / "out" / "synthetic" / "rows.jsonl").read_text().splitlines()
    assert len(rows) == 20
    assert all(json.loads(row)["mark"] in ("?", ".") for row in rows)
    assert "A classifier of kind" in next((tmp_path / "out" / "report").glob("*.md")).read_text()


@pytest.mark.nightly
def test_hospitals_learn_the_line_and_say_what_a_patient_spent(capsys):
    module = example("federated_table")
    result = module.main()
    np.testing.assert_allclose(result.params["w"], module.SLOPE, atol=0.2)
    epsilon = float(re.search(r"epsilon of a patient: ([\d.]+)", capsys.readouterr().out)[1])
    assert 7.9 < epsilon <= 8.0


@pytest.mark.nightly
def test_an_audit_proves_much_and_no_more_than_is_promised(capsys):
    # With a key of its own each time, one run in some twenty proves less than 1.
    key = dpfl.RootKey.from_seed(1)
    (found,) = example("audit_a_run").main(people=200, steps=8, canaries=800, key=key)
    assert 1.0 < found.proved <= found.claimed <= 4.0
    assert "the promise stands" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_planner_prices_every_option(capsys):
    plan = example("plan_a_run").main()
    assert plan.best.noise == min(option.noise for option in plan.options)
    assert {option.kind for option in plan.options} == {"els", "uls"}
    assert "LS(" in capsys.readouterr().out


@pytest.mark.nightly
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
    said = re.findall(r"process (\d) of 2, 4 devices: (\[[^]]*\])", found.stdout)
    assert sorted(process for process, _ in said) == ["0", "1"]
    assert said[0][1] == said[1][1]
    assert any(abs(w) > 0.1 for w in eval(said[0][1]))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_model_of_tunix_learns_and_writes(family, capsys):
    pytest.importorskip("tunix", reason="the group models is not installed")
    pytest.importorskip("qwix", reason="the group models is not installed")
    from flax import nnx
    from tunix.models.gemma3 import model as gemma3

    module, net = example("tunix_lora"), None
    if family == "gemma3":
        shape = gemma3.ModelConfig(**module.SHAPE, num_embed=259, sliding_window_size=32)
        net = gemma3.Gemma3(shape, rngs=nnx.Rngs(0))
    written = module.main(net, warm_up=60, steps=15)
    assert len(written.text[0]) > 10
    said = re.search(
        r"epsilon 8, .* for each user .* ([\d.]+) -> ([\d.]+)", capsys.readouterr().out
    )
    assert float(said[2]) < float(said[1])


@pytest.mark.nightly
def test_merged_adapters_of_qwix_compute_what_they_did_beside_the_weights():
    pytest.importorskip("tunix", reason="the group models is not installed")
    qwix = pytest.importorskip("qwix", reason="the group models is not installed")
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    module = example("tunix_lora")
    shape = qwen3.ModelConfig(**module.SHAPE, vocab_size=259, rope_theta=10_000, norm_eps=1e-6)
    base = qwen3.Qwen3(shape, rngs=nnx.Rngs(0))
    net = qwix.apply_lora_to_model(base, module.LORA, rngs=nnx.Rngs(1), **base.get_model_input())
    key = jax.random.key(0)
    for path, weight in nnx.to_flat_state(nnx.state(net)):
        if path[-1].endswith("_lora_b"):
            weight[...] = 0.3 * jax.random.normal(key, weight.shape)
    tokens, at = jnp.arange(3, 23)[None], jnp.arange(20)
    given = (tokens, at[None], None, (at[:, None] >= at)[None])
    before = base(*given)[0]
    beside, merged = net(*given)[0], module.merge(net, base)(*given)[0]
    np.testing.assert_allclose(merged, beside, rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(beside - before)).max() > 0.05


def test_a_federation_without_a_framework(tmp_path, capsys):
    model, guarantee = example("private_client").main(tmp_path, clinics=2)
    assert "has sent the 5 updates of its budget" in capsys.readouterr().out
    assert np.isfinite(model["w"]).all()
    assert guarantee.epsilon <= 8.0


@pytest.mark.nightly
def test_flower_s_quickstart_with_the_mod_is_refused_the_round_beyond_its_budget(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [FOLDER / "flower_quickstart" / "run.sh", tmp_path / "run"],
        env={**os.environ, "PATH": path, "PORT": str(port)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert done.count("aggregate_train: Received 2 results and 0 failures") == 3
    assert done.count("this silo has sent the 3 updates of its budget, and one more would") == 2
    assert done.count("this client answers training alone") == 8
    assert done.count("holds: the mechanism costs no more than stated") == 2


def test_the_quickstart_is_flower_s_but_for_the_mod():
    lines = (FOLDER / "flower_quickstart/quickstart_numpy/client_app.py").read_text().splitlines()
    ours = [line for line in lines if "dpfl_jax" in line]
    assert ours == [
        "import dpfl_jax.flower",
        "app = ClientApp(mods=[dpfl_jax.flower.mod("
        "epsilon=8.0, delta=1e-5, rounds=3, clip_norm=1.0)])",
    ]
