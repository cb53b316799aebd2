"""The families of checkpoints, one row each: keys of config.json, and names of tensors.

An unknown setting that changes the function a model computes is refused, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.config import RopeScaling, TransformerConfig

Json = Mapping[str, Any]
_HEAD = "lm_head"
HEAD = f"{_HEAD}.weight"
_TOP = {"embed_tokens": "embedding", "norm": "final_norm", _HEAD: "head"}
_REQUIRED: Any = object()


def _identity(value: Any) -> Any:
    """Returns the value, as most settings mean the same in config.json."""
    return value


@dataclasses.dataclass(frozen=True)
class Key:
    """Where config.json has one field of ``TransformerConfig``.

    Attributes:
      name: the key.
      default: the value of a missing key, or a function of the file; without a default the file
        must have a whole number.
      older: the key in older files.
      same_as: another key, which must have the same value.
      null: whether null is a value (None) and not the default.
      read: converts the file's value to ours.
      write: converts our value to the file's.
    """

    name: str
    default: Any = _REQUIRED
    older: str = ""
    same_as: str = ""
    null: bool = False
    read: Callable[[Any], Any] = _identity
    write: Callable[[Any], Any] = _identity

    def of(self, content: Json, where: str) -> Any:
        """Our value, from a file's content."""
        name = self.name if self.name in content or not self.older else self.older
        value = content.get(name)
        if self.default is _REQUIRED and not isinstance(value, int):
            raise BadInputError(f"{where} has no number {self.name}")
        if value is None and not (self.null and name in content):
            value = self.default(content) if callable(self.default) else self.default
        if self.same_as and content.get(self.same_as, self.default) != value:
            raise BadInputError(
                f"{where} has {name} {value!r} and {self.same_as} "
                f"{content.get(self.same_as)!r}, but only the same for both is supported"
            )
        try:
            return value if value is None else self.read(value)
        except (TypeError, ValueError, ArithmeticError):
            raise BadInputError(f"{where} has {name} {value!r}, which is not valid") from None


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
      model_type: as in config.json.
      architecture: class that ``transformers`` opens it with.
      block: modules of a block (``{}`` for the number of an expert) -> ours; one may hold several
        of ours side by side along our last axis.
      keys: fields of ``TransformerConfig`` -> where config.json has them.
      implies: fields that all models of the family share.
      requires: keys of config.json -> the supported values, of which the first is written.
      also: keys that are written and not read.
      every: if a file lists no layer types, one of so many layers is global; None: files have no
        list, and all layers are local.
      top: modules outside of blocks -> ours.
      prefix: prefix of all modules but the head; some checkpoints lack it.
      blocks: name before a block's number.
      transposed: whether kernels have the other order of axes (a head always has).
      buffers: endings of names that are not parameters.
    """

    model_type: str
    architecture: str
    block: Mapping[str, str]
    keys: Mapping[str, Key]
    implies: Mapping[str, Any]
    requires: Mapping[str, tuple[Any, ...]]
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    every: int | None = None
    top: Mapping[str, str] = dataclasses.field(default_factory=_TOP.copy)
    prefix: str = "model."
    blocks: str = "layers"
    transposed: bool = True
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)


# ---- what rows are made of ---------------------------------------------------------------------

_ATTENTION = {
    "self_attn.q_proj": "attention/query",
    "self_attn.k_proj": "attention/key",
    "self_attn.v_proj": "attention/value",
    "self_attn.o_proj": "attention/out",
}
_MLP = {"mlp.gate_proj": "mlp/gate", "mlp.up_proj": "mlp/up", "mlp.down_proj": "mlp/down"}
_NORMS = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
_HEAD_NORMS = {"self_attn.q_norm": "attention/query_norm", "self_attn.k_norm": "attention/key_norm"}
_LLAMA = _ATTENTION | _MLP | _NORMS
_VAULTGEMMA = _ATTENTION | _MLP
_VAULTGEMMA |= {"input_layernorm": "norm1", "pre_feedforward_layernorm": "norm2"}
_GEMMA2 = _VAULTGEMMA | {
    "post_attention_layernorm": "post_norm1",
    "post_feedforward_layernorm": "post_norm2",
}

_KEYS = {
    "vocab_size": Key("vocab_size"),
    "max_seq_len": Key("max_position_embeddings"),
    "num_layers": Key("num_hidden_layers"),
    "embed_dim": Key("hidden_size"),
    "num_heads": Key("num_attention_heads"),
    "num_kv_heads": Key("num_key_value_heads", lambda f: f["num_attention_heads"]),
    "head_dim": Key("head_dim", lambda f: f["hidden_size"] // f["num_attention_heads"]),
    "mlp_dim": Key("intermediate_size"),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "rope_theta": Key("rope_theta", 1e4, read=float),
    "tie_embeddings": Key("tie_word_embeddings", False),
}
_GEMMA_KEYS = _KEYS | {
    "head_dim": Key("head_dim", 256),
    "tie_embeddings": Key("tie_word_embeddings", True),
}
_WINDOW = {"sliding_window": Key("sliding_window", 4096, null=True)}


def _score_keys(attention_cap: float | None, logit_cap: float | None) -> dict[str, Key]:
    """Keys of the scores of later Gemmas, whose first files lack the caps."""
    return {
        "query_scale": Key(
            "query_pre_attn_scalar",
            256,
            read=lambda scalar: float(scalar) ** -0.5,
            write=lambda scale: _plain(round(scale**-2, 6)),
        ),
        "attention_softcap": Key("attn_logit_softcapping", attention_cap, null=True),
        "logit_softcap": Key("final_logit_softcapping", logit_cap, null=True),
    }


def _plain(value: float) -> float:
    """A whole number as an int, which ``transformers`` expects."""
    return int(value) if value.is_integer() else value


_SWIGLU: dict[str, Any] = {"norm": "rms", "positions": "rotary", "activation": "swiglu"}
_GEMMA: dict[str, Any] = {"norm": "rms", "positions": "rotary", "activation": "geglu"}
_GEMMA |= {"norm_plus_one": True, "scale_embeddings": True}
_SILU = {"hidden_act": ("silu", None)}
_NO_BIASES = _SILU | {"attention_bias": (False, None)}
_QWEN = _NO_BIASES | {"use_sliding_window": (False, None)}
_GELU = {
    "attention_bias": (False, None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    # Gemma's first files say "gelu" and mean its tanh form.
    "hidden_act": ("gelu_pytorch_tanh", "gelu", None),
    "use_bidirectional_attention": (False, None),
}
# Other values mean another MLP in some layers, or a routing loss over a batch, which would make a
# unit's gradient depend on other units.
_ALL_EXPERTS = {
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "output_router_logits": (False, None),
}

# ---- the table ---------------------------------------------------------------------------------

_ROWS = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "ln_1": "norm1",
            "ln_2": "norm2",
            "attn.c_attn": "attention/query attention/key attention/value",
            "attn.c_proj": "attention/out",
            "mlp.c_fc": "mlp/up",
            "mlp.c_proj": "mlp/down",
        },
        {
            "vocab_size": Key("vocab_size"),
            "max_seq_len": Key("n_positions", older="n_ctx"),
            "num_layers": Key("n_layer"),
            "embed_dim": Key("n_embd"),
            "num_heads": Key("n_head"),
            "mlp_dim": Key("n_inner", lambda content: 4 * content["n_embd"]),
            "norm_eps": Key("layer_norm_epsilon", 1e-5),
            "tie_embeddings": Key("tie_word_embeddings", True),
        },
        {"norm": "layer", "positions": "learned", "activation": "gelu", "use_bias": True},
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        },
        also={"eos_token_id": None},  # the default is GPT-2's
        top={"wte": "embedding", "wpe": "positions", "ln_f": "final_norm", _HEAD: "head"},
        prefix="transformer.",
        blocks="h",
        transposed=False,
        buffers=("attn.bias", "attn.masked_bias"),
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        _LLAMA,
        _KEYS | {"use_bias": Key("attention_bias", False, same_as="mlp_bias")},
        _SWIGLU,
        _SILU,
    ),
    Family("mistral", "MistralForCausalLM", _LLAMA, _KEYS | _WINDOW, _SWIGLU, _NO_BIASES),
    Family("qwen2", "Qwen2ForCausalLM", _LLAMA, _KEYS, _SWIGLU | {"qkv_bias": True}, _QWEN),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _LLAMA | _HEAD_NORMS,
        _KEYS | {"head_dim": Key("head_dim", 128)},
        _SWIGLU | {"head_norms": True},
        _QWEN,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _ATTENTION
        | _NORMS
        | _HEAD_NORMS
        | {"mlp.gate": "mlp/router"}
        | {theirs.replace("mlp.", "mlp.experts.{}."): ours for theirs, ours in _MLP.items()},
        _KEYS
        | {
            "mlp_dim": Key("moe_intermediate_size"),
            "num_experts": Key("num_experts", older="num_local_experts"),
            "experts_per_token": Key("num_experts_per_tok"),
            "experts_sum_to_one": Key("norm_topk_prob", False),
        },
        _SWIGLU | {"head_norms": True},
        _QWEN | _ALL_EXPERTS,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        {
            "self_attn.qkv_proj": "attention/query attention/key attention/value",
            "self_attn.o_proj": "attention/out",
            "mlp.gate_up_proj": "mlp/gate mlp/up",
            "mlp.down_proj": "mlp/down",
        }
        | _NORMS,
        _KEYS | {"sliding_window": Key("sliding_window", None)},
        _SWIGLU,
        _NO_BIASES,
    ),
    Family("gemma", "GemmaForCausalLM", _LLAMA, _GEMMA_KEYS, _GEMMA, _GELU),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA2,
        _GEMMA_KEYS | _WINDOW | _score_keys(50.0, 30.0),
        _GEMMA | {"post_norms": True},
        _GELU,
        every=2,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA2 | _HEAD_NORMS,
        _GEMMA_KEYS
        | _WINDOW
        | _score_keys(None, None)
        | {
            "rope_theta": Key("rope_theta", 1e6, read=float),
            "local_rope_theta": Key("rope_local_base_freq", 1e4, read=float),
        },
        _GEMMA | {"post_norms": True, "head_norms": True},
        _GELU,
        every=6,
    ),
    Family(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        _VAULTGEMMA,
        _GEMMA_KEYS | _WINDOW | _score_keys(50.0, 30.0),
        _GEMMA,
        _GELU,
        every=2,
    ),
)
FAMILIES = {family.model_type: family for family in _ROWS}

# ---- config.json -------------------------------------------------------------------------------

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_SCALING = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_len": "original_max_position_embeddings",
    },
}


def to_transformer(content: Json, where: str) -> TransformerConfig:
    """Returns the transformer of a config.json (its ``content``; ``where`` is its path).

    Raises:
      BadInputError: another family, or an unsupported setting.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise BadInputError(
            f"{where} has model_type {kind!r}, but only {', '.join(FAMILIES)} are known"
        )
    try:
        return _transformer(FAMILIES[kind], content, where)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise BadInputError(f"{where} has a setting of the wrong type ({error})") from None


def _transformer(family: Family, content: Json, where: str) -> TransformerConfig:
    # Newer files have the rotary settings in a group, or in one for each kind of layer.
    rope = {**(content.get("rope_scaling") or {}), **(content.get("rope_parameters") or {})}
    near = rope.pop(_LOCAL, None) or {}
    rope |= rope.pop(_GLOBAL, None) or {}
    _require(near, where, rope_type=("default", None))
    _require(rope, where, partial_rotary_factor=(1.0, None))
    # Qwen's windows have another pattern.
    _require(content, where, partial_rotary_factor=(1.0, None), use_sliding_window=(False, None))
    _require(content, where, **family.requires)
    flat = {
        **content,
        "rope_theta": rope.get("rope_theta", content.get("rope_theta")),
        "rope_local_base_freq": near.get("rope_theta", content.get("rope_local_base_freq")),
    }
    fields = {name: key.of(flat, where) for name, key in family.keys.items()}
    fields["global_every"] = _global_every(family, content, where, fields)
    window = fields.get("sliding_window")
    # A window as long as any sequence has no effect, unless local layers differ otherwise, too.
    if window is None or (window >= fields["max_seq_len"] and "local_rope_theta" not in fields):
        fields |= {"sliding_window": None, "global_every": None}
    bos = content.get("bos_token_id")
    return TransformerConfig(
        **family.implies,
        **fields,
        rope_scaling=_scaling(rope, where),
        bos_id=bos if isinstance(bos, int) else None,
    )


def from_transformer(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Returns a config.json from which ``transformers`` builds the model, in ``dtype``.

    Raises:
      BadInputError: the model belongs to no family.
    """
    family = family_of(config)
    if family is None:
        raise BadInputError(
            f"a model with norm {config.norm}, positions {config.positions}, activation "
            f"{config.activation}, biases {config.use_bias} and experts {config.num_experts} "
            f"belongs to none of the families {', '.join(FAMILIES)}, so it has no place in their "
            "layout"
        )
    return _written(config, family) | {"torch_dtype": dtype}


def family_of(config: TransformerConfig) -> Family | None:
    """The first family whose config.json, read again, describes the same function."""
    for family in FAMILIES.values():
        try:
            again = to_transformer(_written(config, family), "")
        except BadInputError:
            continue
        if _computed(again) == _computed(config):
            return family
    return None


def _written(config: TransformerConfig, family: Family) -> dict[str, Any]:
    computed = _computed(config)
    written = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "bos_token_id": config.bos_id,
        **{name: values[0] for name, values in family.requires.items()},
        **family.also,
    }
    for name, key in family.keys.items():
        for theirs in filter(None, (key.name, key.same_as)):
            written[theirs] = key.write(computed[name])
    if scaling := computed["rope_scaling"]:
        names = {"kind": "rope_type"} | _SCALING[scaling["kind"]]
        written["rope_scaling"] = {theirs: scaling[ours] for ours, theirs in names.items()}
    if family.every is not None:
        local = config
        if config.sliding_window is None:  # the family needs a window: as long as any sequence
            written["sliding_window"] = config.max_seq_len
            local = dataclasses.replace(config, sliding_window=1, global_every=family.every)
        written["layer_types"] = [_LOCAL if near else _GLOBAL for near in local.local_layers]
    return written


def _computed(config: TransformerConfig) -> dict[str, Any]:
    """The fields that determine the function of a model, with defaults filled in."""
    fields = dataclasses.asdict(config) | {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.width,
        "mlp_dim": config.hidden,
        "query_scale": round((config.query_scale or config.width**-0.5) ** -2, 6) ** -0.5,
        "local_layers": config.local_layers,  # and so not global_every
    }
    for how in ("scan_layers", "last_layers", "remat", "attention", "dtype", "lora"):
        del fields[how]
    del fields["global_every"]
    if config.positions == "learned":
        fields |= {"rope_theta": 10_000.0, "rope_scaling": None}
    window = config.sliding_window or 0
    if window >= config.max_seq_len and config.local_rope_theta is None:
        fields |= {"sliding_window": None, "local_layers": (False,) * config.num_layers}
    return fields


def _global_every(
    family: Family, content: Json, where: str, fields: Mapping[str, Any]
) -> int | None:
    every = family.every and (content.get("sliding_window_pattern") or family.every)
    types = content.get("layer_types")
    if types is None:
        return every
    window, layers = fields.get("sliding_window"), fields["num_layers"]
    stated = types.index(_GLOBAL) + 1 if _GLOBAL in types else None
    for n in (every, stated):
        is_global = [window is None or bool(n and (i + 1) % n == 0) for i in range(layers)]
        if [_GLOBAL if yes else _LOCAL for yes in is_global] == list(types):
            return n
    raise BadInputError(
        f"{where} has layer_types {types}, but a window is only supported in all layers but every "
        "n-th"
    )


def _scaling(rope: Json, where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALING:
        raise BadInputError(
            f"{where} has rope scaling {kind!r}, but only {' and '.join(_SCALING)} are known"
        )
    try:
        return RopeScaling(kind=kind, **{name: rope[key] for name, key in _SCALING[kind].items()})
    except KeyError as error:
        raise BadInputError(f"{where}: rope scaling {kind!r} has no {error.args[0]}") from None


def _require(content: Json, where: str, **allowed: tuple[Any, ...]) -> None:
    for name, values in allowed.items():
        if content.get(name) not in values:
            raise BadInputError(
                f"{where} has {name} {content[name]!r}, but only {values[0]!r} is supported"
            )


# ---- tensors -----------------------------------------------------------------------------------

# Endings of our paths for each tensor of a module.
_PARAMETERS = {"weight": ("", "/kernel", "/scale"), "bias": ("/bias",)}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our parameters (of one block, of one expert) and its tensor.

    Attributes:
      path: our parameter, e.g. ``blocks/mlp/up/kernel``.
      row: index in each stack that it is in, of blocks and of experts; () if it is not stacked.
      tensor: name of the tensor.
      transposed: whether the tensor has the other order of axes.
      start: where ours begins in the tensor, along our last axis.
      width: size of the whole tensor along our last axis.
    """

    path: str
    row: tuple[int, ...]
    tensor: str
    transposed: bool
    start: int
    width: int

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, from that of our (perhaps stacked) parameter."""
        full = (*shape[len(self.row) : -1], self.width)
        return full[::-1] if self.transposed else full


def entries(
    config: TransformerConfig, family: Family, ours: Mapping[str, Any], prefix: str
) -> Iterator[Entry]:
    """Yields every parameter of a model, with the tensor that holds it.

    ``ours`` are arrays or shapes by path; ``prefix`` is the family's, or "".
    """

    def of(modules: Mapping[str, str], before: str, stack: str, row: tuple) -> Iterator[Entry]:
        for theirs, names in modules.items():
            experts = (config.num_experts or 0,) if "{}" in theirs else ()
            for at in np.ndindex(*experts):
                module = theirs if theirs == _HEAD else before + theirs.format(*at)
                for end, kinds in _PARAMETERS.items():
                    paths = [stack + name + kind for name in names.split() for kind in kinds]
                    parts = [path for path in paths if path in ours]
                    ends = np.cumsum([0, *(ours[path].shape[-1] for path in parts)]).tolist()
                    for path, start in zip(parts, ends):
                        kernel = family.transposed and path.endswith("/kernel")
                        turned = kernel or theirs == _HEAD
                        yield Entry(path, (*row, *at), f"{module}.{end}", turned, start, ends[-1])

    yield from of(family.top, prefix, "", ())
    for block in range(config.num_layers):
        stack, row = config.place_of_block(block)
        before = f"{prefix}{family.blocks}.{block}."
        yield from of(family.block, before, f"{stack}/", () if row is None else (row,))
