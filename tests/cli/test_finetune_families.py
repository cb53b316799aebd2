"""Every family is trained, with adapters and whole, and then opened by ``transformers``."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from hf_families import FAMILIES, saved_by_transformers, torch_logits

from dpfl_jax.cli.main import main
from dpfl_jax.models import LanguageModel
from dpfl_jax.models.checkpoint import load_checkpoint, read_config

TINY = (
    "gpt2", "llama_tied_scaled", "mistral", "qwen2", "qwen3_tied", "qwen3moe_tied",
    "phi3_window", "gemma", "gemma2_window", "gemma3", "vaultgemma",
)  # fmt: skip
assert set(TINY) <= set(FAMILIES)
ADAPTERS = {"rank": 2, "alpha": 4.0, "targets": ["*/attention/*", "*/mlp/*"]}


def write_tokenizer(path):
    import tokenizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(97 + i): i + 3 for i in range(20)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))


@pytest.mark.nightly
@pytest.mark.slow("gpt2-lora")
@pytest.mark.parametrize("trained", ["lora", "all"])
@pytest.mark.parametrize("name", TINY)
def test_a_family_is_trained_exported_and_opened(name, trained, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    saved_by_transformers(name, tmp_path / "base")
    write_tokenizer(tmp_path / "base" / "tokenizer.json")
    rng = np.random.default_rng(0)
    posts = [
        json.dumps({"user": f"u{i // 2}", "text": " ".join(chr(97 + t) for t in tokens)})
        for i, tokens in enumerate(rng.integers(0, 20, (60, 20)))
    ]
    (tmp_path / "posts.jsonl").write_text("\n".join(posts))
    config = {
        "name": "family",
        "seed": 1,
        "data": {
            "source": "jsonl",
            "path": str(tmp_path / "posts.jsonl"),
            "seq_len": 20,  # beyond the windows
            "tokenizer": "checkpoint",
            "validation_fraction": 0.2,
            "test_fraction": 0.0,
        },
        "model": {
            "checkpoint": str(tmp_path / "base"),
            "overrides": {"remat": "none"},
            **({"lora": ADAPTERS} if trained == "lora" else {}),
        },
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8, "clip_norm": 0.5},
        "privacy": {"epsilon": 8.0, "delta": 1e-2},
        "optimizer": {"name": "adam", "learning_rate": 0.01},
        "train": {"steps": 2},
        "execution": {"microbatch_size": 8},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run, exported = str(tmp_path / "run"), str(tmp_path / "exported")
    assert main(["train", str(tmp_path / "config.yaml"), "--run-dir", run, "--json"]) == 0
    assert main(["export", run, exported, "--json"]) == 0
    capsys.readouterr()

    tokens = rng.integers(3, 23, 20)
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        exported, attn_implementation="eager"
    ).eval()
    theirs = torch_logits(opened, tokens)
    config = dataclasses.replace(read_config(exported), bos_id=int(tokens[0]))
    model = LanguageModel(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def ours(path):
        params = load_checkpoint(path, config, shapes)
        return jax.jit(model.logits)(params, jnp.asarray([*tokens[1:], 0], jnp.int32))

    np.testing.assert_allclose(ours(exported), theirs, atol=2e-4)
    assert np.abs(ours(exported) - ours(tmp_path / "base")).max() > 1e-3  # it was trained
