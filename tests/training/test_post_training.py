"""Runs on chats and on preference pairs, from YAML to the exported model."""

import json

import numpy as np
import pytest
import yaml
from runs import final_state

from dpfl_jax.cli.main import main
from dpfl_jax.training.export import load_trained

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SECTIONS = {
    "chat": {"messages_column": "messages"},
    "pairs": {"prompt_column": "prompt", "chosen_column": "chosen", "rejected_column": "rejected"},
}
LLAMA = {"embed_dim": 16, "num_layers": 1, "num_heads": 2, "remat": "none"}
LLAMA |= {"activation": "swiglu", "tie_embeddings": False}
CASES = {
    "chat": ("chat", {}, {"kind": "uls", "group_size": 2, "cohort_size": 20}),
    "dpo, all trained": ("pairs", {"dpo": {}}, {"kind": "els", "group_size": 2, "batch_size": 30}),
    "dpo, adapters": (
        "pairs",
        {"dpo": {"beta": 0.5}, "lora": {"rank": 4}},
        {"kind": "uls", "group_size": 2, "cohort_size": 40},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("people")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(200):
        asked, well, badly = f"q{rng.integers(9)}?", "yes" * 2, "no" * 3
        user = {"role": "user", "content": asked}
        rows.append(
            {
                "user": f"u{number // 2}",
                "messages": [user, {"role": "assistant", "content": well}],
                "prompt": [user],
                "chosen": [{"role": "assistant", "content": well}],
                "rejected": [{"role": "assistant", "content": badly}],
            }
        )
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "template.jinja").write_text(TEMPLATE)
    return path


def configuration(folder, columns, model, mechanism):
    return {
        "seed": 1,
        "data": {
            "source": "jsonl",
            "path": str(folder / "rows.jsonl"),
            "chat_template": str(folder / "template.jinja"),
            "seq_len": 32,
            "validation_fraction": 0.2,
            "test_fraction": 0.0,
            **SECTIONS[columns],
        },
        "model": {
            "overrides": LLAMA,
            **model,
        },
        "mechanism": {"clip_norm": 1.0, **mechanism},
        "privacy": {"noise_multiplier": 0.02},
        "optimizer": {"name": "adam", "learning_rate": 0.02},
        "train": {"steps": 12, "checkpoint_every": 6, "eval_every": 6},
    }


def trained(path, name, config, capsys):
    (path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    run = path / name
    assert main(["train", str(path / f"{name}.yaml"), "--run-dir", str(run)]) == 0, (
        capsys.readouterr()
    )
    return run, json.loads((run / "report.json").read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_a_run_from_yaml(folder, tmp_path, capsys, case):
    columns, model, mechanism = CASES[case]
    run, report = trained(tmp_path, "run", configuration(folder, columns, model, mechanism), capsys)
    first, last = report["eval"]["initial"], report["eval"]["final"]
    assert last["loss"] < first["loss"]
    assert any("chat template is taken as known" in told for told in report["privacy"]["caveats"])
    if columns == "pairs":
        assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
        assert first["accuracy"] == pytest.approx(0.5, abs=0.5)
        assert last["accuracy"] > 0.9
        assert "perplexity" not in last
    else:
        assert last["perplexity"] < first["perplexity"]
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    ended = final_state(run)["params"]
    exported = load_trained(run)
    assert "reference" not in exported.params
    if model.get("lora") is None:
        np.testing.assert_array_equal(exported.params["embedding"], ended["embedding"])


@pytest.mark.nightly
def test_a_store_of_pairs_trains_to_the_same(folder, tmp_path, capsys):
    columns, model, mechanism = CASES["dpo, all trained"]
    config = configuration(folder, columns, model, mechanism)
    _, plain = trained(tmp_path, "plain", config, capsys)
    options = [f"--{n.removesuffix('_column')}-column={c}" for n, c in SECTIONS[columns].items()]
    store = str(tmp_path / "S")
    command = ["data", "build", "--input", str(folder / "rows.jsonl"), "--seq-len", "32", *options]
    command += ["--chat-template", str(folder / "template.jinja"), "--out", store]
    assert main(command) == 0
    config["data"] = {
        "source": "store", "path": store, "seq_len": 32, "validation_fraction": 0.2,
        "test_fraction": 0.0,
    }  # fmt: skip
    _, stored = trained(tmp_path, "stored", config, capsys)
    assert stored["eval"] == plain["eval"]


def test_mistakes_are_one_sentence(folder, tmp_path, capsys):
    def refused(message, columns, **model):
        config = configuration(folder, columns, model, CASES["chat"][2])
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
        assert main(["train", str(tmp_path / "x.yaml"), "--dry-run"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())

    refused("the data are preference pairs: set model.dpo.beta=0.1", "pairs")
    refused("model.dpo learns from preference pairs", "chat", dpo={})
    refused("set model.kind=transformer and model.dpo.beta=0.1", "pairs", kind="mlp", overrides={})
    refused("model.dpo does not go with model.kind=mlp", "pairs", kind="mlp", dpo={}, overrides={})
