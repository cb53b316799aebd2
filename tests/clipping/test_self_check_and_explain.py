"""The check before a run, and what `explain` says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import ZOO

from dpfl_jax.clipping import Flat, PerLayer, SelfCheckError, clipped_grad, self_check
from dpfl_jax.clipping.taps import leaves


@pytest.mark.nightly(
    "auto-lstm", "ghost-lstm", "auto-unsupported_mixture", "ghost-unsupported_mixture"
)
@pytest.mark.parametrize("name", ["lstm", "tied_embedding", "unsupported_mixture"])
@pytest.mark.parametrize("strategy", ["auto", "ghost", "scan"])
def test_self_check_passes(name, strategy):
    loss, params, batch = ZOO[name]()
    result = self_check(clipped_grad(loss, clip_norm=1.0, strategy=strategy), params, batch)
    assert result.units == 2
    assert result.max_relative_error < 1e-5


def test_self_check_ignores_padding():
    loss, params, batch = ZOO["tied_embedding"]()
    f = clipped_grad(loss, clip_norm=1.0)
    assert self_check(f, params, batch, mask=jnp.array([0, 0, 1, 0, 0])).units == 1
    assert self_check(f, params, batch, mask=jnp.zeros(5)).units == 0


@pytest.mark.parametrize("rule", [Flat(1.0), PerLayer(1.0)])
@pytest.mark.parametrize("bad", ["root of a negative", "data"])
def test_a_unit_with_nan_in_some_parameters_is_no_internal_error(rule, bad):
    def loss(params, x):
        return jnp.sqrt(params["w"] @ x) + jnp.square(params["b"] - x[0])

    batch = jnp.asarray([[-1.0, -2.0], [1.0, 2.0]])
    if bad == "data":
        batch = jnp.asarray([[jnp.nan, 1.0], [1.0, 2.0]])
    params = {"b": jnp.ones(()), "w": jnp.ones(2)}
    f = clipped_grad(loss, rule=rule, strategy="ghost")
    got = self_check(f, params, batch)
    assert got.max_relative_error < 1e-5
    assert self_check(f, params, batch[:1]).units == 1


@pytest.mark.slow
def test_self_check_finds_a_wrong_norm_and_names_the_parameter(monkeypatch):
    loss, params, batch = ZOO["lstm"]()
    right = leaves.squared_norm

    def wrong(pairs, shape, *rest):
        return right(pairs, shape, *rest) * (0.9 if shape == (4, 16) else 1.0)

    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="gram")
    self_check(f, params, batch)
    monkeypatch.setattr(leaves, "squared_norm", wrong)
    with pytest.raises(SelfCheckError, match="'wh'"):
        self_check(f, params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ghost"])
def test_units_that_cancel_are_no_error(strategy):
    def loss(params, example):
        x, y = example
        return jnp.logaddexp(0.0, -y * jnp.sum(x * params["w"]))

    x = jnp.asarray(np.random.default_rng(0).normal(size=33), jnp.float32)
    batch = (jnp.stack([x, x]), jnp.asarray([1.0, -1.0]))  # opposite, and of one norm when clipped
    f = clipped_grad(loss, clip_norm=0.1, strategy=strategy)
    params = {"w": 0.1 * x}
    assert float(jnp.linalg.norm(f(params, batch).sum["w"])) < 1e-6
    assert self_check(f, params, batch).max_relative_error < 1e-5


def test_self_check_finds_a_wrong_sum(monkeypatch):
    loss, params, batch = ZOO["lstm"]()
    right = leaves.summed_gradient

    def wrong(pairs, shape, weights, keep):
        return right(pairs, shape, weights, keep) * (1.1 if shape == (3, 16) else 1.0)

    monkeypatch.setattr(leaves, "summed_gradient", wrong)
    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="gram")
    with pytest.raises(SelfCheckError, match="'wx'"):
        self_check(f, params, batch)


def test_explain_says_which_parameter_and_why():
    loss, params, batch = ZOO["unsupported_mixture"]()
    found = clipped_grad(loss, clip_norm=1.0, strategy="ghost").explain(params, batch)
    by_name = {r.name: r for r in found.leaves}
    assert set(by_name) == set(params)
    assert by_name["dense"].uses == 1
    assert by_name["dense"].method in ("gram", "direct", "keep")
    for name, word in [("cum", "cumsum"), ("sort", "sort"), ("branch", "cond")]:
        assert by_name[name].method == "per-unit copies"
        assert word in by_name[name].reason
    assert by_name["unused"].method == "zero"
    assert all(name in str(found) for name in params)


def test_explain_counts_uses_and_asks_for_nothing_else():
    loss, params, batch = ZOO["tied_embedding"]()
    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="gram")
    (report,) = f.explain(params, batch).leaves
    assert report.uses == 2
    assert report.method == "gram"
    assert clipped_grad(loss, clip_norm=1.0, strategy="scan").explain(params, batch).leaves == ()


def test_auto_scans_over_long_units_that_recompute_and_books_the_rest():
    def loss(params, x, recompute):
        layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
        layer = jax.checkpoint(layer) if recompute else layer
        return jnp.sum(layer(layer(x, params["a"]), params["b"]) ** 2)

    params = {"a": jnp.zeros((256, 256)), "b": jnp.zeros((256, 256))}
    for recompute, length, want in [(1, 4096, "scan"), (0, 4096, "ghost"), (1, 1, "ghost")]:
        f = clipped_grad(lambda p, x, r=recompute: loss(p, x, r), clip_norm=1.0, platform="tpu")
        assert f.explain(params, jnp.zeros((8, length, 256))).strategy == want


@pytest.mark.parametrize(("dtype", "want"), [("float32", "keep"), ("bfloat16", "gram")])
def test_gram_matrices_of_float32_cost_a_gpu_more(dtype, want):
    """A language model's head: tensor cores, with which float32 is rounded, are not for them."""

    def loss(params, x):
        return jnp.sum(jnp.tanh((x @ params["head"].astype(dtype)).astype("float32")))

    params = {"head": jax.ShapeDtypeStruct((2048, 128_256), "float32")}
    batch = jax.ShapeDtypeStruct((8, 640, 2048), dtype)
    (head,) = clipped_grad(loss, clip_norm=1.0, platform="gpu").explain(params, batch).leaves
    assert head.method == want


@pytest.mark.parametrize(("platform", "length"), [("gpu", 1024), ("tpu", 1536)])
def test_gradients_are_kept_where_there_is_memory_for_them(platform, length):
    """However large they are; those that gain most for their bytes first."""

    def loss(params, x):
        wide = jnp.tanh(x @ params["up"].astype(x.dtype))
        return jnp.sum(
            jnp.tanh(wide @ params["down"].astype(x.dtype)) @ params["out"].astype(x.dtype)
        )

    shapes = {"up": (2048, 8192), "down": (8192, 2048), "out": (2048, 2)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((8, length, 2048), "bfloat16")

    def methods(memory_limit):
        f = clipped_grad(
            loss, clip_norm=1.0, strategy="ghost", platform=platform, memory_limit=memory_limit
        )
        return {leaf.name: leaf.method for leaf in f.explain(params, batch).leaves}

    assert methods(2.0**40) == {"up": "keep", "down": "keep", "out": "keep"}
    recorded = 8 * length * 2 * (2048 + 8192 + 8192 + 2048 + 2048 + 2)
    some = methods(recorded + 8 * (2048 * 8192 * 2 + 2**20))  # of one large gradient, in bfloat16
    assert sorted(some.values()) == ["gram", "keep", "keep"]
    assert "keep" not in methods(recorded).values()


def test_auto_splits_the_batch_to_stay_within_memory():
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]) ** 2)

    params, x = {"w": jnp.zeros((64, 64))}, jnp.zeros((8, 4, 64))
    f = clipped_grad(loss, clip_norm=1.0, platform="tpu", memory_limit=5000)
    found = f.explain(params, x)
    assert found.strategy in ("ghost", "scan")
    assert found.microbatch_size is not None
    assert found.microbatch_size < 8
    assert jax.jit(f)(params, x).norms.shape == (8,)


def masked_loss(params, x):
    hidden = jnp.tanh(x @ (params["w"] * jnp.tri(400, 800)) + params["b"])
    return jnp.sum((hidden @ params["v"]) ** 2)


def test_a_large_weight_that_is_copied_is_warned_of():
    params = {"w": jnp.ones((400, 800)), "b": jnp.ones(800), "v": jnp.ones((800, 3))}
    f = clipped_grad(masked_loss, clip_norm=1.0, strategy="ghost")
    found = f.explain(params, jnp.ones((4, 400)))
    assert found.summary == (
        "ghost clipping: norms of 1 of 3 parameters by book-keeping, of 2 from a copy for each "
        f"unit; {found.arithmetic:.2f} times the arithmetic without privacy"
    )
    assert "'w' (400, 800) is copied" in found.fallback(4)
    assert "4.88 MiB" in found.fallback(4)  # 4 units, 400 x 800 float32
    told = found.to_json(4)
    assert told["norms"]["per-unit copies"] == 2
    assert told["warning"] == found.fallback(4)


@pytest.mark.parametrize("strategy", ["auto", "ghost"])
def test_explain_counts_the_arithmetic(strategy):
    n, length, width = 8, 4, 64

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]))

    f = clipped_grad(loss, clip_norm=1.0, strategy=strategy, norm_method="gram")
    found = f.explain({"w": jnp.ones((width, width))}, jnp.ones((n, length, width)))
    assert found.strategy == "ghost"
    # Without privacy two products of 2 n L d^2; Gram matrices of both factors 2 n L^2 d each.
    assert found.arithmetic == pytest.approx(1 + length / width)
    assert "1.06 times the arithmetic without privacy" in found.summary
    assert found.to_json(n)["arithmetic"] == found.arithmetic


def test_biases_and_small_copies_are_not_warned_of():
    def plain(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    params = {"w": jnp.ones((4, 2**19)), "b": jnp.ones(2**19)}
    found = clipped_grad(plain, clip_norm=1.0, strategy="ghost").explain(params, jnp.ones((64, 4)))
    assert found.fallback(64) is None
    loss, params, batch = ZOO["unsupported_mixture"]()
    found = clipped_grad(loss, clip_norm=1.0, strategy="ghost").explain(params, batch)
    assert found.fallback(3) is None
    scan = clipped_grad(plain, clip_norm=1.0, strategy="scan")
    found = scan.explain({"w": jnp.ones((4, 2)), "b": jnp.ones(2)}, jnp.ones((64, 4)))
    assert found.summary.endswith("is formed and clipped (scan, 1 at a time)")
