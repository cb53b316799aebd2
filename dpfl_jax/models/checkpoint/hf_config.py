"""``config.json`` of the Hugging Face layout as a ``TransformerConfig``, and back.

What changes the function that a model computes and is not known here is refused, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.checkpoint.families import FAMILIES, family_of
from dpfl_jax.models.config import RopeScaling, TransformerConfig

Json = Mapping[str, Any]
_GEMMAS = ("gemma", "gemma2", "gemma3_text", "vaultgemma")
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def to_transformer(found: Json, where: str) -> TransformerConfig:
    """The transformer that a config.json describes.

    Args:
      found: content of config.json.
      where: its path, for messages.

    Raises:
      BadInputError: another family, or a setting that this transformer does not have.
    """
    kind = found.get("model_type")
    if kind not in FAMILIES:
        raise BadInputError(
            f"{where} has model_type {kind!r}, but only {', '.join(FAMILIES)} are known"
        )
    fields = _gpt2(found, where) if kind == "gpt2" else _llama_like(kind, found, where)
    bos = found.get("bos_token_id")
    return TransformerConfig(**fields, bos_id=bos if isinstance(bos, int) else None)


def from_transformer(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """A config.json from which ``transformers`` builds the same model.

    Args:
      config: the model.
      dtype: of the tensors beside it.

    Raises:
      BadInputError: the model belongs to no family.
    """
    family = family_of(config)
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_id,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
    }
    if family.model_type == "gpt2":
        return common | {
            "n_positions": config.max_seq_len,
            "n_embd": config.embed_dim,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.hidden,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.norm_eps,
            "eos_token_id": None,  # else it would be GPT-2's own
        }
    written = common | {
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.width,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.use_bias,
        "hidden_act": "gelu_pytorch_tanh" if config.activation == "geglu" else "silu",
        "rope_scaling": _scaling_json(config),
    }
    kind = family.model_type
    if kind == "llama":
        return written | {"mlp_bias": config.use_bias}
    if kind == "mistral":
        return written | {"sliding_window": config.sliding_window}
    if kind == "qwen3_moe":
        written |= {
            "moe_intermediate_size": config.hidden,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.experts_sum_to_one,
        }
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        return written | {"use_sliding_window": False}
    written["hidden_activation"] = "gelu_pytorch_tanh"
    if kind == "gemma":
        return written
    local = config.local_layers
    if config.sliding_window is None:  # a window that is no shorter than any sequence
        local = dataclasses.replace(config, sliding_window=1, global_every=2).local_layers
    scale = config.width**-0.5 if config.query_scale is None else config.query_scale
    written |= {
        "query_pre_attn_scalar": _plain(round(scale**-2, 6)),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.sliding_window or config.max_seq_len,
        "layer_types": [_LOCAL if near else _GLOBAL for near in local],
    }
    if kind == "gemma3_text":
        written["rope_local_base_freq"] = config.local_rope_theta
    return written


def _gpt2(found: Json, where: str) -> dict[str, Any]:
    _require(found, where, activation_function=("gelu_new", "gelu_pytorch_tanh", None))
    _require(found, where, scale_attn_weights=(True, None))
    _require(found, where, scale_attn_by_inverse_layer_idx=(False, None))
    _require(found, where, add_cross_attention=(False, None))
    size = _int(found, where, "n_embd")
    return {
        "vocab_size": _int(found, where, "vocab_size"),
        "max_seq_len": _int(found, where, "n_positions", "n_ctx"),
        "num_layers": _int(found, where, "n_layer"),
        "embed_dim": size,
        "num_heads": _int(found, where, "n_head"),
        "mlp_dim": found.get("n_inner") or 4 * size,
        "activation": "gelu",
        "norm": "layer",
        "norm_eps": found.get("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "use_bias": True,
        "tie_embeddings": found.get("tie_word_embeddings", True),
    }


def _llama_like(kind: str, found: Json, where: str) -> dict[str, Any]:
    gemma = kind in _GEMMAS
    if gemma:
        _require(found, where, hidden_activation=("gelu_pytorch_tanh", None))
        # Gemma's first files say "gelu" and mean its tanh form.
        _require(found, where, hidden_act=("gelu_pytorch_tanh", "gelu", None))
        _require(found, where, use_bidirectional_attention=(False, None))
    else:
        _require(found, where, hidden_act=("silu", None))
    if kind != "llama":
        _require(found, where, attention_bias=(False, None))
    elif bool(found.get("attention_bias")) != bool(found.get("mlp_bias")):
        raise BadInputError(
            f"{where} has biases in attention or in the MLP but not in both, which is not supported"
        )
    heads, size = _int(found, where, "num_attention_heads"), _int(found, where, "hidden_size")
    rope: dict[str, Any] = {
        **(found.get("rope_scaling") or {}),
        **(found.get("rope_parameters") or {}),
    }
    near: dict[str, Any] = rope.pop("sliding_attention", None) or {}
    rope = {**rope, **(rope.pop("full_attention", None) or {})}
    for given in (rope, found):
        _require(given, where, partial_rotary_factor=(1.0, None))
    _require(near, where, rope_type=("default", None))
    layers, experts = _int(found, where, "num_hidden_layers"), kind == "qwen3_moe"
    width = 256 if gemma else 128 if kind == "qwen3" else size // heads
    fields: dict[str, Any] = {
        "vocab_size": _int(found, where, "vocab_size"),
        "max_seq_len": _int(found, where, "max_position_embeddings"),
        "num_layers": layers,
        "embed_dim": size,
        "num_heads": heads,
        "num_kv_heads": found.get("num_key_value_heads") or heads,
        "head_dim": found.get("head_dim") or width,
        "mlp_dim": _int(found, where, "moe_" * experts + "intermediate_size"),
        "activation": "geglu" if gemma else "swiglu",
        "norm": "rms",
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "positions": "rotary",
        "rope_theta": _number(rope, found, "rope_theta", 1e6 if kind == "gemma3_text" else 1e4),
        "rope_scaling": _scaling(rope, where),
        "use_bias": kind == "llama" and bool(found.get("attention_bias")),
        "qkv_bias": kind == "qwen2",
        "head_norms": kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        "tie_embeddings": found.get("tie_word_embeddings", gemma),
    }
    if experts:
        # Another MLP in some layers, and a loss of routing over a batch, in which one unit's
        # gradient would depend on the others.
        _require(found, where, decoder_sparse_step=(1, None), mlp_only_layers=([], None))
        _require(found, where, output_router_logits=(False, None))
        fields |= {
            "num_experts": _int(found, where, "num_experts", "num_local_experts"),
            "experts_per_token": _int(found, where, "num_experts_per_tok"),
            "experts_sum_to_one": found.get("norm_topk_prob", False),
        }
    if gemma:
        fields |= {"norm_plus_one": True, "scale_embeddings": True}
    fields |= _windows(kind, found, where, layers, fields["max_seq_len"])
    if kind in _GEMMAS[1:]:
        caps = (None, None) if kind == "gemma3_text" else (50.0, 30.0)
        fields |= {
            "post_norms": kind != "vaultgemma",
            "query_scale": float(found.get("query_pre_attn_scalar", 256)) ** -0.5,
            "attention_softcap": found.get("attn_logit_softcapping", caps[0]),
            "logit_softcap": found.get("final_logit_softcapping", caps[1]),
        }
    if kind == "gemma3_text":
        fields["local_rope_theta"] = _number(
            near, {"rope_theta": found.get("rope_local_base_freq")}, "rope_theta", 1e4
        )
    return fields


def _windows(kind: str, found: Json, where: str, layers: int, longest: int) -> dict[str, Any]:
    """Which layers see how far."""
    _require(found, where, use_sliding_window=(False, None))  # Qwen's has another pattern
    window, every = None, None
    if kind in ("mistral", "phi3"):
        window = found.get("sliding_window", 4096 if kind == "mistral" else None)
    elif kind in _GEMMAS[1:]:
        window = found.get("sliding_window", 4096)
        every = 2
        if kind == "gemma3_text":
            every = found.get("sliding_window_pattern") or 6
    types = found.get("layer_types")
    if types is not None:

        def described(every: int | None) -> list[str]:
            return [
                _GLOBAL if window is None or (every and (i + 1) % every == 0) else _LOCAL
                for i in range(layers)
            ]

        stated = types.index(_GLOBAL) + 1 if _GLOBAL in types else None
        fits = [e for e in (every, stated) if described(e) == list(types)]
        if not fits:
            raise BadInputError(
                f"{where} has layer_types {types}, but only a window in all layers but every n-th "
                "is supported"
            )
        every = fits[0]
    if window is not None and window >= longest and kind != "gemma3_text":
        window = None  # as far as any sequence reaches
    return {"sliding_window": window, "global_every": None if window is None else every}


def _scaling(rope: Json, where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RopeScaling(kind="linear", factor=float(rope["factor"]))
        if kind == "llama3":
            return RopeScaling(
                kind="llama3",
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_len=int(rope["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise BadInputError(f"{where}: rope scaling {kind!r} has no {error.args[0]}") from None
    raise BadInputError(f"{where} has rope scaling {kind!r}, but only linear and llama3 are known")


def _scaling_json(config: TransformerConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_len,
    }


def _require(found: Json, where: str, **allowed: tuple[Any, ...]) -> None:
    for name, values in allowed.items():
        if found.get(name) not in values:
            raise BadInputError(
                f"{where} has {name} {found[name]!r}, but only {values[0]!r} is supported"
            )


def _int(found: Json, where: str, *names: str) -> int:
    for name in names:
        if isinstance(found.get(name), int):
            return int(found[name])
    raise BadInputError(f"{where} has no number {names[0]}")


def _plain(value: float) -> float:
    """A whole number as an int, as ``transformers`` wants it."""
    return int(value) if float(value).is_integer() else value


def _number(first: Json, second: Json, name: str, default: float) -> float:
    value = first.get(name, second.get(name))
    return default if value is None else float(value)
