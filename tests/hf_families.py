"""Tiny models of every family that checkpoints are read of, made by ``transformers`` itself."""

import pytest

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA = LLAMA | {"head_dim": 16, "num_key_value_heads": 1, "num_attention_heads": 4}
MOE = LLAMA | {
    "head_dim": 8,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
# Large weights, so that an error in any of them shows in the logits.
FAMILIES = {
    "gpt2": {
        "vocab_size": 61,
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt2_untied": {
        "vocab_size": 61,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 50,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    "llama": LLAMA,
    "llama_tied_scaled": LLAMA | {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "llama_linear_biases": LLAMA
    | {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    },
    "gemma": GEMMA,
    "gemma2": GEMMA
    | {
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 64,
    },
    "gemma2_window": GEMMA | {"sliding_window": 9, "attn_logit_softcapping": 2.0},
    "gemma3": GEMMA
    | {
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "rope_parameters": GEMMA3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "vaultgemma": GEMMA | {"sliding_window": 9, "attn_logit_softcapping": 2.0},
    "mistral": LLAMA | {"sliding_window": 9, "head_dim": 6},
    "mistral_whole": LLAMA | {"sliding_window": None, "tie_word_embeddings": True},
    "qwen2": LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2_tied": LLAMA | {"tie_word_embeddings": True},
    "qwen3": LLAMA | {"head_dim": 8},
    "qwen3_tied": LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3moe": MOE,
    "qwen3moe_tied": MOE | {"norm_topk_prob": True, "tie_word_embeddings": True},
    "phi3": LLAMA | {"pad_token_id": 0},
    "phi3_window": LLAMA | {"pad_token_id": 0, "sliding_window": 9},
}


def saved_by_transformers(name, path, **options):
    """A randomly initialised model of a family, saved by ``transformers``."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config_class, model_class = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "vaultgemma": (transformers.VaultGemmaConfig, transformers.VaultGemmaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    }[name.split("_")[0]]
    torch.manual_seed(0)
    model = model_class(config_class(**FAMILIES[name], attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(path, **options)
    return model


def torch_logits(model, tokens):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].numpy()
