"""Models of other libraries, untouched, as losses of one example; sizes for a laptop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpfl_jax as dpfl
from benchmarks._clipping_models import images
from dpfl_jax.models import TransformerConfig

PyTree = Any
VOCAB, WIDTH, HEADS = 512, 128, 4
BAG = 20_000  # tokens that an embedding bag knows


def _next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits[:-1].astype(jnp.float32), tokens[1:]
    ).mean()


def _texts(length: int) -> Callable[[jax.Array, int], PyTree]:
    return lambda key, n: jax.random.randint(key, (n, length), 3, VOCAB)


def _nnx(net: Any, run: Callable[[Any, PyTree], jax.Array]) -> tuple[PyTree, Any]:
    """Parameters and loss of a module, of which ``run(net, example)`` is the loss."""
    params, rebuild, _ = dpfl.functional(net)
    return params, lambda p, example: run(rebuild(p), example)


def _blocks(width: int, rngs: Any) -> Any:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    return Block()


def nnx_transformer() -> tuple[PyTree, Any, Any]:
    """Flax NNX: four blocks with tied embeddings."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            self.blocks = nnx.List([_blocks(WIDTH, rngs) for _ in range(4)])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.embed.attend(x)

    params, loss = _nnx(Net(nnx.Rngs(0)), lambda net, tokens: _next_token(net(tokens), tokens))
    return params, loss, _texts(64)


def linen_transformer() -> tuple[PyTree, Any, Any]:
    """Flax Linen: two blocks."""
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed, mask = linen.Embed(VOCAB, WIDTH), linen.make_causal_mask(tokens)
            x = embed(tokens)
            for _ in range(2):
                x = x + linen.SelfAttention(num_heads=HEADS)(linen.LayerNorm()(x), mask)
                h = linen.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x)))
                x = x + linen.Dense(WIDTH)(h)
            return embed.attend(x)

    net, texts = Net(), _texts(64)
    params = net.init(jax.random.key(0), texts(jax.random.key(1), 1)[0])

    def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        logits: Any = net.apply(params, tokens)
        return _next_token(logits, tokens)

    return params, loss, texts


def equinox_transformer() -> tuple[PyTree, Any, Any]:
    """Equinox: two blocks, mapped over positions by ``jax.vmap`` as Equinox asks."""
    import equinox as eqx

    class Net(eqx.Module):
        embed: Any
        norms: list[Any]
        attentions: list[Any]
        ups: list[Any]
        downs: list[Any]
        out: Any

        def __init__(self, key: jax.Array) -> None:
            keys = iter(jax.random.split(key, 9))
            self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=next(keys))
            self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(4)]
            self.attentions = [
                eqx.nn.MultiheadAttention(HEADS, WIDTH, key=next(keys)) for _ in range(2)
            ]
            self.ups = [eqx.nn.Linear(WIDTH, 4 * WIDTH, key=next(keys)) for _ in range(2)]
            self.downs = [eqx.nn.Linear(4 * WIDTH, WIDTH, key=next(keys)) for _ in range(2)]
            self.out = eqx.nn.Linear(WIDTH, VOCAB, key=next(keys))

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x, mask = jax.vmap(self.embed)(tokens), jnp.tri(len(tokens), dtype=bool)
            for i in range(2):
                h = jax.vmap(self.norms[2 * i])(x)
                x = x + self.attentions[i](h, h, h, mask)
                h = jax.nn.gelu(jax.vmap(self.ups[i])(jax.vmap(self.norms[2 * i + 1])(x)))
                x = x + jax.vmap(self.downs[i])(h)
            return jax.vmap(self.out)(x)

    params, loss = _nnx(
        Net(jax.random.key(0)), lambda net, tokens: _next_token(net(tokens), tokens)
    )
    return params, loss, _texts(64)


def haiku_mlp() -> tuple[PyTree, Any, Any]:
    """Haiku: 784-512-512-10, the network of `mlp`."""
    import haiku as hk

    net: Any = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([512, 512, 10])(x)))

    def loss(params: PyTree, example: PyTree) -> jax.Array:
        logits = net.apply(params, example["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])

    batch = lambda key, n: images((n,), 784)(key)  # noqa: E731
    return net.init(jax.random.key(0), jnp.zeros(784)), loss, batch


def embedding_bag() -> tuple[PyTree, Any, Any]:
    """Flax NNX: texts of 64 tokens by the mean of their embeddings, 20,000 of width 128."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed, self.out = nnx.Embed(BAG, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.out(self.embed(tokens).mean(0))

    def run(net: Any, example: PyTree) -> jax.Array:
        logits = net(example["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])

    def batch(key: jax.Array, n: int) -> PyTree:
        return {
            "tokens": jax.random.randint(key, (n, 64), 0, BAG),
            "label": jax.random.randint(key, (n,), 0, 4),
        }

    return (*_nnx(Net(nnx.Rngs(0)), run), batch)


def _tunix(net: Any) -> tuple[PyTree, Any]:
    def run(net: Any, tokens: jax.Array) -> jax.Array:
        places = jnp.arange(len(tokens))
        mask = (places[:, None] >= places)[None]
        logits, _ = net(tokens[None], places[None], None, mask)
        return _next_token(logits[0], tokens)

    return _nnx(net, run)


_SHAPE = {
    "num_layers": 4,
    "embed_dim": WIDTH,
    "hidden_dim": 3 * WIDTH,
    "num_heads": HEADS,
    "head_dim": WIDTH // HEADS,
    "num_kv_heads": 2,
}


def _qwen3(**more: Any) -> Any:
    from flax import nnx
    from tunix.models.qwen3 import model

    shape = {**_SHAPE, "vocab_size": VOCAB, "rope_theta": 10_000, "norm_eps": 1e-6}
    return model.Qwen3(model.ModelConfig(**{**shape, **more}), rngs=nnx.Rngs(0))


def tunix_qwen3() -> tuple[PyTree, Any, Any]:
    """tunix: Qwen3."""
    return (*_tunix(_qwen3()), _texts(128))


def tunix_qwen3_moe() -> tuple[PyTree, Any, Any]:
    """tunix: Qwen3 with 4 experts, 2 for a token."""
    return (*_tunix(_qwen3(num_experts=4, num_experts_per_tok=2)), _texts(128))


def tunix_llama3() -> tuple[PyTree, Any, Any]:
    """tunix: Llama 3."""
    from flax import nnx
    from tunix.models.llama3 import model

    shape = {**_SHAPE, "vocab_size": VOCAB, "rope_theta": 10_000, "norm_eps": 1e-6}
    return (*_tunix(model.Llama3(model.ModelConfig(**shape), rngs=nnx.Rngs(0))), _texts(128))


def tunix_step(config: TransformerConfig) -> tuple[Any, Any]:
    """What tunix's trainer takes a gradient of: its Llama 3, of the sizes of one of our models.

    Returns:
      A maker of float32 parameters from a key; and the gradient, of (parameters, (nothing, batch)),
      computed in the dtype of ``config``. An MLP is always gated: instead of one that is not, one
      of as many parameters.

    Raises:
      ImportError: tunix is not installed.
    """
    from flax import nnx
    from tunix.models.llama3 import model
    from tunix.sft import peft_trainer, utils

    gated = config if config.gated else dataclasses.replace(config, activation="swiglu")
    shape = model.ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.embed_dim,
        hidden_dim=gated.hidden,
        num_heads=config.num_heads,
        head_dim=config.width,
        num_kv_heads=config.kv_heads,
        rope_theta=int(config.rope_theta),
        norm_eps=config.norm_eps,
        weight_tying=config.tie_embeddings,
    )
    abstract: Any = nnx.eval_shape(lambda: model.Llama3(shape, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(abstract)

    def init(key: jax.Array) -> PyTree:
        # Its own MLPs start as zeros, and products of zeros are faster on some devices.
        def one(x: Any, key: jax.Array) -> jax.Array:
            return jnp.ones(x.shape) if x.ndim == 1 else 0.02 * jax.random.normal(key, x.shape)

        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(shapes)
        return tree.unflatten(map(one, leaves, jax.random.split(key, len(leaves))))

    def gradient(params: PyTree, data: Any) -> PyTree:
        tokens, mask = data[1]["tokens"], data[1]["mask"]
        inputs = {
            "input_tokens": tokens,
            "input_mask": mask,
            "positions": utils.build_positions_from_mask(mask),
            "attention_mask": utils.make_causal_attn_mask(mask),
        }

        def loss(net: Any) -> jax.Array:
            whole, wide = nnx.split(net)
            narrow = jax.tree.map(lambda p: p.astype(config.dtype), wide)
            return peft_trainer._default_loss_fn(nnx.merge(whole, narrow), **inputs)

        return nnx.grad(loss)(nnx.merge(graph, params))

    return init, gradient


def tunix_gemma3() -> tuple[PyTree, Any, Any]:
    """tunix: Gemma 3, in bfloat16 as it comes."""
    from flax import nnx
    from tunix.models.gemma3 import model

    shape = model.ModelConfig(**_SHAPE, num_embed=VOCAB, sliding_window_size=32)
    return (*_tunix(model.Gemma3(shape, rngs=nnx.Rngs(0))), _texts(128))


def qwix_lora() -> tuple[PyTree, Any, Any]:
    """Tunix's Qwen3 with qwix's LoRA of rank 8; only the adapters are trained."""
    import qwix
    from flax import nnx

    provider = qwix.LoraProvider(
        module_path=".*(q_proj|kv_proj|gate_proj|up_proj|down_proj)", rank=8, alpha=16.0
    )
    tokens, places = jnp.ones((1, 8), jnp.int32), jnp.arange(8)
    mask = (places[:, None] >= places)[None]
    net = qwix.apply_lora_to_model(
        _qwen3(),
        provider,
        rngs=nnx.Rngs(0),
        input_tokens=tokens,
        positions=places[None],
        cache=None,
        attention_mask=mask,
    )
    return (*_tunix(net), _texts(128))


def keras_gpt2() -> tuple[PyTree, Any, Any]:
    """Keras on JAX: KerasHub's GPT-2, four blocks, by ``stateless_call``."""
    import os

    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras_hub
    from keras import utils

    utils.set_random_seed(0)  # every process that makes it must get the same parameters
    net = keras_hub.models.GPT2CausalLM(
        backbone=keras_hub.models.GPT2Backbone(
            vocabulary_size=VOCAB,
            num_layers=4,
            num_heads=HEADS,
            hidden_dim=WIDTH,
            intermediate_dim=4 * WIDTH,
            max_sequence_length=64,
        )
    )
    params = {v.path: v.value for v in net.trainable_variables}
    fixed, names = [v.value for v in net.non_trainable_variables], list(params)

    def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        inputs = {"token_ids": tokens[None], "padding_mask": jnp.ones_like(tokens)[None]}
        logits, _ = net.stateless_call([params[v] for v in names], fixed, inputs, training=False)
        return _next_token(logits[0], tokens)

    return params, loss, _texts(64)


MODELS: dict[str, Callable[[], tuple[PyTree, Any, Any]]] = {
    "nnx": nnx_transformer,
    "linen": linen_transformer,
    "equinox": equinox_transformer,
    "haiku": haiku_mlp,
    "embedding-bag": embedding_bag,
    "tunix-qwen3": tunix_qwen3,
    "tunix-qwen3-moe": tunix_qwen3_moe,
    "tunix-llama3": tunix_llama3,
    "tunix-gemma3": tunix_gemma3,
    "qwix-lora": qwix_lora,
    "keras-gpt2": keras_gpt2,
}
TRAINED = {"qwix-lora": lambda name: "lora" in name}
