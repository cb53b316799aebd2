"""`dpfl bench pods`: which rows it makes, how it goes on, and what it says of them."""

import json

import pytest

from benchmarks import pods
from dpfl_jax.cli.main import main
from dpfl_jax.training.slices import collectives

SMALL = {"vocab_size": 300, "num_layers": 1, "embed_dim": 32, "num_heads": 2}


def bench(*args):
    return main(["bench", "pods", *map(str, args)])


def test_parameters_are_split_only_as_far_as_needed():
    gib = 2**30
    assert pods.parts_needed(124_000_000, "full", 16 * gib, 16) == 1
    assert pods.parts_needed(8_000_000_000, "full", 16 * gib, 256) == 16
    assert pods.parts_needed(8_000_000_000, "lora", 16 * gib, 256) == 4
    assert pods.parts_needed(8_000_000_000, "full", 16 * gib, 4) == 4  # no more devices


def test_users_are_processed_as_their_size_asks_for(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(
        pods, "compile_job", lambda job, *_: made.append(job) or {"error": "no", **vars(job)}
    )
    choice = ["--units", "uls", "--topologies", "v5e:16x16", "v5p:4x4x4", "--models"]

    def ways(*args):
        made.clear()
        assert bench(*choice, *args) == 0
        return [(j.trains, j.group_size, j.examples_at_once, j.split_users) for j in made]

    whole = ("full", 4, None, False)
    assert ways("gpt2-124m", "--train", "full") == [whole, whole]
    # An 8 B model is split on both slices, its frozen bfloat16 copy only where chips are small.
    split = ("full", 16, None, True)
    assert ways("llama-8b") == [split, split, ("lora", 4, 1, False), ("lora", 4, None, False)]
    assert ways("llama-8b", "--train", "full", "--users", "whole") == [whole, whole]
    assert ways("gpt2-124m", "--train", "full", "--fsdp", "2")[0] == split


def test_a_table_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    made = []

    def compiled(job, fsdp, limit):
        made.append(job)
        row = {"model": job.model, "trains": job.trains, "unit": job.unit}
        row |= {"topology": job.topology, "group_size": job.group_size, "parameters": 7_500_000_000}
        if job.unit == "uls":
            return {**row, "error": "not compiled within 5 s"}
        loop = {"kind": "all-gather", "in_loop": True, "bytes": 2**23}
        once = {"kind": "all-reduce", "in_loop": False, "bytes": 2**20}
        numbers = {"peak_bytes": 3 * 2**30, "hbm_bytes": 16 * 2**30, "flops_ratio": 1.04}
        return {**row, **numbers, "mesh": {"data": 4, "fsdp": 4, "tensor": 1}, "fits": True,
                "microbatch_size": 8, "largest_microbatch_size": 8,
                "collectives": [loop, once]}  # fmt: skip

    monkeypatch.setattr(pods, "compile_job", compiled)
    out, table = tmp_path / "rows.jsonl", tmp_path / "table.md"
    choice = ["--models", "llama-8b", "--train", "lora", "--topologies", "v5e:4x4", "--out", out]
    assert bench(*choice, "--units", "els") == 0
    assert len(made) == 1
    out.write_text(out.read_text() + '{"key": "cut sh')  # killed while writing
    out.write_text(out.read_text() + "\n")
    assert bench(*choice, "--markdown", table, "--json") == 0
    assert [job.unit for job in made] == ["els", "uls"]  # the first is not made again
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]) == 2
    lines = table.read_text().splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == [
        "llama-8b (7,500 M)", "lora", "example", "v5e:4x4", "4 x 4", "yes", "3.0 of 16",
        "8 (the largest)", "1.04", "all-reduce 1.0", "all-gather 8.0",
    ]  # fmt: skip
    assert "not compiled within 5 s" in lines[3]
    assert bench(*choice, "--time-limit", 0) == 0  # nothing is made
    assert bench(*choice, "--units", "els", "uls") == 0  # what went wrong is tried again
    assert [job.unit for job in made] == ["els", "uls", "uls"]


@pytest.mark.parametrize("bad", [["--models", "gpt-9"], ["--topologies", "v5e"]])
def test_what_is_unknown_is_refused(bad, capsys):
    assert bench("--units", "els", "--train", "full", "--models", "gpt2-124m", *bad) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert bad[1] in error


CONDITION = """%cond (t: (s32[], f32[4])) -> pred[] {
  %limit.1 = s32[]{:T(128)} constant(12)
  %count = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%count, %limit.1), direction=LT, metadata={op_name="lt"}
}
"""
LOOP = """%inner (p: f32[4]) -> f32[4] {
  ROOT %ar = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}
%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %c = f32[4]{0} call(%x), to_apply=%inner
}
ENTRY %main (a: f32[8,2]) -> f32[8,2] {
  %w = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%bodyTRIPS
  %h = f32[16]{0} all-gather(%g), dimensions={0}
}
"""


@pytest.mark.parametrize(
    "hlo",
    [
        LOOP.replace("TRIPS", ', backend_config={"known_trip_count":{"n":"12"}}'),
        CONDITION + LOOP.replace("TRIPS", ""),  # only the loop's condition says how often it turns
    ],
)
def test_what_a_loop_sends_counts_as_often_as_it_turns(hlo):
    found = {(c.kind, c.in_loop): c.bytes for c in collectives(hlo)}
    assert found == {("all-reduce", True): 12 * 16, ("all-gather", False): 64}


@pytest.mark.nightly
@pytest.mark.parametrize("trains", ["full", "lora"])
def test_a_row_is_compiled_in_a_process_of_its_own(monkeypatch, capsys, trains):
    monkeypatch.setitem(pods.MODELS, "small", SMALL)
    arguments = ["--models", "small", "--train", trains, "--units", "uls", "--seq-len", 16]
    assert bench(*arguments, "--fsdp", 2, "--topologies", "cpu:4", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["mesh"] == {"data": 2, "fsdp": 2, "tensor": 1}
    assert row["flops_ratio"] > 0.8
    assert row["temp_bytes"] > 0
    assert (row["trained_parameters"] == row["parameters"]) is (trains == "full")
    assert any(c["bytes"] > 0 for c in row["collectives"])
