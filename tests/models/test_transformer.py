"""The transformer: checked against NumPy, and against itself in its other forms."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpfl_jax.errors import BadInputError
from dpfl_jax.models import SIZES, LanguageModel, TransformerConfig, transformer_config

SMALL = TransformerConfig(vocab_size=23, max_seq_len=12, num_layers=2, embed_dim=16, num_heads=4)


def variant(**kwargs):
    return LanguageModel(dataclasses.replace(SMALL, **kwargs))


def tokens(seed=0, length=12):
    return jnp.asarray(np.random.default_rng(seed).integers(3, 23, length), jnp.int32)


def example(seed=0, length=12, real=12):
    return {"tokens": tokens(seed, length), "mask": jnp.arange(length) < real}


FORMS = {
    "default": {},
    "learned": {"positions": "learned"},
    "swiglu": {"activation": "swiglu"},
    "geglu": {"activation": "geglu"},
    "layer norm, biases": {"norm": "layer", "use_bias": True},
    "grouped queries": {"num_kv_heads": 2},
    "untied": {"tie_embeddings": False},
    "wide heads": {"head_dim": 8},
}


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_position_sees_its_own_or_a_later_token(form):
    model = variant(**form)
    params = model.init(jax.random.key(0))
    base = model.logits(params, tokens())
    for j in (0, 5, 11):
        changed = model.logits(params, tokens().at[j].set((tokens()[j] + 1) % 20))
        np.testing.assert_array_equal(changed[: j + 1], base[: j + 1])
        if j < 11:
            assert (np.asarray(changed[j + 1 :]) != np.asarray(base[j + 1 :])).any()


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_padding_changes_nothing(form):
    """Real tokens come first: what stands behind them has no influence on loss or gradient."""
    model = variant(**form)
    params = model.init(jax.random.key(0))
    short = example(real=7)
    other = {**short, "tokens": short["tokens"].at[7:].set(0)}
    a = jax.value_and_grad(model.loss)(params, short)
    b = jax.value_and_grad(model.loss)(params, other)
    chex.assert_trees_all_close(a, b, rtol=1e-6, atol=1e-7)


def numpy_forward(p, ids, heads):
    """A one-layer default model, written out."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    block = jax.tree.map(lambda x: x[0], p["blocks"])

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def rotary(x):
        width = x.shape[-1]
        angle = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = p["embedding"][np.r_[1, ids[:-1]]]
    h = norm(x, block["norm1"]["scale"])
    split = (len(ids), heads, -1)
    attention = block["attention"]
    q, k, v = ((h @ attention[n]["kernel"]).reshape(split) for n in ("query", "key", "value"))
    q, k = rotary(q), rotary(k)
    out = np.zeros_like(v)
    for head in range(heads):
        scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1])
        scores[np.triu_indices(len(ids), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head]
    x = x + out.reshape(len(ids), -1) @ attention["out"]["kernel"]
    h = norm(x, block["norm2"]["scale"]) @ block["mlp"]["up"]["kernel"]
    gelu = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    x = x + gelu @ block["mlp"]["down"]["kernel"]
    return norm(x, p["final_norm"]["scale"]) @ p["embedding"].T


@pytest.mark.nightly
def test_logits_and_loss_equal_a_numpy_forward_pass():
    model = variant(num_layers=1)
    params = jax.tree.map(lambda x: x * 5, model.init(jax.random.key(0)))
    expected = numpy_forward(params, np.asarray(tokens()), heads=4)
    np.testing.assert_allclose(model.logits(params, tokens()), expected, rtol=2e-4, atol=2e-4)
    log_probs = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    by_hand = -log_probs[np.arange(5), np.asarray(tokens())[:5]].mean()
    assert float(model.loss(params, example(real=5))) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.nightly
def test_scanned_and_unrolled_blocks_agree():
    scanned, unrolled = variant(), variant(scan_layers=False)
    params = scanned.init(jax.random.key(0))
    flat = {k: v for k, v in params.items() if k != "blocks"}
    for i in range(2):
        flat[f"block_{i}"] = jax.tree.map(lambda x: x[i], params["blocks"])  # noqa: B023
    np.testing.assert_allclose(
        scanned.logits(params, tokens()), unrolled.logits(flat, tokens()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scan_layers", "what"), [(True, True), (False, True), (True, ["query", "up"])]
)
def test_remat_changes_memory_not_values(scan_layers, what):
    plain = variant(scan_layers=scan_layers)
    remat = variant(scan_layers=scan_layers, remat=what)
    params = plain.init(jax.random.key(0))
    a = jax.value_and_grad(plain.loss)(params, example())
    b = jax.value_and_grad(remat.loss)(params, example())
    chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-7)


def test_remat_by_name_stores_the_results_of_these_projections(capsys):
    def stored(remat):
        model = variant(remat=remat, embed_dim=32, mlp_dim=96, scan_layers=False)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        jax.ad_checkpoint.print_saved_residuals(model.loss, shapes, example())
        return capsys.readouterr().out.count("[12,96]")

    assert stored("full") == stored(["query", "out"])
    assert stored(["up"]) == stored("full") + 2  # one for each block
    with pytest.raises(BadInputError, match="names among query, key"):
        variant(remat=["attention"])


@pytest.mark.nightly
def test_bfloat16_is_close_and_keeps_float32_parameters_and_loss():
    model = variant(dtype="bfloat16")
    params = model.init(jax.random.key(0))
    loss, gradient = jax.value_and_grad(model.loss)(params, example())
    assert loss.dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((params, gradient)))
    assert float(loss) == pytest.approx(float(variant().loss(params, example())), rel=2e-2)


def test_a_tied_head_is_the_embedding():
    assert "head" not in variant().init(jax.random.key(0))
    assert variant(tie_embeddings=False).num_params == variant().num_params + 23 * 16


@pytest.mark.nightly
def test_an_example_without_real_tokens_costs_nothing():
    model = variant()
    params = model.init(jax.random.key(0))
    loss, gradient = jax.value_and_grad(model.loss)(params, example(real=0))
    assert float(loss) == 0.0
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(gradient))


@pytest.mark.nightly
def test_a_small_batch_is_learnt_by_heart():
    model = variant()
    params = model.init(jax.random.key(0))
    batch = jax.vmap(lambda i: {"tokens": (tokens() + i) % 23, "mask": jnp.ones(12, bool)})(
        jnp.arange(4)
    )
    optimizer = optax.adam(0.02)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        loss, gradient = jax.value_and_grad(
            lambda p: jax.vmap(model.loss, (None, 0))(p, batch).mean()
        )(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(150):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[0] > 2.5
    assert losses[-1] < 0.3


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_parameters_their_name_says(size):
    vocab = 50_257 if size == "124m" else 32_000 if size == "350m" else 259
    extra = {"max_seq_len": 1024} if size == "124m" else {}
    count = LanguageModel(transformer_config(size, vocab_size=vocab, **extra)).num_params
    if size == "tiny":
        assert 200_000 < count < 400_000
    elif size == "124m":
        assert count == 124_439_808  # GPT-2 small
    else:
        assert count == pytest.approx(float(size[:-1]) * 1e6, rel=0.1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "not a multiple of num_heads"),
        ({"num_kv_heads": 3}, "not a multiple of num_kv_heads"),
        ({"activation": "relu"}, "activation"),
        ({"num_layers": 0}, "num_layers"),
        ({"bos_id": 23}, "bos_id"),
        ({"head_dim": 3}, "even head width"),
    ],
)
def test_impossible_shapes_are_one_sentence(fields, message):
    with pytest.raises(BadInputError, match=message):
        dataclasses.replace(SMALL, **fields)


def test_unknown_sizes_and_fields_are_named():
    with pytest.raises(BadInputError, match="size is 'big'"):
        transformer_config("big")
    with pytest.raises(BadInputError, match="did you mean 'num_layers'"):
        transformer_config("tiny", num_layer=2)


@pytest.mark.parametrize("form", [{}, {"positions": "learned"}], ids=["rotary", "learned"])
def test_without_a_beginning_a_sequence_is_read_from_its_first_token_which_is_not_predicted(form):
    model = variant(bos_id=None, **form)
    params, held = model.init(jax.random.key(0)), example(real=9)
    same = variant(bos_id=int(held["tokens"][0]), **form)
    rest = {name: array[1:] for name, array in held.items()}
    expected = jax.value_and_grad(same.loss)(params, rest)
    found = jax.value_and_grad(model.loss)(params, held)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    two = example(seed=1, real=6)
    row = {name: jnp.concatenate([held[name], two[name]]) for name in held}
    row["segments"] = jnp.repeat(jnp.array([1, 2]), 12)
    whole = jax.value_and_grad(lambda p: model.loss(p, held) + model.loss(p, two))(params)
    chex.assert_trees_all_close(
        jax.value_and_grad(model.loss)(params, row), whole, rtol=1e-5, atol=1e-6
    )
    only_first = {**held, "mask": jnp.arange(12) < 1}
    assert float(model.loss(params, only_first)) == 0.0
