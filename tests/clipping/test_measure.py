"""The choice of a way to clip by a clock: here one that is set by hand."""

import json

import jax
import jax.numpy as jnp
import pytest

from dpfl_jax.clipping import Explanation, Way, clipped_grad, fastest, gradients, measure

PARAMS = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((2, 512, 2048), jnp.bfloat16)


def loss(params, x):
    return jnp.sum(jnp.sin((x @ params["w"].astype(x.dtype)).astype(jnp.float32)))


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Seconds of each candidate, in order; what was measured; nothing is compiled or run."""
    monkeypatch.setenv("DPFL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # so that the kernel may be taken
    times, seen = [3.0, 2.0, 1.0], []

    def measured(gradient, values, seconds):
        seen.append(Way(gradient.strategy, gradient.microbatch_size, gradient.kernel))
        if (taken := times[len(seen) - 1]) is None:
            raise jax.errors.JaxRuntimeError("ptxas has no such instruction")
        return taken

    monkeypatch.setattr(measure, "_measured", measured)
    return times, seen


def choose(**options):
    return fastest(clipped_grad(loss, clip_norm=1.0, platform="gpu", **options), PARAMS, BATCH)


def test_the_fastest_way_is_taken_and_measured_once(clock, tmp_path):
    times, seen = clock
    times[:] = [3.0, 1.0, 2.0]
    best = choose()
    assert seen == [Way("ghost"), Way("ghost", kernel=True), Way("vmap")]
    assert best == seen[1]
    assert choose() == best
    assert len(seen) == 3
    (file,) = tmp_path.glob("clipping/*/*.json")
    assert json.loads(file.read_text()) == best.options
    times += times
    choose(memory_limit=1e9)  # another program
    assert len(seen) > 3


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_what_does_not_compile_is_not_chosen(clock, fails):
    times, seen = clock
    times[fails] = None
    best = choose()
    assert best == min(
        (w for i, w in enumerate(seen) if times[i]), key=lambda w: times[seen.index(w)]
    )


def test_book_keeping_is_measured_where_auto_prefers_a_scan(clock, monkeypatch):
    """As for long units whose loss recomputes."""
    _, seen = clock
    monkeypatch.setattr(gradients, "decide", lambda *_: Explanation("scan", 1, "it recomputes"))
    clock[0].append(4.0)
    choose()
    assert seen[0] == Way("scan", 1)
    assert [way.strategy for way in seen[1:]] == ["ghost", "ghost", "vmap"]


def test_where_nothing_runs_the_estimate_is_taken_and_not_cached(clock, tmp_path):
    times, seen = clock
    times[:] = [None] * 3
    assert choose() == seen[0]
    assert not list(tmp_path.glob("clipping/*/*.json"))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"strategy": "none"}', '{"strategy": "vmap", "kernel": 3}']
)
def test_a_bad_file_is_measured_again(clock, tmp_path, text):
    times, seen = clock
    best, count = choose(), len(seen)
    (file,) = tmp_path.glob("clipping/*/*.json")
    file.write_text(text)
    times += times
    assert choose() == best
    assert len(seen) == 2 * count


def test_a_real_clock_runs_what_it_measures(monkeypatch):
    monkeypatch.setenv("DPFL_CACHE_DIR", "off")
    f = clipped_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)), clip_norm=1.0)
    best = fastest(f, jnp.ones((4, 3)), jnp.ones((5, 4)))
    made = clipped_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)), clip_norm=1.0, **best.options)
    assert made(jnp.ones((4, 3)), jnp.ones((5, 4))).norms.shape == (5,)
