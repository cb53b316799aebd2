"""The shape of a transformer, and the named sizes."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, ClassVar

from dpfl_jax.errors import BadInputError

_CHOICES = {
    "positions": ("rotary", "learned"),
    "activation": ("gelu", "geglu", "swiglu"),
    "norm": ("rms", "layer"),
    "dtype": ("float32", "bfloat16"),
}
_POSITIVE = ("vocab_size", "max_seq_len", "width", "layers", "heads", "vocab_multiple")
_POSITIVE_IF_SET = ("kv_heads", "head_dim", "mlp_width")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only, pre-norm transformer.

    Attributes:
      vocab_size: token ids are below it.
      max_seq_len: longest example, in tokens (BOS replaces the last input, so it adds none).
      width: size of the residual stream.
      layers: number of blocks.
      heads: attention heads.
      kv_heads: key and value heads, a divisor of ``heads`` (grouped-query attention, Ainslie et
        al. 2023); default ``heads``.
      head_dim: size of a head; default ``width / heads``.
      mlp_width: hidden units of the MLP; default 4 * width for gelu, and 8/3 * width rounded up to
        a multiple of 8 for the gated ones, which have three matrices instead of two.
      positions: ``"rotary"`` (Su et al. 2021, halves rotated against each other) or ``"learned"``.
      rope_theta: base of the rotary wavelengths.
      activation: ``"gelu"`` (tanh form), ``"geglu"`` or ``"swiglu"`` (Shazeer 2020).
      norm: ``"rms"`` or ``"layer"``.
      norm_eps: added to the variance (mean square) in norms.
      bias: whether linear layers and layer norms have biases.
      tied_head: whether the output head is the transposed embedding.
      bos_id: token that stands before the first one.
      vocab_multiple: embedding and head are padded to a multiple of it; padding gets no logit.
      dtype: ``"float32"`` or ``"bfloat16"``: of activations and matrix products. Parameters, norm
        statistics, softmaxes, logits and the loss are float32 always.
      remat: recompute each block in the backward pass instead of storing its activations.
      scan_layers: run the blocks in a loop, so that compile time does not depend on their number.
      init_stddev: standard deviation of initial weights; those that write to the residual stream
        get it divided by sqrt(2 * layers) (Radford et al. 2019).

    Raises:
      BadInputError: values that do not make a transformer.
    """

    vocab_size: int
    max_seq_len: int = 128
    width: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_width: int | None = None
    positions: str = "rotary"
    rope_theta: float = 10_000.0
    activation: str = "gelu"
    norm: str = "rms"
    norm_eps: float = 1e-5
    bias: bool = False
    tied_head: bool = True
    bos_id: int = 1
    vocab_multiple: int = 1
    dtype: str = "float32"
    remat: bool = False
    scan_layers: bool = True
    init_stddev: float = 0.02

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        """Checks every field."""
        for name in (*_POSITIVE, *_POSITIVE_IF_SET):
            value = getattr(self, name)
            if value is None and name in _POSITIVE_IF_SET:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInputError(f"model.{name} is {value!r}, but it must be an integer >= 1")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise BadInputError(
                    f"model.{name} is {value!r}, but it must be one of {', '.join(choices)}"
                )
        for name in ("bias", "tied_head", "remat", "scan_layers"):
            if not isinstance(getattr(self, name), bool):
                value = getattr(self, name)
                raise BadInputError(f"model.{name} is {value!r}, but it must be true or false")
        for name in ("rope_theta", "norm_eps", "init_stddev"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise BadInputError(f"model.{name} is {value!r}, but it must be a number > 0")
        if self.head_dim is None and self.width % self.heads:
            raise BadInputError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}: "
                "change one, or set model.head_dim"
            )
        if self.heads % self.num_kv_heads:
            raise BadInputError(
                f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise BadInputError(
                f"model.head_dim is {self.head_size}, but rotary positions need an even one"
            )
        if not isinstance(self.bos_id, int) or not 0 <= self.bos_id < self.vocab_size:
            raise BadInputError(
                f"model.bos_id is {self.bos_id!r}, but it must be a token id below "
                f"model.vocab_size {self.vocab_size}"
            )

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation != "gelu"

    @property
    def hidden(self) -> int:
        """Hidden units of the MLP."""
        if self.mlp_width is not None:
            return self.mlp_width
        return -(-self.width // 3) * 8 if self.gated else 4 * self.width

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


_GPT2: dict[str, Any] = {"positions": "learned", "norm": "layer", "bias": True}

#: Named sizes. Those up to 30m are for byte vocabularies; the parameter counts in their names are
#: for ``vocab_size=259``, 124m's (the shape of GPT-2 small) and 350m's for their own vocabularies.
#: 350m stands in for the model of Charles et al. 2024, whose shape is not published.
SIZES: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig(259, width=96, layers=3, heads=4),
    "1m": TransformerConfig(259, width=160, layers=3, heads=5),
    "3m": TransformerConfig(259, width=256, layers=4, heads=8),
    "10m": TransformerConfig(259, max_seq_len=256, width=384, layers=6, heads=6),
    "30m": TransformerConfig(259, max_seq_len=256, width=512, layers=10, heads=8),
    "124m": TransformerConfig(
        50_257, max_seq_len=1024, width=768, layers=12, heads=12, bos_id=50_256, **_GPT2
    ),
    "350m": TransformerConfig(32_000, width=1024, layers=24, heads=16),
}


def transformer_config(size: str = "tiny", **fields: Any) -> TransformerConfig:
    """A named size with some fields changed.

    >>> transformer_config("1m", vocab_size=32_000, dtype="bfloat16")

    Args:
      size: a key of ``SIZES``.
      **fields: fields of ``TransformerConfig``.

    Raises:
      BadInputError: no such size or field (with the nearest name), or a bad value.
    """
    if size not in SIZES:
        raise BadInputError(f"model.size {size!r} is unknown: use one of {', '.join(SIZES)}")
    names = [f.name for f in dataclasses.fields(TransformerConfig)]
    for name in fields:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(names)}"
            raise BadInputError(f"model has no field {name!r}: {hint}")
    base = SIZES[size]
    if "vocab_size" in fields and "bos_id" not in fields:
        # A size's own BOS belongs to its own vocabulary.
        fields = {**fields, "bos_id": TransformerConfig.bos_id}
    return dataclasses.replace(base, **fields)
