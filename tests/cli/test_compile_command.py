"""`dpfl compile` on this machine's own compiler, and its reading of compiled modules."""

import json
import types

import jax
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.training import slices
from dpfl_jax.training.slices import collectives, largest_that_fits

CONFIG = """
name: small
data: {source: python_source, seq_len: 16, tokenizer: bytes}
model: {size: tiny}
mechanism: {kind: uls, group_size: 2, cohort_size: 32}
privacy: {noise_multiplier: 1.0}
train: {steps: 3}
execution: {microbatch_size: 2}
"""


@pytest.fixture
def config(tmp_path):
    assert len(jax.devices()) == 8  # started: no command takes devices from the tests after it
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.nightly
def test_one_reduction_a_step_and_nothing_in_the_loop(config, capsys):
    assert (
        main(["compile", config, "execution.strategy=ghost", "--topology", "cpu:8", "--json"]) == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["devices"] == 8
    assert 0.9 < result["flops_ratio"] < 1.6
    assert result["temp_bytes"] > 0
    # On CPUs devices sum in a fixed order: each a part of everything, of which all get the sums.
    assert {c["kind"] for c in result["collectives"]} == {"all-to-all", "all-gather"}
    assert not any(c["in_loop"] for c in result["collectives"])
    # The sum is float32: all parameters once, and a few statistics.
    for sent in result["collectives"]:
        assert 4 * result["parameters"] <= sent["bytes"] <= 4 * result["parameters"] + 1000
    assert result["strategy"][0].startswith("ghost")


@pytest.mark.nightly
def test_the_average_of_the_iterates_is_counted(config, capsys):
    peaks = []
    for average in ("none", "ema"):
        change = [f"train.average={average}", "--topology", "cpu:2", "--no-baseline", "--json"]
        assert main(["compile", config, *change, "execution.mesh.fsdp=2"]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        peaks.append(result["peak_bytes"])
    # One more copy in float32; two devices share it, but for parameters that are not split.
    kept = peaks[1] - peaks[0]
    assert 2 * result["parameters"] <= kept <= 2.1 * result["parameters"]


@pytest.mark.nightly
def test_users_who_bring_their_own_bounds_are_counted(config, capsys):
    change = ["mechanism.kind=individual", "--topology", "cpu:1", "--count-only", "--json"]
    assert main(["compile", config, *change]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["mechanism"] == "individual"
    assert result["flops"] > 0


@pytest.mark.nightly
def test_adapters_alone_are_reduced(config, tmp_path, capsys):
    """The step of a checkpoint, from its config.json: what is sent is the size of the adapters."""
    shape = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    change = [f"model={{checkpoint: {tmp_path}, lora: {{rank: 2}}, frozen_dtype: bfloat16}}"]
    change += ["execution.strategy=ghost", "--topology", "cpu:8", "--json"]
    assert main(["compile", config, *change]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["trained_parameters"] == 2 * 4 * 2 * (32 + 32)
    adapters = 4 * result["trained_parameters"]
    for sent in result["collectives"]:
        assert adapters <= sent["bytes"] <= adapters + 1000
    assert not any(c["in_loop"] for c in result["collectives"])


@pytest.mark.parametrize("topology", ["v5e", "abacus:3", "cpu:0", "cpu:4096"])
def test_bad_topologies(config, topology, capsys):
    assert main(["compile", config, "--topology", topology]) == 2
    assert "compile" in capsys.readouterr().err


HLO = """
%inner (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %ar = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}
%fused.1 (q: f32[4]) -> f32[16] {
  %start = f32[16]{0} all-gather(%q), channel_id=7
  ROOT %s = f32[16]{0} custom-call(%start), custom_call_target="AsyncCollectiveStart"
}
%async_collective_fusion.1 (q: f32[4]) -> f32[16] {
  %middle = f32[16]{0} all-gather(%q), channel_id=7
}
%fused.2 (q: f32[4]) -> f32[16] {
  %end = f32[16]{0} all-gather(%q), channel_id=7
  ROOT %d = f32[16]{0} custom-call(%end), custom_call_target="AsyncCollectiveDone"
}
%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %c = f32[4]{0} call(%x), to_apply=%inner
}
ENTRY %main (a: f32[8,2]) -> f32[8,2] {
  %w = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body, TRIPS
  %g = (bf16[8,2]{1,0}, f32[3]{0}) all-reduce(%a, %b), to_apply=%add
  %h = f32[16]{0} all-gather(%g), dimensions={0}
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"12"}}')


def test_reads_collectives_by_kind_and_place():
    found = {(c.kind, c.in_loop): (c.count, c.bytes, c.sent) for c in collectives(HLO)}
    assert found == {
        ("all-reduce", True): (1, 12 * 16, 12 * 32),
        ("all-reduce", False): (1, 8 * 2 * 2 + 12, 2 * (8 * 2 * 2 + 12)),
        ("all-gather", False): (2, 128, 128),
    }


# As TPUs write them: a reduction of which each device keeps a part, and messages between slices.
TPU_HLO = """
%all-reduce-scatter.1.clone.1 (input: f32[8,2]) -> f32[2,2] {
  %all-reduce.1 = f32[8,2]{1,0} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}
}
ENTRY %main (a: f32[8,2]) -> f32[8,2] {
  %s = f32[2,2]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1.clone.1
  %r = f32[4,2]{1,0} reduce-scatter(%b), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
  %send = (f32[4,2]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%r, %after-all), channel_id=6, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %g = f32[8,2]{1,0} all-gather(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
  %m = f32[8,2]{1,0} all-gather(%y), replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, channel_id=7
  %n = f32[8,2]{1,0} all-gather(%z), replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}, channel_id=8
}
"""


def test_reads_what_a_device_sends_within_and_between_slices():
    found = {c.kind: (c.count, c.bytes, c.sent) for c in collectives(TPU_HLO)}
    assert found == {
        "reduce-scatter": (2, 128, 64 * 3 // 4 + 64 // 2),
        "all-gather": (3, 3 * 64, 32 + 48 + 48),
        "between slices": (1, 32, 32),
    }


@pytest.mark.parametrize("limit", range(0, 40, 3))
@pytest.mark.parametrize("start", [1, 4])
def test_the_largest_microbatch_is_found(limit, start):
    tried = []

    def peak(size):
        tried.append(size)
        return None if size > 64 else 5 + size  # refused by the compiler above 64

    want = max((2**k for k in range(7) if 5 + 2**k <= limit), default=0)
    assert largest_that_fits(peak, limit, start) == want
    assert len(tried) == len(set(tried)) <= 8


FITS = {1: 0, 2: 1, 4: 8, 8: 8, 16: 8}  # the largest microbatch, by parts of the parameters


def test_the_fastest_layout_that_fits_is_suggested(config, monkeypatch, capsys):
    """Four parts leave memory for a large microbatch; more parts would only send more."""
    tried = []

    def measure(config, vocab, topology, mesh, **options):
        mesh_of, once = dict(mesh.shape), config.execution.sum_over_fsdp == "step"
        parts = mesh_of.get("fsdp", 1)
        size = FITS[parts] // (2 if once else 1)
        tried.append((parts, config.execution.sum_over_fsdp))
        loop = {"kind": "all-gather", "in_loop": True, "count": 1, "bytes": 0,
                "sent": int(8e9 * (1 - 1 / parts)) // (2 if once else 1)}  # fmt: skip
        return {"mesh": mesh_of, "unit_parts": 8, "microbatch_size": max(size, 1),
                "flops": 1e9 * size,
                "largest_microbatch_size": size, "collectives": [loop], "topology": topology,
                "parameters": 1, "fits": True, "hbm_bytes": None, "peak_bytes": None,
                "flops_ratio": 1.0, "group_size": 2, "temp_ratio": None, "compile_seconds": 0,
                "strategy": []}  # fmt: skip

    here = [jax.devices()[0]]

    def slice_mesh(topology, axes, count):
        assert count == 1
        shape = {"data": 8 // axes["fsdp"], "fsdp": axes["fsdp"]}
        return types.SimpleNamespace(size=8, shape=shape, devices=here)

    monkeypatch.setattr(slices, "measure", measure)
    monkeypatch.setattr(slices, "slice_mesh", slice_mesh)
    assert main(["compile", config, "--topology", "v5e:2x4", "--suggest", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert tried == [(1, "auto"), (2, "auto"), (4, "auto"), (8, "auto"), (4, "step")]
    # 32 users, 8 x 8 at once, and half of the messages in 8 x 4: the same rows, fewer bytes.
    assert result["suggested"] == [
        "execution.mesh.fsdp=4", "execution.microbatch_size=4", "execution.sum_over_fsdp=step",
    ]  # fmt: skip
    assert "a device sends 2.79 GiB" in " ".join(captured.err.split())
    for parts in FITS:
        monkeypatch.setitem(FITS, parts, 0)
    assert main(["compile", config, "--topology", "v5e:2x4", "--suggest"]) == 2
    assert "no layout fits on v5e:2x4" in capsys.readouterr().err
    assert main(["compile", config, "--suggest", "--count-only"]) == 2
    assert "--suggest compiles, --count-only does not" in capsys.readouterr().err
