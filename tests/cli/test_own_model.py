"""``model.module``: a model of the user's own package, trained from a configuration."""

import json
import textwrap

import numpy as np
import pytest
import yaml
from runs import death_after_a_checkpoint

from dpfl_jax.cli.main import main

MODELS = textwrap.dedent("""
    import equinox
    import flax.linen as linen
    import haiku
    import jax
    import jax.numpy as jnp
    from flax import nnx


    class Net(nnx.Module):
        def __init__(self, inputs, outputs, rngs):
            self.out = nnx.Linear(inputs, outputs, rngs=rngs)

        def __call__(self, x):
            return self.out(x)


    def with_nnx(task, key):
        return Net(task.input_shape[0], task.classes or 1, nnx.Rngs(key))


    def with_equinox(task, key):
        return equinox.nn.Linear(task.input_shape[0], task.classes, key=key)


    def with_linen(task, key):
        net = linen.Dense(task.classes)
        return net, net.init(key, jnp.zeros(task.input_shape))


    def with_haiku(task, key):
        net = haiku.without_apply_rng(haiku.transform(lambda x: haiku.Linear(task.classes)(x)))
        return net, net.init(key, jnp.zeros(task.input_shape))


    def with_loss(task, key, scale=1.0):
        def loss(params, example):
            logits = scale * (example["x"] @ params["w"] + params["b"])
            return -jax.nn.log_softmax(logits)[example["label"]]

        return loss, {"w": jnp.zeros((3, task.classes)), "b": jnp.zeros(task.classes)}


    class Reader(nnx.Module):
        def __init__(self, task, rngs):
            self.embed = nnx.Embed(task.vocab_size, 8, rngs=rngs)
            self.out = nnx.Linear(8, task.vocab_size, rngs=rngs)

        def __call__(self, tokens):
            return self.out(self.embed(tokens))


    def reader(task, key):
        return Reader(task, nnx.Rngs(key))


    def too_few(task):
        return {}


    def nothing(task, key):
        return {"w": jnp.zeros(3)}


    def fails(task, key):
        raise RuntimeError("no weights\\nhere")


    def of_batches(task, key):
        return lambda params, batch: (batch["x"][:, 0] * params["w"]).mean(), {"w": jnp.ones(())}
    """)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where `dpfl` is started: the user's module, a table of 60 people and their posts."""
    for name in ("equinox", "haiku"):
        pytest.importorskip(name)
    (tmp_path / "my_models.py").write_text(MODELS)
    rng = np.random.default_rng(0)
    rows, posts = ["user,a,b,c,label"], []
    for i in range(180):
        a, b, c = rng.normal(size=3)
        rows.append(f"u{i // 3},{a},{b},{c},{int(a + b > 0)}")
        posts.append(json.dumps({"user": f"u{i // 3}", "text": "stone lamp " * 3}))
    (tmp_path / "visits.csv").write_text("\n".join(rows))
    (tmp_path / "posts.jsonl").write_text("\n".join(posts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configuration(folder, model, **changes):
    config = {
        "seed": 1,
        "data": {
            "source": "csv",
            "path": str(folder / "visits.csv"),
            "target_column": "label",
            "classes": 2,
            "validation_fraction": 0.2,
        },
        "model": model,
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "optimizer": {"name": "sgd", "learning_rate": 0.5},
        "train": {"steps": 6, "checkpoint_every": 2},
    } | changes
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def run(capsys, *args):
    code = main([*(str(a) for a in args), "--allow-code"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if code == 0 else " ".join(err.split())


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["nnx", "equinox", "linen", "haiku", "loss"])
def test_every_library_is_built_and_trained(name, folder, capsys):
    file = configuration(folder, {"module": f"my_models:with_{name}"})
    code, report = run(capsys, "train", file, "--run-dir", folder / "run", "--json")
    assert code == 0, report
    place = f"my_models:with_{name}"
    assert report["model"] == {"module": place, "parameters": 8, "trained": 8}
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    before, after = (report["eval"][when] for when in ("initial", "final"))
    assert after["loss"] < before["loss"]
    assert (after["accuracy"] is None) == (name == "loss")
    if name == "loss":  # it begins with zeros
        assert before["loss"] == pytest.approx(np.log(2))


@pytest.mark.nightly
def test_numbers(folder, capsys):
    data = {"source": "csv", "path": "visits.csv", "target_column": "label"}
    file = configuration(folder, {"module": "my_models:with_nnx"}, data=data)
    code, report = run(capsys, "train", file, "--run-dir", folder / "run", "--json")
    assert (code, report["model"]["parameters"]) == (0, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["els", "none"])
def test_tokens_and_some_of_the_parameters(kind, folder, capsys):
    private = kind == "els"
    file = configuration(
        folder,
        {"module": "my_models:reader", "trainable": ["out/*"]},
        data={"source": "jsonl", "path": "posts.jsonl", "seq_len": 16},
        mechanism={"kind": kind, "batch_size": 8} | ({"group_size": 2} if private else {}),
        privacy={"epsilon": 8.0, "delta": 1e-3} if private else {},
    )
    code, report = run(capsys, "train", file, "--run-dir", folder / "run", "--json")
    assert code == 0, report
    assert report["model"]["parameters"] == 259 * 8 + 9 * 259
    assert report["model"]["trained"] == 9 * 259
    assert report["eval"]["final"]["perplexity"] < report["eval"]["initial"]["perplexity"]


@pytest.mark.nightly
def test_a_run_goes_on_only_with_its_own_model(folder, capsys, monkeypatch):
    file = configuration(folder, {"module": "my_models:with_loss"})
    command = ["train", file, "--run-dir", folder / "run", "--json"]
    whole = run(capsys, *command[:3], folder / "whole", "--json")[1]
    with death_after_a_checkpoint(monkeypatch):
        run(capsys, *command)
    # Another function, other options: another configuration.
    for change in ("model.module=my_models:with_nnx", "model.options.scale=2.0"):
        code, said = run(capsys, *command, change)
        assert (code, "belongs to another configuration" in said) == (2, True), said
    # The same name, but the function has been changed.
    import my_models

    kept = my_models.with_loss
    monkeypatch.setattr(my_models, "with_loss", lambda task, key: kept(task, key, 2.0))
    code, said = run(capsys, *command)
    assert code == 2
    assert "the loss, the set of trained parameters or the optimiser is not what" in said
    monkeypatch.setattr(my_models, "with_loss", kept)
    code, report = run(capsys, *command)
    assert (code, report["eval"]) == (0, whole["eval"])


MISTAKES = {
    "my_models": "model.module is 'my_models': write package.module:NAME",
    "my_modelz:build": "model.module is 'my_modelz:build', which cannot be used: No module named",
    "my_models:build": "has no attribute 'build'",
    "my_models:too_few": "my_models:too_few is called as build(task, key, **model.options), which",
    "my_models:nothing": "it returns dict: return an NNX or Equinox module, or a pair",
    "my_models:fails": "model.module=my_models:fails: RuntimeError: no weights here",
    "my_models:of_batches": "the loss takes a batch of examples",
    "my_models:reader": "model.module=my_models:reader: ",
}


@pytest.mark.parametrize("place", MISTAKES)
def test_mistakes_are_one_sentence(place, folder, capsys):
    file = configuration(folder, {"module": place})
    code, said = run(capsys, "train", file, "--run-dir", folder / "run")
    assert code == 2
    assert MISTAKES[place] in said
    assert said.count("dpfl: error:") == 1
    assert not (folder / "run").exists()


def test_what_does_not_go_together(folder, capsys):
    for model, message in {
        "{module: a:b, kind: mlp}": "both model.kind and model.module are set",
        "{module: a:b, size: 1m}": "model.size does not go with model.module=a:b",
        "{module: a:b, trainable: lora}": "model.trainable=lora is for model.kind=transformer",
    }.items():
        code, said = run(capsys, "train", configuration(folder, {}), f"model={model}")
        assert (code, message in said) == (2, True), said
    pretrain = {"steps": 2}
    file = configuration(folder, {"module": "a:b"}, pretrain=pretrain)
    code, said = run(capsys, "train", file)
    assert "pretrain is for model.kind=transformer, not model.module=a:b" in said
