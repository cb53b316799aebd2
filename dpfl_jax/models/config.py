"""The shape of a decoder-only transformer, and named sizes."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import Any, ClassVar, Literal, get_args

from dpfl_jax.errors import BadInputError, at_least, nearest, one_of, positive, require

Activation = Literal["gelu", "swiglu", "geglu"]
NormKind = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]
ComputeDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "light", "full"]
PROJECTIONS = ("query", "key", "value", "out", "up", "gate", "down")
AttentionForm = Literal["auto", "plain", "blockwise", "fused"]
_CHOICES = {"activation": Activation, "norm": NormKind, "positions": Positions,
            "dtype": ComputeDtype, "remat": Remat, "attention": AttentionForm}  # fmt: skip
_POSITIVE = ("norm_eps", "rope_theta", "query_scale", "attention_softcap", "logit_softcap",
             "local_rope_theta")  # fmt: skip
_COUNTS = ("vocab_size", "max_seq_len", "num_layers", "embed_dim", "num_heads")
_OPTIONAL_COUNTS = ("num_kv_heads", "head_dim", "mlp_dim", "num_experts", "experts_per_token",
                    "sliding_window", "global_every")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies of a model for longer sequences than it was first trained on.

    Attributes:
      kind: ``"linear"``: all frequencies divided by ``factor`` (Chen et al. 2023); ``"llama3"``:
        only the low ones (Llama 3.1), with a smooth transition.
      factor: divisor of frequencies, > 0.
      low_freq_factor: llama3: wavelengths above original_max_len / this are divided.
      high_freq_factor: llama3: wavelengths below original_max_len / this are kept.
      original_max_len: llama3: sequence length of the first training.
    """

    kind: Literal["linear", "llama3"] = "linear"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        one_of("model: rope_scaling kind", self.kind, ("linear", "llama3"))
        if not (self.factor > 0 and self.high_freq_factor > self.low_freq_factor > 0):
            raise BadInputError(
                "model: rope_scaling needs factor > 0 and high_freq_factor > low_freq_factor > 0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters of projections (Hu et al. 2021): y = x W + (alpha / rank) x A B.

    Attributes:
      rank: columns of A.
      alpha: scale of the adapter times rank.
      targets: shell patterns of the paths of projections that get one, e.g. ``"*/attention/*"`` or
        ``"block_3/mlp/down"``.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*/attention/*",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise BadInputError(
                f"model: adapters need rank >= 1 and alpha > 0, got {self.rank} and {self.alpha}"
            )

    @property
    def scale(self) -> float:
        """Factor of the adapter's product, alpha / rank."""
        return self.alpha / self.rank

    def covers(self, path: str) -> bool:
        """Whether the projection at ``path`` gets an adapter."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A pre-norm decoder-only transformer.

    Attributes:
      vocab_size: ids are below it (special ids included).
      max_seq_len: longest sequence; matters for learned positions.
      num_layers: number of blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads (fewer: grouped-query attention); default num_heads.
      head_dim: width of a head; default embed_dim / num_heads.
      mlp_dim: hidden width of the MLP; default 4 x embed_dim, or 8/3 of it (rounded up to a
        multiple of 32) for the gated activations.
      activation: gelu, swiglu or geglu.
      num_experts: MLPs of width mlp_dim in every block, all of which are computed, and some of
        which each token chooses; None: one MLP, without routing.
      experts_per_token: how many a token chooses; needed with num_experts, and only then.
      experts_sum_to_one: whether the weights of the chosen experts are divided by their sum.
      norm: rms or layer.
      norm_eps: added to the variance.
      norm_plus_one: norms multiply by 1 + scale, not by scale (Gemma).
      post_norms: also normalise what attention and MLP add to the stream (Gemma 2).
      positions: rotary or learned.
      rope_theta: base of the rotary frequencies.
      rope_scaling: for long sequences (a mapping is taken too).
      sliding_window: positions that a local layer sees, its own included; None: no layer is local.
      global_every: every so many layers, one is not local (2: the second, fourth, ...); None: all
        are local.
      local_rope_theta: rope_theta of local layers, without rope_scaling (Gemma 3); None: like the
        other layers.
      head_norms: normalise queries and keys, each head separately (Qwen 3, Gemma 3).
      query_scale: factor of queries; default head width ** -0.5.
      attention_softcap: scores become cap * tanh(scores / cap) (Gemma 2); None: no cap.
      logit_softcap: logits become cap * tanh(logits / cap); None: no cap.
      scale_embeddings: embeddings are multiplied by the root of embed_dim (Gemma).
      use_bias: biases in all projections.
      qkv_bias: biases only in the projections to queries, keys and values (Qwen 2).
      tie_embeddings: the output head is the transposed embedding.
      scan_layers: one compiled block run num_layers times (compile time does not grow with depth).
      last_layers: so many last blocks are a separate stack, ``last_blocks``, so that they can be
        trained alone; 0: one stack.
      remat: what the backward pass recomputes instead of storing. ``"light"``: all of a block but
        the results of its projections, so that no attention matrix is stored (also the fastest on a
        CPU); ``"full"`` (or true): the whole block; ``"none"`` (or false): nothing. Names of
        projections (query, key, value, out, up, gate, down): all of a block but their results.
      attention: ``"plain"`` holds the scores of all pairs of positions; ``"blockwise"`` those of
        two blocks of 512, so that memory grows linearly with length; ``"auto"``: plain up to 1,024
        positions; ``"fused"``: cuDNN's kernel on NVIDIA GPUs, in bfloat16 (JAX 0.12 and newer);
        JAX's splash attention on TPUs, inside ``jax.shard_map`` over all axes of a mesh, and
        ``"auto"`` elsewhere.
      dtype: dtype of activations and matrix products; parameters, norms, softmax and loss are
        float32.
      bos_id: id that the model puts before every sequence; None: it puts nothing, and does not
        predict a sequence's first token.
      lora: adapters (a mapping is taken too); None: no adapters.

    Examples:
      >>> from dpfl_jax.models import TransformerConfig
      >>> TransformerConfig(vocab_size=259, num_layers=2, embed_dim=64, num_heads=4).activation
      'gelu'
    """

    vocab_size: int
    max_seq_len: int = 128
    num_layers: int = 2
    embed_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    activation: Activation = "gelu"
    num_experts: int | None = None
    experts_per_token: int | None = None
    experts_sum_to_one: bool = False
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    post_norms: bool = False
    positions: Positions = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    global_every: int | None = None
    local_rope_theta: float | None = None
    head_norms: bool = False
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    scale_embeddings: bool = False
    use_bias: bool = False
    qkv_bias: bool = False
    tie_embeddings: bool = True
    scan_layers: bool = True
    last_layers: int = 0
    remat: Remat | bool | tuple[str, ...] = "light"
    attention: AttentionForm = "auto"
    dtype: str = "float32"
    bos_id: int | None = 1
    lora: Lora | None = None

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if isinstance(self.remat, bool):
            object.__setattr__(self, "remat", "full" if self.remat else "none")
        if isinstance(self.remat, list | tuple):
            object.__setattr__(self, "remat", tuple(self.remat))
            unknown = [name for name in self.remat if name not in PROJECTIONS]
            allowed = f"names among {', '.join(PROJECTIONS)}"
            require(self.remat and not unknown, "model: remat", unknown, allowed)
        for name, kind in (("rope_scaling", RopeScaling), ("lora", Lora)):
            value = getattr(self, name)
            if isinstance(value, dict):
                object.__setattr__(self, name, _parsed(name, kind, value))
        for name in (*_COUNTS, *_OPTIONAL_COUNTS):
            value = getattr(self, name)
            optional = value is None and name in _OPTIONAL_COUNTS
            good = optional or (type(value) is int and value >= 1)
            require(good, f"model: {name}", value, "a whole number, at least 1")
        for name, options in _CHOICES.items():
            value, known = getattr(self, name), get_args(options)
            if name == "remat" and self.remat_saves:
                continue
            require(value in known, f"model: {name}", value, f"one of {', '.join(known)}")
        for name in _POSITIVE:
            positive(f"model: {name}", getattr(self, name))
        most = self.num_layers - 1
        at_least("model: last_layers", self.last_layers, 0, most=most, whole=True)
        local = {"global_every": self.global_every, "local_rope_theta": self.local_rope_theta}
        for name, value in local.items():
            if value is not None and self.sliding_window is None:
                raise BadInputError(
                    f"model: {name} is {value}, but no layer is local: set sliding_window, or "
                    f"leave {name} out"
                )
        if (self.experts_per_token or 0) > (self.num_experts or 0) or (
            self.num_experts is not None and self.experts_per_token is None
        ):
            raise BadInputError(
                f"model: a token cannot choose {self.experts_per_token} of {self.num_experts} "
                "experts: set num_experts and experts_per_token, or neither"
            )
        if self.num_experts is not None and self.use_bias:
            raise BadInputError("model: experts have no biases: leave use_bias or num_experts out")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise BadInputError(
                f"model: embed_dim {self.embed_dim} is not a multiple of num_heads "
                f"{self.num_heads}: change one, or set head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise BadInputError(
                f"model: num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.kv_heads}"
            )
        if self.positions == "rotary" and self.width % 2:
            raise BadInputError(
                f"model: rotary positions need an even head width, but it is {self.width}"
            )
        if self.bos_id is not None and not 0 <= self.bos_id < self.vocab_size:
            raise BadInputError(
                f"model: bos_id {self.bos_id} is not below vocab_size {self.vocab_size}"
            )

    @property
    def remat_saves(self) -> tuple[str, ...]:
        """The projections whose results are stored, if ``remat`` names them."""
        return self.remat if isinstance(self.remat, tuple) else ()

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads; fewer than query heads where these share them."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """Length of the vectors of one head."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation in ("swiglu", "geglu")

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        if self.gated:
            return -(-8 * self.embed_dim // 3 // 32) * 32
        return 4 * self.embed_dim

    @property
    def stacks(self) -> tuple[tuple[str, int], ...]:
        """Names and lengths of the stacks of blocks under ``scan_layers``."""
        stacks = (("blocks", self.num_layers - self.last_layers), ("last_blocks", self.last_layers))
        return stacks if self.last_layers else stacks[:1]

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """For each block, whether it sees only sliding_window positions."""
        if self.sliding_window is None:
            return (False,) * self.num_layers
        every = self.global_every
        return tuple(every is None or (i + 1) % every != 0 for i in range(self.num_layers))

    def place_of_block(self, block: int) -> tuple[str, int | None]:
        """Where the parameters of a block are: their name, and the row if they are stacked."""
        if not self.scan_layers:
            return f"block_{block}", None
        body = self.num_layers - self.last_layers
        return ("blocks", block) if block < body else ("last_blocks", block - body)


def _parsed(name: str, kind: type, value: dict[str, Any]) -> Any:
    try:
        return kind(**value)
    except TypeError:
        known = ", ".join(f.name for f in dataclasses.fields(kind))
        raise BadInputError(
            f"model: {name} has an unknown field in {sorted(value)}: known are {known}"
        ) from None


# Parameters without embeddings are about 12 x num_layers x embed_dim^2.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 2, "embed_dim": 96, "num_heads": 4},
    "1m": {"num_layers": 5, "embed_dim": 128, "num_heads": 4},
    "3m": {"num_layers": 4, "embed_dim": 256, "num_heads": 8},
    "10m": {"num_layers": 6, "embed_dim": 384, "num_heads": 6},
    "30m": {"num_layers": 10, "embed_dim": 512, "num_heads": 8},
    "124m": {
        "num_layers": 12,
        "embed_dim": 768,
        "num_heads": 12,
        "norm": "layer",
        "norm_eps": 1e-5,
        "positions": "learned",
        "use_bias": True,
    },
    # Stand-in for the 350M decoder of Charles et al. 2024, whose shape is not reported.
    "350m": {"num_layers": 24, "embed_dim": 1024, "num_heads": 16},
}


def transformer_config(size: str, **overrides: Any) -> TransformerConfig:
    """Returns the configuration of a size (a key of ``SIZES``), with some fields changed.

    Raises:
      BadInputError: an unknown size or field.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> dpfl.transformer_config("tiny", vocab_size=259, max_seq_len=64).max_seq_len
      64
    """
    one_of("model: size", size, SIZES)
    known = [f.name for f in dataclasses.fields(TransformerConfig)]
    for name in overrides:
        if name not in known:
            raise BadInputError(f"model: unknown field {name!r}: {nearest(name, known)}")
    return TransformerConfig(**{"vocab_size": 259} | SIZES[size] | overrides)
