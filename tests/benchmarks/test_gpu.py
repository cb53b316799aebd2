"""``dpfl bench gpu``: ready without a GPU, and its rows are what they say."""

import dataclasses
import json

import pytest

from dpfl_jax.cli.main import main

benchmarks = pytest.importorskip("benchmarks._gpu_cells", reason="not in a checkout")


def test_cells_come_in_order_of_importance_and_hold_whole_users():
    found = benchmarks.cells(["1.2b", "350m"], [1024, 4096], ["full", "lora"], ["els", "uls"], 9000)
    assert [(c.trains, c.unit, c.seq_len, c.model) for c in found[:5]] == [
        ("full", "els", 1024, "1.2b"),
        ("full", "els", 1024, "350m"),
        ("full", "els", 4096, "1.2b"),
        ("full", "els", 4096, "350m"),
        ("lora", "uls", 1024, "1.2b"),
    ]
    assert len(found) == 16
    assert {(c.unit, c.seq_len): c.examples for c in found} == {
        ("els", 1024): 8,
        ("els", 4096): 4,
        ("uls", 1024): 8,
        ("uls", 4096): 8,
    }
    assert all(c.examples % benchmarks.GROUP_SIZE == 0 for c in found)


def test_sizes_are_those_that_they_are_called_after():
    import jax

    counts = {}
    for name in benchmarks.SIZES:
        cell = benchmarks.Cell(name, 1024, "full", "els", 8)
        shapes = jax.eval_shape(benchmarks.work(cell, False)[0], jax.random.key(0))
        counts[name] = sum(x.size for x in jax.tree.leaves(shapes))
    assert counts["350m"] == pytest.approx(350e6, rel=0.1)
    assert counts["1.2b"] == pytest.approx(1.2e9, rel=0.1)


def test_needed_products_of_full_training_are_six_for_each_parameter_and_token():
    """6 N D (Kaplan et al. 2020), with scores: 12 x layers x width x length for each token."""
    cell = benchmarks.Cell("1.2b", 1024, "full", "els", 8)
    tokens, parameters = 8 * 1024, 1_236e6
    want = (6 * parameters + 12 * 16 * 2048 * 1024) * tokens
    assert benchmarks._needed_flops(cell, False) == pytest.approx(want, rel=0.01)


def test_what_does_not_fit_is_a_sentence(capsys):
    assert main(["bench", "gpu", "--minutes", "0"]) == 2
    assert "--minutes above 0" in capsys.readouterr().err


def test_a_variant_that_cannot_be_built_is_a_row_that_says_so(monkeypatch):
    whole = benchmarks.variants

    def fails(trained, data):
        raise ValueError("no such kernel\nand more")

    def one_fails(*cell):
        return {"non-private": whole(*cell)["non-private"], "flat": (fails, 1)}

    monkeypatch.setattr(benchmarks, "variants", one_fails)
    cell = benchmarks.Cell("350m", 16, "full", "els", 8)
    rows = list(benchmarks.rows(benchmarks.Measuring((cell,), True, 1, 1.0, compile_only=True)))
    assert [row.get("error") for row in rows] == [None, "no such kernel"]
    assert rows[0]["lowered_bytes"] > 0
    assert "lowered_bytes" not in rows[1]


def test_ways_to_clip_lower_for_a_gpu_and_none_is_measured_twice():
    cell = benchmarks.Cell("1.2b", 16, "full", "els", 8)
    asked = benchmarks.Measuring((cell,), True, 1, 1.0, compile_only=True)
    rows = {row["variant"]: row for row in benchmarks.rows(asked)}
    same = "the same program as "
    assert {"flat", "flat, by the kernel", "flat, Gram matrices", "vmap"} <= set(rows)
    assert all("lowered_bytes" in row or row["error"].startswith(same) for row in rows.values())


def test_a_variant_may_have_parameters_of_its_own(monkeypatch):
    import jax.numpy as jnp

    def two_steps(config):
        return (lambda key: jnp.ones(config.num_layers)), lambda params, data: params * 2

    whole = benchmarks.variants
    plain = "non-private"
    monkeypatch.setattr(benchmarks, "variants", lambda *cell: {plain: whole(*cell)[plain]})
    monkeypatch.setattr(benchmarks, "tunix_step", two_steps)
    cell = benchmarks.Cell("1.2b", 16, "full", "els", 8)
    asked = benchmarks.Measuring((cell,), True, 1, 1.0, compile_only=False)
    ours, other = benchmarks._measured(cell, asked, with_noise=False)
    assert (other["variant"], other["parameters"]) == (benchmarks.TUNIX, 2)
    assert ours["parameters"] > 1000
    assert min(ours["seconds"], other["seconds"]) > 0
    users = benchmarks.Cell("1.2b", 16, "full", "uls", 8)
    lowered = dataclasses.replace(asked, compile_only=True)
    assert len(list(benchmarks._measured(users, lowered, with_noise=False))) == 1


@pytest.mark.parametrize(("model", "within"), [("1.2b", 1e-3), ("350m", 1e-2)])
def test_tunix_s_step_has_the_products_of_ours(model, within):
    """As many parameters and FLOPs (350 M: but for tunix's gated MLP), and float32 gradients."""
    pytest.importorskip("tunix")
    import jax

    from dpfl_jax.clipping.jaxprs import count_flops

    cell, key = benchmarks.Cell(model, 128, "full", "els", 4), jax.random.key(0)
    init, make_batch, _, config = benchmarks.work(cell, False)
    make, step = benchmarks.tunix_step(config)
    ours, theirs = jax.eval_shape(init, key)[0], jax.eval_shape(make, key)
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (theirs, ours)]
    assert sizes[0] == pytest.approx(sizes[1], rel=within)
    given = theirs, (None, jax.eval_shape(make_batch, key))
    assert {str(x.dtype) for x in jax.tree.leaves(jax.eval_shape(step, *given))} == {"float32"}
    needed = benchmarks._needed_flops(cell, False)
    assert count_flops(step, *given) == pytest.approx(needed, rel=within)


def test_a_second_call_goes_on_where_the_first_one_ended(capsys, monkeypatch, tmp_path):
    out = tmp_path / "rows.jsonl"
    cell = {"model": "1.2b", "seq_len": 16, "trains": "full", "unit": "els", "examples": 8}
    out.write_text(json.dumps({**cell, "variant": "non-private"}) + '\n{"model": "350')
    arguments = ["--tiny", "--train", "full", "--units", "els", "--minutes", "0.001"]
    assert main(["bench", "gpu", *arguments, "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [left["model"] for left in result["not_reached"]] == ["350m"]


@pytest.mark.nightly
def test_a_tiny_cell_runs_to_its_end(capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["--tiny", "--seq-lens", "16", "--models", "1.2b", "--train", "lora"]
    more = ["--units", "uls", "--rounds", "2", "--out", str(out), "--json"]
    assert main(["bench", "gpu", *arguments, *more]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["variant"]: row for row in result["rows"]}
    assert [json.loads(line) for line in out.read_text().splitlines()] == result["rows"]
    assert {"non-private", "flat", "vmap", "noise alone, exact"} <= set(rows)
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in result["rows"])
    assert rows["non-private"]["over_non_private"] == 1.0
    assert rows["flat"]["trained"] < rows["flat"]["parameters"]
    assert not result["not_reached"]


@pytest.mark.nightly
def test_what_minutes_do_not_pay_for_is_named(capsys):
    arguments = ["--tiny", "--seq-lens", "16", "--models", "350m", "--minutes", "0.02"]
    assert main(["bench", "gpu", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["rows"] == []
    assert len(result["not_reached"]) == 4
