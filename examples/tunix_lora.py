"""A tunix model learns from people through qwix's adapters; tunix's sampler writes."""

from pydoc_data.topics import topics

import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3

import dpfl_jax as dpfl
from dpfl_jax.data.tokenizers import ByteTokenizer

HEADS = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16}
SHAPE = {**HEADS, "embed_dim": 64, "hidden_dim": 192, "num_heads": 4}
LORA = qwix.LoraProvider(module_path=".*(q_proj|q_einsum|gate_proj|up_proj)", rank=4, alpha=8.0)
# Bytes, with the special ids as tunix asks for them.
IDS = {name: lambda self, i=i: i for i, name in enumerate(("pad_id", "bos_id", "eos_id"))}
Words = type("Words", (ByteTokenizer,), IDS)


def loss(net, example):
    """Of one text: the mean over its tokens."""
    tokens, real, at = example["tokens"], example["mask"][1:], jnp.arange(96)
    logits, _ = net(tokens[None], at[None], None, (at[:, None] >= at)[None])
    each = optax.softmax_cross_entropy_with_integer_labels(logits[0, :-1], tokens[1:])
    return (each * real).sum() / jnp.maximum(real.sum(), 1)


def merge(net, base):
    """The base with the products of the adapters added to its weights."""
    trained, weights = (dict(nnx.to_flat_state(nnx.state(one))) for one in (net, base))
    for (*module, name), a in trained.items():
        if (weight := name.removesuffix("_lora_a")) != name:
            product = jnp.tensordot(a[...], trained[*module, f"{weight}_lora_b"][...], 1)
            weights[*module, weight][...] += 2.0 * product.reshape(weights[*module, weight].shape)
    return nnx.merge(nnx.graphdef(base), nnx.from_flat_state(weights))  # 2.0 is alpha / rank


def main(net=None, warm_up=150, steps=20):
    """Trains a base on public text and adapters on 1,035 people's; returns what it writes."""
    shape = qwen3.ModelConfig(**SHAPE, vocab_size=259, rope_theta=10_000, norm_eps=1e-6)
    public = dpfl.from_texts([("nobody", text) for text in topics.values()], seq_len=96)
    plan = dpfl.non_private(batch_size=32).plan(public, steps=warm_up)
    base = dpfl.fit(
        loss, net or qwen3.Qwen3(shape, rngs=nnx.Rngs(0)), plan, optax.adam(3e-3)
    ).params
    net = qwix.apply_lora_to_model(base, LORA, rngs=nnx.Rngs(1), **base.get_model_input())
    people = dpfl.load_dataset(dpfl.DataConfig(source="shakespeare", seq_len=96))
    plan = dpfl.uls(group_size=1, cohort_size=128).plan(people.train, steps=steps, epsilon=8.0)
    adapter, optimizer = (lambda name: "lora" in name), optax.adam(3e-3)
    result = dpfl.fit(loss, net, plan, optimizer, trainable=adapter, validation=people.validation)
    print(result.guarantee.summary(), result.initial.loss, "->", result.final.loss)
    write = Sampler(merge(result.params, base), Words(), CacheConfig(cache_size=128, **HEADS))
    return write(["My lord, "], max_generation_steps=60, eos_tokens=[0], temperature=0.7, top_p=0.9)


if __name__ == "__main__":
    print(main().text[0])
