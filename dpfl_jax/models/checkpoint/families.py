"""The families of checkpoints: their configuration as ours, and the names of their tensors.

A tensor of the checkpoint holds one of our parameters of one block, perhaps transposed, or several
of them side by side (queries, keys and values of GPT-2 and Phi-3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one of our parameters (of one block) is found.

    Attributes:
      name: of the checkpoint's tensor, ``{}`` for the block's number, and another for the expert's.
      transposed: its axes are in the other order.
      beside: the parameters of the block that it holds side by side along our last axis, ours
        among them; empty: ours alone.
    """

    name: str
    transposed: bool = False
    beside: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
      model_type: as in config.json.
      architecture: class that ``transformers`` opens it with.
      prefix: of all tensors but the head, left out in some checkpoints.
      top: our parameters outside the blocks -> tensors (without prefix).
      block: our parameters in a block -> tensors (without prefix).
      head: the tensor of an untied head.
      buffers: ends of names that are no parameters.
    """

    model_type: str
    architecture: str
    prefix: str
    top: dict[str, Tensor]
    block: dict[str, Tensor]
    head: str = "lm_head.weight"
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)


def _projections(names: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for ours, theirs in names.items():
        found[f"{ours}/kernel"] = Tensor(f"layers.{{}}.{theirs}.weight", transposed=True)
        found[f"{ours}/bias"] = Tensor(f"layers.{{}}.{theirs}.bias")
    return found


_LLAMA_BLOCK = _projections(
    {
        "attention/query": "self_attn.q_proj",
        "attention/key": "self_attn.k_proj",
        "attention/value": "self_attn.v_proj",
        "attention/out": "self_attn.o_proj",
        "mlp/gate": "mlp.gate_proj",
        "mlp/up": "mlp.up_proj",
        "mlp/down": "mlp.down_proj",
    }
)
_EXPERTS = _projections(
    {
        "mlp/router": "mlp.gate",
        **{f"mlp/{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
    }
)
_LLAMA_TOP = {
    "embedding": Tensor("embed_tokens.weight"),
    "final_norm/scale": Tensor("norm.weight"),
}
_LLAMA_NORMS = {
    "norm1/scale": Tensor("layers.{}.input_layernorm.weight"),
    "norm2/scale": Tensor("layers.{}.post_attention_layernorm.weight"),
}
_GEMMA2_NORMS = {
    "norm1/scale": Tensor("layers.{}.input_layernorm.weight"),
    "post_norm1/scale": Tensor("layers.{}.post_attention_layernorm.weight"),
    "norm2/scale": Tensor("layers.{}.pre_feedforward_layernorm.weight"),
    "post_norm2/scale": Tensor("layers.{}.post_feedforward_layernorm.weight"),
}


_HEAD_NORMS = {
    "attention/query_norm/scale": Tensor("layers.{}.self_attn.q_norm.weight"),
    "attention/key_norm/scale": Tensor("layers.{}.self_attn.k_norm.weight"),
}
_VAULT_NORMS = {name: _GEMMA2_NORMS[name] for name in ("norm1/scale", "norm2/scale")}


def _side_by_side(name: str, ours: tuple[str, ...], transposed: bool = False) -> dict[str, Tensor]:
    return {path: Tensor(name, transposed, ours) for path in ours}


def _phi3_block() -> dict[str, Tensor]:
    found = dict(_LLAMA_BLOCK)
    for theirs, ours in (
        ("self_attn.qkv_proj", ("attention/query", "attention/key", "attention/value")),
        ("mlp.gate_up_proj", ("mlp/gate", "mlp/up")),
    ):
        kernels = tuple(f"{name}/kernel" for name in ours)
        found |= _side_by_side(f"layers.{{}}.{theirs}.weight", kernels, transposed=True)
    return found


def _gpt2_block() -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for kind, theirs in (("kernel", "weight"), ("bias", "bias")):
        held = tuple(f"attention/{name}/{kind}" for name in ("query", "key", "value"))
        found |= _side_by_side(f"h.{{}}.attn.c_attn.{theirs}", held)
    plain = {
        "attention/out": "attn.c_proj",
        "mlp/up": "mlp.c_fc",
        "mlp/down": "mlp.c_proj",
    }
    for ours, theirs in plain.items():
        found[f"{ours}/kernel"] = Tensor(f"h.{{}}.{theirs}.weight")
        found[f"{ours}/bias"] = Tensor(f"h.{{}}.{theirs}.bias")
    for ours, theirs in (("norm1", "ln_1"), ("norm2", "ln_2")):
        found[f"{ours}/scale"] = Tensor(f"h.{{}}.{theirs}.weight")
        found[f"{ours}/bias"] = Tensor(f"h.{{}}.{theirs}.bias")
    return found


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            "transformer.",
            {
                "embedding": Tensor("wte.weight"),
                "positions": Tensor("wpe.weight"),
                "final_norm/scale": Tensor("ln_f.weight"),
                "final_norm/bias": Tensor("ln_f.bias"),
            },
            _gpt2_block(),
            buffers=("attn.bias", "attn.masked_bias"),
        ),
        *(
            Family(model_type, f"{name}ForCausalLM", "model.", _LLAMA_TOP, block)
            for model_type, name, block in (
                ("llama", "Llama", _LLAMA_BLOCK | _LLAMA_NORMS),
                ("mistral", "Mistral", _LLAMA_BLOCK | _LLAMA_NORMS),
                ("qwen2", "Qwen2", _LLAMA_BLOCK | _LLAMA_NORMS),
                ("qwen3", "Qwen3", _LLAMA_BLOCK | _LLAMA_NORMS | _HEAD_NORMS),
                (
                    "qwen3_moe",
                    "Qwen3Moe",
                    _LLAMA_BLOCK | _EXPERTS | _LLAMA_NORMS | _HEAD_NORMS,
                ),
                ("phi3", "Phi3", _phi3_block() | _LLAMA_NORMS),
                ("gemma", "Gemma", _LLAMA_BLOCK | _LLAMA_NORMS),
                ("gemma2", "Gemma2", _LLAMA_BLOCK | _GEMMA2_NORMS),
                ("gemma3_text", "Gemma3", _LLAMA_BLOCK | _GEMMA2_NORMS | _HEAD_NORMS),
                ("vaultgemma", "VaultGemma", _LLAMA_BLOCK | _VAULT_NORMS),
            )
        ),
    )
}


def family_of(config: TransformerConfig) -> Family:
    """The family that a model of this shape belongs to.

    A function that several families compute (Mistral without a window is Llama) is written as the
    first of them.

    Raises:
      BadInputError: none.
    """
    c = config
    gemma = c.norm_plus_one and c.scale_embeddings
    kind = (c.norm, c.positions, c.activation, gemma or c.norm_plus_one or c.scale_embeddings)
    capped = c.attention_softcap is not None or c.logit_softcap is not None
    name = None
    if kind == ("layer", "learned", "gelu", False):
        square = c.kv_heads == c.num_heads and c.width * c.num_heads == c.embed_dim
        plain = not (c.post_norms or capped or c.query_scale or c.sliding_window or c.head_norms)
        name = "gpt2" if square and plain and c.use_bias and not c.qkv_bias else None
    elif kind == ("rms", "rotary", "swiglu", False):
        odd = c.post_norms or capped or c.query_scale or c.global_every or c.local_rope_theta
        # Windows and biases of llama's relatives: (biases, those of queries alone, norms, window).
        which = (c.use_bias, c.qkv_bias, c.head_norms, c.sliding_window is not None)
        names = {
            (False, False, False, False): "llama",
            (True, False, False, False): "llama",
            (False, False, False, True): "mistral",
            (False, True, False, False): "qwen2",
            (False, False, True, False): "qwen3",
        }
        name = None if odd else names.get(which)
    elif kind == ("rms", "rotary", "geglu", True) and gemma and not (c.use_bias or c.qkv_bias):
        windowed = c.sliding_window is not None
        if c.head_norms:
            whole = c.post_norms and windowed and c.global_every and c.local_rope_theta
            name = "gemma3_text" if whole else None
        elif c.post_norms or windowed or capped or c.query_scale:
            alternate = not windowed or c.global_every == 2
            fits = alternate and not c.local_rope_theta
            name = ("gemma2" if c.post_norms else "vaultgemma") if fits else None
        else:
            name = "gemma"
    if c.num_experts is not None:
        name = "qwen3_moe" if name == "qwen3" else None
    if name is None:
        raise BadInputError(
            f"a model with norm {config.norm}, positions {config.positions}, activation "
            f"{config.activation}, biases {config.use_bias} and experts {config.num_experts} "
            f"belongs to none of the families {', '.join(FAMILIES)}, so it has no place in their "
            "layout"
        )
    return FAMILIES[name]


def has_family(config: TransformerConfig) -> bool:
    """Whether ``family_of`` finds one."""
    try:
        return bool(family_of(config))
    except BadInputError:
        return False


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our parameters (of one block, of one expert) and its tensor.

    Attributes:
      path: our parameter, e.g. ``blocks/mlp/up/kernel``.
      row: of each stack that it is in, of blocks and of experts; empty for what is whole.
      tensor: with its full name.
      start: where ours begins in it, along our last axis.
      width: of all that it holds, along our last axis.
    """

    path: str
    row: tuple[int, ...]
    tensor: Tensor
    start: int
    width: int


def entries(
    config: TransformerConfig, family: Family, ours: Mapping[str, Any], prefix: str
) -> Iterator[Entry]:
    """Every parameter of a model, with the tensor that holds it.

    Args:
      config: the model's shape.
      family: what it belongs to.
      ours: the model's parameters (arrays or shapes) by path.
      prefix: the family's, or nothing.
    """

    def entry(path: str, row: tuple[int, ...], tensor: Tensor, block: str = "") -> Entry:
        held = [block + name for name in tensor.beside] or [path]
        widths = [ours[name].shape[-1] for name in held]
        return Entry(path, row, tensor, sum(widths[: held.index(path)]), sum(widths))

    for path, tensor in family.top.items():
        if path in ours:
            yield entry(path, (), dataclasses.replace(tensor, name=prefix + tensor.name))
    if "head" in ours:
        yield entry("head", (), Tensor(family.head, transposed=True))
    for block in range(config.num_layers):
        where, row = config.place_of_block(block)
        for path, tensor in family.block.items():
            if f"{where}/{path}" not in ours:
                continue
            of_experts = tensor.name.count("{}") > 1
            for at in np.ndindex(config.num_experts or 0) if of_experts else [()]:
                name = prefix + tensor.name.format(block, *at)
                named = dataclasses.replace(tensor, name=name)
                rows = at if row is None else (row, *at)
                yield entry(f"{where}/{path}", rows, named, f"{where}/")


def full_shape(entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an entry's tensor, from that of our (perhaps stacked) parameter."""
    own = (*shape[len(entry.row) : -1], entry.width)
    return own[::-1] if entry.tensor.transposed else own
