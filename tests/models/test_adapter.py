"""Adapters alone, in the layout of ``peft``: what its formula makes of them is what we compute."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_families import torch_logits
from safetensors.numpy import load_file

from dpfl_jax.errors import BadInputError
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.checkpoint import save_adapter, save_checkpoint
from dpfl_jax.models.config import Lora
from dpfl_jax.models.params import merge, without_adapters

GPT2 = {"norm": "layer", "norm_eps": 1e-5, "positions": "learned", "use_bias": True}
LLAMA = {"activation": "swiglu", "num_kv_heads": 2, "tie_embeddings": False}
GEMMA3 = {"activation": "geglu", "norm_plus_one": True, "scale_embeddings": True}
GEMMA3 |= {"post_norms": True, "head_norms": True, "head_dim": 16, "query_scale": 0.25}
GEMMA3 |= {"sliding_window": 9, "global_every": 2, "local_rope_theta": 1e4, "num_kv_heads": 1}
EXPERTS = LLAMA | {"head_norms": True, "mlp_dim": 16, "num_experts": 4, "experts_per_token": 2}
EVERYWHERE = ("*/attention/*", "*/mlp/*")
CASES = {
    "gpt2": (GPT2, EVERYWHERE),
    "gpt2 without keys": (GPT2, ("*/query", "*/value", "*/mlp/down")),
    "gpt2 one c_proj": (GPT2, ("*/attention/out",)),
    "llama": (LLAMA, EVERYWHERE),
    "llama some blocks": ({**LLAMA, "scan_layers": False}, ("block_1/*", "*/query")),
    "llama last layers": ({**LLAMA, "last_layers": 1}, ("last_blocks/mlp/*", "*/attention/out")),
    "gemma3": (GEMMA3, EVERYWHERE),
    "experts": (EXPERTS, EVERYWHERE),
    "experts' router alone": (EXPERTS, ("*/mlp/router",)),
}


def written(case, folder, rank=3, alpha=7.0):
    """A base and adapters beside it, with (model, parameters)."""
    fields, targets = CASES[case]
    config = TransformerConfig(
        **{"vocab_size": 61, "max_seq_len": 32, "embed_dim": 24, "num_layers": 3, "num_heads": 4},
        lora=Lora(rank=rank, alpha=alpha, targets=targets),
        remat="none",
        **fields,
    )
    model, rng = LanguageModel(config), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(np.float32), shapes)
    save_checkpoint(folder / "base", config, without_adapters(params))
    save_adapter(folder / "adapter", model, params, base=str(folder / "base"))
    return model, params


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_scaling_are_those_of_peft(case, tmp_path):
    """W + alpha / r x B A (Hu et al. 2021), by peft's names, is what we merge."""
    model, params = written(case, tmp_path)
    save_checkpoint(tmp_path / "merged", model.config, merge(params, model.config.lora))
    base, merged = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "merged"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    for name in changed:
        module = name.removesuffix(".weight")
        told = [t for t in config["target_modules"] if module == t or module.endswith(f".{t}")]
        assert len(told) == 1, module
        a, b = (adapter.pop(f"base_model.model.{module}.lora_{x}.weight") for x in "AB")
        rank = config["rank_pattern"].get(told[0], config["r"])
        assert a.shape[0] == b.shape[1] == rank
        scale = config["alpha_pattern"].get(told[0], config["lora_alpha"]) / rank
        product = scale * (b @ a)
        product = product.T if config["fan_in_fan_out"] else product
        np.testing.assert_allclose(base[name] + product, merged[name], atol=1e-5)
    assert changed
    assert not adapter
    untouched = [n.removesuffix(".weight") for n in set(base) - changed]
    assert not any(n.endswith(f".{t}") for n in untouched for t in config["target_modules"])


@pytest.mark.parametrize("case", CASES)
def test_peft_opens_them_and_gives_the_same_logits(case, tmp_path):
    peft = pytest.importorskip("peft", reason="the group huggingface is not installed")
    transformers = pytest.importorskip("transformers")
    model, params = written(case, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    tokens = np.array([1, *np.random.default_rng(1).integers(3, 61, 19)])  # 1: begins a sequence
    before = torch_logits(base.eval(), tokens)
    theirs = torch_logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), tokens)
    ours = jax.jit(model.logits)(params, jnp.asarray([*tokens[1:], 0], jnp.int32))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(theirs - before).max() > 0.1


@pytest.mark.parametrize("some", ["up", "down", "[gu]*"])
def test_adapters_of_a_part_of_an_expert_are_refused(some, tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "part", (EXPERTS, ("*/attention/*", f"*/mlp/{some}")))
    with pytest.raises(BadInputError, match="only where gate, up and down all have one"):
        written("part", tmp_path)
    assert not (tmp_path / "adapter").exists()


def test_a_model_without_adapters_has_none_to_write(tmp_path):
    written("gpt2", tmp_path)
    plain = LanguageModel(TransformerConfig(vocab_size=61, **GPT2))
    with pytest.raises(BadInputError, match="has no adapters"):
        save_adapter(tmp_path / "none", plain, {}, base=str(tmp_path / "base"))
    assert not (tmp_path / "none").exists()
