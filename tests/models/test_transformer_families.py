"""The families of transformers against an independent NumPy forward pass; masks; structure."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.errors import BadInputError
from dpfl_jax.models import LanguageModel, TransformerConfig

SMALL = TransformerConfig(vocab_size=37, max_seq_len=12, embed_dim=16, num_layers=2, num_heads=4)
VARIANTS = {
    "default": SMALL,
    "gpt2": dataclasses.replace(SMALL, positions="learned", norm="layer", use_bias=True),
    "llama": dataclasses.replace(SMALL, activation="swiglu", num_kv_heads=2, tie_embeddings=False),
    "gemma": dataclasses.replace(SMALL, activation="geglu", head_dim=6, num_kv_heads=1),
    "experts": dataclasses.replace(
        SMALL,
        activation="swiglu",
        mlp_dim=12,
        num_experts=5,
        experts_per_token=2,
        experts_sum_to_one=True,
    ),
}


def perturbed(model, seed=0):
    """Parameters with no zero bias and no unit scale, so that each one matters."""
    params = model.init(jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)]
    return tree.unflatten(noisy)


def example(length=12, real=9, seed=0, vocab=37):
    mask = np.arange(length) < real
    tokens = np.random.default_rng(seed).integers(3, vocab, length)
    return {"tokens": jnp.asarray(np.where(mask, tokens, 0), jnp.int32), "mask": jnp.asarray(mask)}


def batch(n=6):
    return jax.tree.map(lambda *x: jnp.stack(x), *[example(real=3 + i, seed=i) for i in range(n)])


def assert_trees_close(a, b, rtol=1e-5, atol=1e-6):
    chex.assert_trees_all_close(a, b, rtol=rtol, atol=atol)


# ---- an independent forward pass in NumPy ----------------------------------------------------


def numpy_logits(config, params, tokens):
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    length = len(tokens)

    def norm(w, x):
        if config.norm == "layer":
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(
                x.var(-1, keepdims=True) + config.norm_eps
            )
        else:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
        return x * w["scale"] + w.get("bias", 0.0)

    def dense(w, x):
        return x @ w["kernel"] + w.get("bias", 0.0)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def rope(x, position):
        half = len(x) // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position * config.rope_theta ** (-i / half)
            turn = (x[i] + 1j * x[i + half]) * np.exp(1j * angle)
            out[i], out[i + half] = turn.real, turn.imag
        return out

    def attention(w, x):
        size, share = config.width, config.num_heads // config.kv_heads
        q, k, v = (dense(w[name], x) for name in ("query", "key", "value"))
        out = np.zeros((length, config.num_heads * size))
        for h in range(config.num_heads):
            mine = slice(h * size, (h + 1) * size)
            theirs = slice(h // share * size, (h // share + 1) * size)
            for i in range(length):
                turn = rope if config.positions == "rotary" else (lambda x, _: x)
                qi = turn(q[i, mine], i)
                scores = np.array([qi @ turn(k[j, theirs], j) for j in range(i + 1)])
                weights = np.exp(scores / np.sqrt(size))
                out[i, mine] = weights / weights.sum() @ v[: i + 1, theirs]
        return dense(w["out"], out)

    def mlp(w, x):
        if config.activation == "gelu":
            return dense(w["down"], gelu(dense(w["up"], x)))
        if config.num_experts is not None and "router" in w:
            out = np.zeros_like(x)
            for t, scores in enumerate(dense(w["router"], x)):
                chosen = np.argsort(-scores)[: config.experts_per_token]
                shares = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
                for e, share in zip(chosen, shares):
                    one = {
                        name: {"kernel": w[name]["kernel"][e]} for name in ("gate", "up", "down")
                    }
                    out[t] += share * mlp(one, x[t])
            return out
        gate = dense(w["gate"], x)
        gate = gelu(gate) if config.activation == "geglu" else gate / (1 + np.exp(-gate))
        return dense(w["down"], gate * dense(w["up"], x))

    x = p["embedding"][[config.bos_id, *tokens[:-1]]]
    if config.positions == "learned":
        x = x + p["positions"][:length]
    for i in range(config.num_layers):
        w = jax.tree.map(lambda leaf, i=i: leaf[i], p["blocks"])
        x = x + attention(w["attention"], norm(w["norm1"], x))
        x = x + mlp(w["mlp"], norm(w["norm2"], x))
    head = p["embedding"].T if config.tie_embeddings else p["head"]
    return norm(p["final_norm"], x) @ head


@pytest.mark.nightly
@pytest.mark.parametrize("name", VARIANTS)
def test_forward_pass_equals_numpy(name):
    config = VARIANTS[name]
    model = LanguageModel(config)
    params, ex = perturbed(model), example()
    tokens = np.asarray(ex["tokens"])
    expected = numpy_logits(config, params, tokens)
    assert np.abs(expected).max() > 1  # a model that does something
    logits = model.logits(params, ex["tokens"])
    assert logits.shape == (12, 37)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)

    nll = np.log(np.exp(expected).sum(-1)) - expected[np.arange(12), tokens]
    loss = model.loss(params, ex)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, nll[:9].mean(), rtol=1e-5)


# ---- what a position may see -----------------------------------------------------------------


@pytest.mark.nightly
def test_padding_has_no_influence():
    model = LanguageModel(SMALL)
    params, ex = perturbed(model), example(real=7)
    value_and_grad = jax.jit(jax.value_and_grad(model.loss))
    loss, gradient = value_and_grad(params, ex)
    other = {**ex, "tokens": jnp.where(ex["mask"], ex["tokens"], 30)}
    loss_other, gradient_other = value_and_grad(params, other)
    assert loss == loss_other
    assert_trees_close(gradient, gradient_other)
    shorter = jax.tree.map(lambda x: x[:7], ex)
    loss_shorter, gradient_shorter = value_and_grad(params, shorter)
    np.testing.assert_allclose(loss, loss_shorter, rtol=1e-6)
    assert_trees_close(gradient, gradient_shorter)


def test_mask_selects_the_tokens_that_count():
    model = LanguageModel(SMALL)
    params, ex = perturbed(model), example(real=12)
    mask = np.arange(12) % 3 == 1
    log_probs = jax.nn.log_softmax(model.logits(params, ex["tokens"]))
    each = -np.asarray(log_probs)[np.arange(12), np.asarray(ex["tokens"])]
    loss = model.loss(params, {**ex, "mask": jnp.asarray(mask)})
    np.testing.assert_allclose(loss, each[mask].mean(), rtol=1e-5)


def test_token_outside_the_vocabulary_is_not_silent():
    model = LanguageModel(SMALL)
    ex = example(real=12)
    ex["tokens"] = ex["tokens"].at[3].set(37)
    assert np.isnan(model.loss(perturbed(model), ex))


# ---- equivalent forms ------------------------------------------------------------------------


def test_layers_are_a_loop_and_remat_recomputes():
    def text(**change):
        model = LanguageModel(dataclasses.replace(SMALL, **change))
        params = jax.eval_shape(model.init, jax.random.key(0))
        return str(jax.make_jaxpr(model.loss)(params, example()))

    looped, unrolled = text(remat="none"), text(remat="none", scan_layers=False)
    assert "scan[" in looped
    assert "scan[" not in unrolled
    assert unrolled.count("dot_general") > looped.count("dot_general")
    assert text(num_layers=9).count("dot_general") == text().count("dot_general")
    assert "remat" in text()
    assert "remat" not in looped


def test_batched_loss_equals_a_loop():
    model = LanguageModel(SMALL)
    params, examples = perturbed(model), batch()
    losses = jax.jit(jax.vmap(model.loss, (None, 0)))(params, examples)
    one_by_one = [model.loss(params, jax.tree.map(lambda x, i=i: x[i], examples)) for i in range(6)]
    np.testing.assert_allclose(losses, one_by_one, rtol=1e-5)


# ---- parameters ------------------------------------------------------------------------------


@pytest.mark.nightly
def test_tied_head_shares_the_embedding():
    tied, untied = (
        LanguageModel(dataclasses.replace(SMALL, tie_embeddings=t)) for t in (True, False)
    )
    params, ex = perturbed(tied), example()
    gradient = jax.grad(tied.loss)(params, ex)["embedding"]
    unseen = np.setdiff1d(np.arange(37), [1, *np.asarray(ex["tokens"])])
    # A token that is never read still gets a gradient: through the head.
    assert np.abs(gradient[unseen]).max(-1).min() > 0
    # The untied model with the same numbers has the tied gradient, split in two.
    split = {**params, "head": params["embedding"].T}
    np.testing.assert_allclose(untied.loss(split, ex), tied.loss(params, ex), rtol=1e-6)
    parts = jax.grad(untied.loss)(split, ex)
    np.testing.assert_allclose(gradient, parts["embedding"] + parts["head"].T, atol=1e-5)


@pytest.mark.nightly
def test_initialisation():
    config = TransformerConfig(vocab_size=500, embed_dim=128, num_layers=8, num_heads=4)
    params = LanguageModel(config).init(jax.random.key(3))
    blocks = params["blocks"]
    for leaf, stddev in [
        (params["embedding"], 0.02),
        (blocks["attention"]["query"]["kernel"], 0.02),
        (blocks["mlp"]["up"]["kernel"], 0.02),
        (blocks["attention"]["out"]["kernel"], 0.02 / 4),
        (blocks["mlp"]["down"]["kernel"], 0.02 / 4),
    ]:
        # At least 64,000 draws: the relative error of a standard deviation is below 0.3 %.
        np.testing.assert_allclose(leaf.std(), stddev, rtol=0.02)
    first, second = blocks["mlp"]["up"]["kernel"][:2]
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.03


@pytest.mark.slow
@pytest.mark.nightly("gpt2-full", "gpt2-none", "llama-light", "experts-full")
@pytest.mark.parametrize("remat", ["none", "light", "full"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "experts"])
def test_bounded_gradients_know_every_layer(name, remat):
    """Book-keeping needs no per-unit copy of any parameter, and agrees with plain vmap."""
    model = LanguageModel(dataclasses.replace(VARIANTS[name], remat=remat))
    params, examples = perturbed(model), batch(4)
    ghost, plain = (
        jax.jit(clipped_grad(model.loss, clip_norm=0.5, strategy=s))(params, examples)
        for s in ("ghost", "vmap")
    )
    np.testing.assert_allclose(ghost.norms, plain.norms, rtol=1e-5)
    assert_trees_close(ghost.sum, plain.sum, rtol=1e-4)


@pytest.mark.slow
def test_nobody_moves_the_experts_of_others():
    """Of one unit gone and its data changed, all else is what it was."""
    model = LanguageModel(VARIANTS["experts"])
    params, examples = perturbed(model), batch(4)
    f = jax.jit(clipped_grad(model.loss, clip_norm=0.5, strategy="ghost"))
    others = np.array([True, False, True, True])
    without = f(params, examples, mask=others)
    for data in (examples, batch(6)):
        changed = jax.tree.map(lambda x, y: x.at[1].set(y[-1]), examples, data)
        moved = jax.tree.map(jnp.subtract, f(params, changed).sum, without.sum)
        size = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(moved)))
        assert 0.49 < size <= 0.5 * (1 + 1e-5)
        np.testing.assert_array_equal(f(params, changed).norms[others], without.norms[others])


def test_parameters_are_plain_float32_dicts():
    params = LanguageModel(VARIANTS["gpt2"]).init(jax.random.key(0))

    def check(node):
        if isinstance(node, dict):
            assert type(node) is dict
            assert all(isinstance(key, str) for key in node)
            for child in node.values():
                check(child)
        else:
            assert isinstance(node, jax.Array)
            assert node.dtype == jnp.float32

    check(params)


def test_bad_inputs():
    model = LanguageModel(SMALL)
    params = model.init(jax.random.key(0))
    with pytest.raises(BadInputError, match="13 tokens, but the model's max_seq_len is 12"):
        model.loss(params, example(length=13))
    with pytest.raises(BadInputError, match=r"use jax\.vmap for a batch"):
        model.logits(params, jnp.zeros((2, 5), jnp.int32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"remat": "some"}, "one of none, light, full"),
        ({"num_layers": True}, "num_layers is True"),
        ({"mlp_dim": 0}, "mlp_dim is 0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"dtype": "float16"}, "one of float32, bfloat16"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(BadInputError, match=message):
        dataclasses.replace(SMALL, **fields)


def test_config_survives_json_and_pydantic():
    assert dataclasses.replace(SMALL, remat=True).remat == "full"
    adapter = pydantic.TypeAdapter(TransformerConfig)
    plain = json.loads(json.dumps(dataclasses.asdict(SMALL)))
    assert adapter.validate_python(plain) == SMALL
    with pytest.raises(pydantic.ValidationError, match="embed_dmi"):
        adapter.validate_python({**plain, "embed_dmi": 4})
