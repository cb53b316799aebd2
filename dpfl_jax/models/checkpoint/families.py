"""The families of checkpoints: their configuration as ours, and the names of their tensors.

A tensor of the checkpoint holds one of our parameters of one block, perhaps transposed, or several
of them side by side (GPT-2's queries, keys and values).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one of our parameters (of one block) is found.

    Attributes:
      name: of the checkpoint's tensor, ``{}`` for the block's number.
      transposed: its axes are in the other order.
      part: (i, n): it holds n parameters side by side along our last axis; ours is number i.
    """

    name: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)


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


def _gpt2_block() -> dict[str, Tensor]:
    found = {}
    for i, name in enumerate(("query", "key", "value")):
        for kind, theirs in (("kernel", "weight"), ("bias", "bias")):
            found[f"attention/{name}/{kind}"] = Tensor(f"h.{{}}.attn.c_attn.{theirs}", part=(i, 3))
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
        Family("llama", "LlamaForCausalLM", "model.", _LLAMA_TOP, _LLAMA_BLOCK | _LLAMA_NORMS),
        Family("gemma", "GemmaForCausalLM", "model.", _LLAMA_TOP, _LLAMA_BLOCK | _LLAMA_NORMS),
        Family("gemma2", "Gemma2ForCausalLM", "model.", _LLAMA_TOP, _LLAMA_BLOCK | _GEMMA2_NORMS),
    )
}


def family_of(config: TransformerConfig) -> Family:
    """The family that a model of this shape belongs to.

    Raises:
      BadInputError: none.
    """
    signature = (
        config.norm,
        config.positions,
        config.activation,
        config.norm_plus_one and config.scale_embeddings,
        config.post_norms,
    )
    known = {
        ("layer", "learned", "gelu", False, False): "gpt2",
        ("rms", "rotary", "swiglu", False, False): "llama",
        ("rms", "rotary", "geglu", True, False): "gemma",
        ("rms", "rotary", "geglu", True, True): "gemma2",
    }
    name = known.get(signature)
    plain_norms = config.norm_plus_one == config.scale_embeddings
    capped = config.attention_softcap is not None or config.logit_softcap is not None
    fits = name is not None and plain_norms
    if name == "gpt2":
        fits = fits and config.use_bias and config.kv_heads == config.num_heads
        fits = fits and config.width * config.num_heads == config.embed_dim
    if name is not None and name != "gemma2":
        fits = fits and not capped and config.query_scale is None
    if name in ("gemma", "gemma2"):
        fits = fits and not config.use_bias
    if name is None or not fits:
        raise BadInputError(
            f"a model with norm {config.norm}, positions {config.positions}, activation "
            f"{config.activation} and biases {config.use_bias} belongs to none of the families "
            f"{', '.join(FAMILIES)}, so it has no place in their layout"
        )
    return FAMILIES[name]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our parameters (of one block) and its tensor.

    Attributes:
      path: our parameter, e.g. ``blocks/mlp/up/kernel``.
      row: of the stack, or None.
      tensor: with its full name.
    """

    path: str
    row: int | None
    tensor: Tensor


def entries(
    config: TransformerConfig, family: Family, ours: set[str], prefix: str
) -> Iterator[Entry]:
    """Every parameter of a model, with the tensor that holds it.

    Args:
      config: the model's shape.
      family: what it belongs to.
      ours: paths of the model's parameters.
      prefix: the family's, or nothing.
    """
    for path, tensor in family.top.items():
        if path in ours:
            yield Entry(path, None, dataclasses.replace(tensor, name=prefix + tensor.name))
    if "head" in ours:
        yield Entry("head", None, Tensor(family.head, transposed=True))
    for block in range(config.num_layers):
        where, row = config.place_of_block(block)
        for path, tensor in family.block.items():
            if f"{where}/{path}" in ours:
                name = prefix + tensor.name.format(block)
                yield Entry(f"{where}/{path}", row, dataclasses.replace(tensor, name=name))


def full_shape(entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an entry's tensor, from that of our (perhaps stacked) parameter."""
    own = shape[1:] if entry.row is not None else shape
    own = (*own[:-1], own[-1] * entry.tensor.part[1])
    return own[::-1] if entry.tensor.transposed else own
