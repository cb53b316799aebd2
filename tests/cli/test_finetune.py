"""From a checkpoint to an exported model with a guarantee, as docs/guides/finetune.md has it."""

import json

import jax
import numpy as np
import pytest
import yaml
from runs import final_state
from safetensors.numpy import load_file

from dpfl_jax.cli import finetune
from dpfl_jax.cli.main import build_parser, main
from dpfl_jax.config import load_config
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.config.load import make_config
from dpfl_jax.data import load_dataset
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.checkpoint import fingerprint, load_model, save_checkpoint
from dpfl_jax.models.params import flat_paths
from dpfl_jax.planning.candidates import at_budget
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.start import data_section

WORDS = ["river", "stone", "lamp", "green", "quiet", "seven", "horse", "under"]
LLAMA = TransformerConfig(
    vocab_size=16,
    max_seq_len=32,
    embed_dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=32,
    activation="swiglu",
    tie_embeddings=False,
    remat="none",
)


def write_tokenizer(path):
    import tokenizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {w: i + 3 for i, w in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.save(str(path))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A tiny Llama-style checkpoint with a tokeniser, and posts of 150 people."""
    folder = tmp_path_factory.mktemp("finetune")
    shapes = jax.eval_shape(LanguageModel(LLAMA).init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.2, shapes)
    for block in ("blocks", "norm1"), ("blocks", "norm2"), ("final_norm",):
        node = params
        for name in block:
            node = node[name]
        node["scale"] = np.ones_like(node["scale"])
    save_checkpoint(folder / "base", LLAMA, params)
    write_tokenizer(folder / "base" / "tokenizer.json")
    rows = []
    for user in range(150):
        for _ in range(int(rng.integers(1, 5))):
            start = rng.integers(8)  # words follow one another in a circle
            text = " ".join(WORDS[(start + i) % 8] for i in range(10))
            rows.append(json.dumps({"user": f"u{user}", "text": text}))
    (folder / "posts.jsonl").write_text("\n".join(rows))
    config = {
        "name": "finetune",
        "seed": 1,
        "data": {
            "source": "jsonl",
            "path": str(folder / "posts.jsonl"),
            "seq_len": 12,
            "tokenizer": "checkpoint",
            "validation_fraction": 0.2,
            "test_fraction": 0.0,
        },
        "model": {
            "checkpoint": str(folder / "base"),
            "lora": {"rank": 4, "alpha": 8.0, "targets": ["*/attention/*", "*/mlp/*"]},
            "overrides": {"remat": "none"},
        },
        "mechanism": {
            "kind": "uls",
            "group_size": 2,
            "cohort_size": 32,
            "clip_norm": 0.5,
            "clipping": "normalized",
        },
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "optimizer": {"name": "adam", "learning_rate": 0.03},
        "train": {"steps": 25, "checkpoint_every": 100},
        "execution": {"microbatch_size": 8},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def dpfl(capsys, *args):
    """Runs a command; returns its JSON and what a person would have read."""
    capsys.readouterr()
    assert main([*map(str, args), "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.err


def refused(capsys, *args):
    assert main([*map(str, args)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def held_out(folder):
    return load_dataset(data_section(load_config(folder / "config.yaml"))).validation


def loss_in_transformers(path, store):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    examples = store.read(np.arange(store.user_offsets[0], store.user_offsets[-1]))
    tokens = torch.from_numpy(np.asarray(examples["tokens"], np.int64))
    real = torch.from_numpy(np.asarray(examples["mask"], bool))
    read = torch.cat([torch.full((len(tokens), 1), model.config.bos_token_id), tokens[:, :-1]], 1)
    with torch.no_grad():
        log_probs = model(read).logits.log_softmax(-1)
    each = -log_probs.gather(-1, tokens[..., None])[..., 0] * real
    return float((each.sum(-1) / real.sum(-1)).mean())


ELS = "{kind: els, group_size: 2, batch_size: 64, clip_norm: 0.5, clipping: normalized}"
MECHANISM = {"uls": [], "els": [f"mechanism={ELS}"]}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["els", "uls"])
def test_adapters_are_trained_privately_exported_and_opened(kind, workspace, tmp_path, capsys):
    run = tmp_path / "run"
    report, shown = dpfl(
        capsys, "train", workspace / "config.yaml", *MECHANISM[kind], "--run-dir", run
    )
    before, after = (report["eval"][when]["loss"] for when in ("initial", "final"))
    assert after < before - 0.3
    assert report["privacy"]["unit"] == "user"
    assert report["privacy"]["epsilon"] <= 8.0
    assert "protects each user" in shown
    assert "taken as public" in report["guarantee"]

    # What was trained, and kept: adapters. Seven projections in each of two blocks.
    widths = [(24, 24), (24, 12), (24, 12), (24, 24), (24, 32), (24, 32), (32, 24)]
    assert report["model"]["trained"] == 2 * 4 * sum(i + o for i, o in widths)
    state = final_state(run)
    sizes = [np.size(x) for x in jax.tree.leaves(state["params"])]
    assert sum(sizes) == report["model"]["trained"]
    kept = sum(np.size(x) for x in jax.tree.leaves(state["opt_state"]) if np.size(x) > 1)
    assert kept == 2 * sum(sizes)

    # Out, and in again.
    result, _ = dpfl(capsys, "export", run, tmp_path / "out")
    stated = json.loads((tmp_path / "out" / "guarantee.json").read_text())
    assert stated["privacy"] == report["privacy"] == result["privacy"]
    dpfl(capsys, "verify", tmp_path / "out")
    beside = json.loads((tmp_path / "out" / "run.json").read_text())
    # Which base: by name and content, not by where it lay.
    weights = workspace / "base" / "model.safetensors"
    assert (
        beside["model"]["base"]
        == report["model"]["base"]
        == {
            "name": "base",
            "digest": fingerprint(workspace / "base"),
            "files": {"model.safetensors": weights.stat().st_size},
        }
    )
    assert str(workspace) not in json.dumps(beside)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    store = held_out(workspace)
    model, params = load_model(tmp_path / "out")
    evaluate = Evaluator(model.loss, data_parallel_mesh(jax.devices()[:1]))
    assert evaluate(params, store).loss == pytest.approx(after, abs=1e-4)
    base = flat_paths(load_model(workspace / "base")[1])
    for name, leaf in flat_paths(params).items():
        changed = "attention" in name or "mlp" in name
        assert np.array_equal(leaf, base[name]) != changed, name

    # The adapters alone, in peft's layout, give the merged weights by its formula.
    result, _ = dpfl(capsys, "export", run, tmp_path / "adapter", "--adapter")
    assert result["parameters"] == report["model"]["trained"]
    dpfl(capsys, "verify", tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["lora_alpha"], told["r"]) == ("base", 8.0, 4)
    alone = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    folders = (tmp_path / "out", workspace / "base")
    whole, began = (load_file(folder / "model.safetensors") for folder in folders)
    place = "model.layers.1.mlp.down_proj"
    down, up = (alone[f"base_model.model.{place}.lora_{x}.weight"] for x in "AB")
    change = whole[f"{place}.weight"] - began[f"{place}.weight"]
    np.testing.assert_allclose(change, 8.0 / 4 * up @ down, atol=1e-5)

    # Text: the same from the run and from what it was exported to.
    options = ["--prompt", "stone lamp", "--max-tokens", 6, "--temperature", 0]
    from_run, _ = dpfl(capsys, "sample", run, *options)
    from_export, _ = dpfl(capsys, "sample", tmp_path / "out", *options)
    assert from_run["tokens"] == from_export["tokens"]
    assert set(from_run["text"].split()) <= set(WORDS)

    assert loss_in_transformers(tmp_path / "out", store) == pytest.approx(after, abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["els", "uls"])
def test_speaking_roles_of_shakespeare(kind, tmp_path, capsys):
    """A Llama saved by ``transformers`` itself, bytes as tokens, real people of a play."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
    )
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path / "base", max_shard_size="80KB")
    config = {
        "name": "plays",
        "seed": 1,
        "data": {
            "source": "shakespeare",
            "seq_len": 32,
            "max_users": 300,
            "max_examples_per_user": 8,
        },
        "model": {
            "checkpoint": str(tmp_path / "base"),
            "lora": {"rank": 8, "targets": ["*/attention/*", "*/mlp/*"]},
            "overrides": {"remat": "none"},
        },
        "mechanism": CENTRAL.dump(
            at_budget(None, kind, 128, 4, clip_norm=0.5, clipping="normalized")
        ),
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "optimizer": {"name": "adam", "learning_rate": 0.02},
        "train": {"steps": 15, "checkpoint_every": 100},
        "execution": {"microbatch_size": 16},
    }
    file = tmp_path / "plays.yaml"
    file.write_text(yaml.safe_dump(config))
    report, shown = dpfl(capsys, "train", file, "--run-dir", tmp_path / "run")
    before, after = (report["eval"][when]["loss"] for when in ("initial", "final"))
    assert after < before - 0.5
    assert "differential privacy" in shown
    assert report["privacy"]["unit"] == "user"
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    dpfl(capsys, "export", tmp_path / "run", tmp_path / "out", "--max-file-size", 1e-4)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    store = load_dataset(data_section(load_config(file))).validation
    assert loss_in_transformers(tmp_path / "out", store) == pytest.approx(after, abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("choice", ["all", "last_layers", "[final_norm/scale, head]"])
def test_other_choices_change_nothing_else(choice, workspace, tmp_path, capsys):
    run = tmp_path / "run"
    changes = ["model.lora=null", f"model.trainable={choice}", "train.steps=3"]
    dpfl(capsys, "train", workspace / "config.yaml", *changes, "--run-dir", run)
    dpfl(capsys, "export", run, tmp_path / "out")
    base, new = (flat_paths(load_model(p)[1]) for p in (workspace / "base", tmp_path / "out"))
    for name, leaf in new.items():
        rows = [not np.array_equal(a, b) for a, b in zip(leaf, base[name])]
        if choice == "all":
            assert all(rows[3:11]) if name == "embedding" else any(rows), name
        elif choice == "last_layers":
            blocks = name.startswith("blocks")
            assert rows == [False, True] if blocks else any(rows) == (name == "final_norm/scale")
        else:
            assert any(rows) == (name in ("final_norm/scale", "head")), name


@pytest.mark.nightly
def test_a_killed_run_goes_on_with_the_same_base_alone(workspace, tmp_path, capsys):
    """Resumed from adapters and the base's files; refused if these have changed."""
    config = yaml.safe_load((workspace / "config.yaml").read_text())
    copy = tmp_path / "base"
    copy.mkdir()
    for file in (workspace / "base").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config["model"]["checkpoint"] = str(copy)
    config["train"] |= {"steps": 4, "checkpoint_every": 2}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    whole, _ = dpfl(capsys, "train", file, "--run-dir", tmp_path / "whole")
    dpfl(capsys, "train", file, "--run-dir", tmp_path / "cut")
    # As a kill after step 2 would have left it.
    (tmp_path / "cut" / "report.json").unlink()
    for path in sorted((tmp_path / "cut" / "checkpoints" / "4").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "cut" / "checkpoints" / "4").rmdir()
    again, _ = dpfl(capsys, "train", file, "--run-dir", tmp_path / "cut")
    assert again["eval"]["final"] == whole["eval"]["final"]
    (tmp_path / "cut" / "report.json").unlink()
    text = json.loads((copy / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (copy / "config.json").write_text(json.dumps(text))
    message = refused(capsys, "train", file, "--run-dir", tmp_path / "cut")
    assert "is not the one that the run" in message


def test_pricing_needs_no_weights(workspace, tmp_path, capsys):
    """A dry run on declared statistics reads config.json alone."""
    (tmp_path / "config.json").write_bytes((workspace / "base" / "config.json").read_bytes())
    price, _ = dpfl(
        capsys,
        "train",
        workspace / "config.yaml",
        f"model.checkpoint={tmp_path}",
        "population={num_users: 1000, num_examples: 5000}",
        "--dry-run",
    )
    assert price["trained_parameters"] == 2 * 4 * (48 + 36 + 36 + 48 + 56 + 56 + 56)
    assert price["parameters"] > price["trained_parameters"]
    assert price["epsilon"] <= 8.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.lora.targets=[attn]", "model.lora.targets ['attn'] fit no projection"),
        ("model.lora=null model.trainable=biases", "leaves no parameter to train"),
        ("model.lora=null model.trainable=[nothing/*]", "no parameter is called 'nothing/*'"),
        ("model.lora=null model.trainable=lora", "needs model.lora"),
        ("model.trainable=biases", "leaves them untrained"),
        ("model.size=350m", "both model.size and model.checkpoint"),
        ("model.overrides.num_layers=3", "model.overrides.num_layers is fixed by the checkpoint"),
        ("data.tokenizer=bytes", "tokeniser has 259 ids, but the checkpoint"),
        ("data.seq_len=33", "takes at most 32 tokens"),
        ("pretrain={steps: 3}", "both pretrain and model.checkpoint"),
        ("model.checkpoint=null", "data.tokenizer=checkpoint needs model.checkpoint"),
        ("model.checkpoint=nowhere", "there is no folder nowhere: give the folder"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change, message, workspace, tmp_path, capsys):
    arguments = change.split(" model.") if " model." in change else [change]
    arguments = [arguments[0], *("model." + a for a in arguments[1:])]
    if change.startswith("pretrain"):
        arguments.append("data.public=stdlib")
    run = tmp_path / "run"
    assert message in refused(
        capsys, "train", workspace / "config.yaml", *arguments, "--run-dir", run
    )
    assert not run.exists()


@pytest.mark.nightly
def test_adapters_of_which_one_factor_is_frozen_are_exported(workspace, tmp_path, capsys):
    """A stays as it was drawn (Sun et al. 2024, "FFA-LoRA"): no checkpoint holds it."""
    only_b = ["model.trainable=['*/lora_b']", "train.steps=2"]
    run = tmp_path / "run"
    dpfl(capsys, "train", workspace / "config.yaml", *only_b, "--run-dir", run)
    dpfl(capsys, "export", run, tmp_path / "adapter", "--adapter")
    alone = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(np.abs(value).max() > 0 for value in alone.values())
    dpfl(capsys, "train", workspace / "config.yaml", "train.steps=1", "model.trainable=['*']",
         "--run-dir", tmp_path / "all")  # fmt: skip
    message = refused(capsys, "export", tmp_path / "all", tmp_path / "no", "--adapter")
    assert "it trained" in message


def test_only_finished_runs_are_exported_and_sampled(tmp_path, capsys):
    assert "is not a run directory" in refused(capsys, "export", tmp_path, tmp_path / "out")
    (tmp_path / "config.yaml").write_text("{}")
    assert "is not finished" in refused(capsys, "sample", tmp_path, "--prompt", "a")


def test_one_command_makes_the_usual_choices_and_writes_nothing_when_asked_what_it_would_do(
    workspace, capsys, tmp_path
):
    out = tmp_path / "out"
    price, told = dpfl(
        capsys, "finetune", workspace / "base", workspace / "posts.jsonl", "--dry-run",
        "--epsilon", "4", "--out", out, "mechanism.cohort_size=16",
    )  # fmt: skip
    made = yaml.safe_load(told[: told.index("reading data")])
    assert told.startswith("# the learning rate is 0.004, the usual one for 300 steps of adapters")
    assert made["privacy"] == {"epsilon": 4.0}
    assert made["mechanism"]["kind"] == "uls"
    assert made["mechanism"]["cohort_size"] == 16
    assert made["model"]["lora"] == {"rank": 4, "alpha": 8, "targets": ["*/attention/*", "*/mlp/*"]}
    assert made["optimizer"]["name"] == "dp_adam_bc"
    assert made["optimizer"]["learning_rate"] == pytest.approx(0.07 / 300**0.5, rel=0.02)
    assert made["execution"]["packing"] == 8
    assert made["data"]["seq_len"] == LLAMA.max_seq_len
    assert price["privacy"]["epsilon"] <= 4.0
    assert price["trained_parameters"] < price["parameters"]
    # 6 floating-point operations take 1 / (6 x 0.4 x peak) of an hour's 3,600 seconds each.
    assert price["chip_hours"]["v5e"] == pytest.approx(
        price["training_flops"] / (0.4 * 197e12) / 3600, rel=0.06
    )
    assert not out.exists()


def test_the_usual_choices_of_other_data_and_of_all_parameters(workspace, tmp_path):
    def made(*arguments):
        args = build_parser("finetune").parse_args(
            ["finetune", str(workspace / "base"), *map(str, arguments)]
        )
        return finetune.configuration(args)

    pairs = made("pairs.jsonl", "--chosen-column", "good", "--rejected-column", "bad", "--full")
    assert pairs["model"]["dpo"] == {"beta": 0.1}
    assert pairs["execution"]["packing"] == 0
    assert "lora" not in pairs["model"]
    (tmp_path / "manifest.json").write_text("{}")
    store = made(tmp_path)
    assert store["data"]["source"] == "store"
    assert "seq_len" not in store["data"]
    assert made("hf:org/name/x.parquet")["data"]["source"] == "huggingface"


def chosen(workspace, *overrides, full=False, steps=300):
    """The configuration that ``dpfl finetune`` makes of the posts, and what it says of it."""
    overrides = [f"train.steps={steps}", "privacy.delta=1e-3", *overrides]
    arguments = ["finetune", str(workspace / "base"), str(workspace / "posts.jsonl"), *overrides]
    args = build_parser("finetune").parse_args(arguments + ["--full"] * full)
    raw = finetune.configuration(args)
    config = make_config(raw, overrides, workspace / "config.yaml")
    return finetune.choose(raw, config, overrides), raw


def test_the_learning_rate_follows_the_steps_and_what_is_trained(workspace):
    given = "mechanism.cohort_size=16"
    for full, reach in ((False, 0.07), (True, 0.026)):
        for steps, momentum in ((12, 0.58), (100, 0.9)):
            said, raw = chosen(workspace, given, full=full, steps=steps)
            rate = raw["optimizer"]["learning_rate"]
            assert rate == pytest.approx(reach / steps**0.5, rel=0.03)
            assert raw["optimizer"]["options"] == {"b1": momentum}
            assert f"the learning rate is {rate:g}, the usual one for {steps} steps" in said[0]
    said, raw = chosen(workspace, given, "optimizer={name: sgd, learning_rate: 1}")
    assert raw["optimizer"] == {"name": "sgd", "learning_rate": 1}
    assert said == []
    with pytest.raises(BadInputError, match=r"sgd: give optimizer\.learning_rate, too"):
        chosen(workspace, "optimizer.name=sgd")


def test_the_cohort_follows_the_number_of_people(workspace):
    rate = "optimizer.learning_rate=0.01"
    (said,), raw = chosen(workspace, rate, "privacy.epsilon=2")
    few = raw["mechanism"]["cohort_size"]
    assert 4 < few < 71  # of 150 people one in twenty is held out
    assert f"a step draws {few} of about 142 people: more would lower the noise by less" in said
    (said,), raw = chosen(workspace, rate, "population={num_users: 300000, num_examples: 400000}")
    assert raw["mechanism"]["cohort_size"] == 256
    assert "256 of about 300,000 people: more would lower the noise further" in said
    said, raw = chosen(workspace, rate, "mechanism.cohort_size=16")
    assert (said, raw["mechanism"]["cohort_size"]) == ([], 16)


@pytest.mark.slow
def test_one_command_trains_and_exports_and_never_over_another_run(workspace, capsys, tmp_path):
    arguments = ["finetune", workspace / "base", workspace / "posts.jsonl", "--steps", "1"]
    arguments += ["--synthesize", "3"]
    arguments += ["--out", tmp_path / "out", "mechanism.cohort_size=16", "execution.packing=0"]
    report, _ = dpfl(capsys, *arguments)
    assert report["status"] == "finished"
    assert report["privacy"]["epsilon"] <= 8.0
    load_model(tmp_path / "out" / "model")
    guarantee = json.loads((tmp_path / "out" / "model" / "guarantee.json").read_text())
    of_run = json.loads((tmp_path / "out" / "run" / "guarantee.json").read_text())
    assert guarantee.pop("digests")["run"] == of_run.pop("digests")["run"]
    assert guarantee == of_run
    rows = (tmp_path / "out" / "synthetic" / "rows.jsonl").read_text().splitlines()
    assert [[*json.loads(row)] for row in rows] == [["text"]] * 3
    assert main(["verify", str(tmp_path / "out" / "synthetic")]) == 0
    assert "is of another run" in refused(capsys, *arguments, "mechanism.group_size=2")
