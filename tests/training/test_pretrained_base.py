"""Adapters on what was pre-trained on public text: a run goes on from that base and no other."""

import json

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console

from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config, validate_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.models.params import without_adapters
from dpfl_jax.run.checkpoint import load_params, save_params
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.training.central_run import prepare
from dpfl_jax.training.export import load_trained
from dpfl_jax.training.start import Pretrained, build_transformer, check_pretrained


def base(path, **values):
    return Pretrained({k: np.float32(v) for k, v in values.items()}, path, cached=True)


@pytest.mark.parametrize("needed", [True, False])
def test_a_run_goes_on_from_the_base_it_began_with(needed, tmp_path):
    first = base(tmp_path / "cafe", w=1.0)
    rounded = base(tmp_path / "cafe", w=np.nextafter(np.float32(1), np.float32(2)))
    other = base(tmp_path / "beef", w=1.0)
    run = RunDirectory(tmp_path / "run", {}, None)
    check_pretrained(first, run, needed=needed)
    run.close()
    run = RunDirectory(tmp_path / "run", {}, None)
    assert run.facts["base"] == first.facts
    check_pretrained(first, run, needed=needed)
    for wrong in (rounded, other):
        with pytest.raises(BadInputError, match=r"is not the one that the run .* began with"):
            check_pretrained(wrong, run, needed=needed)
    # What is trained is in the checkpoint; what is not must still be the same.
    (run.path / "checkpoints" / "4").mkdir(parents=True)
    check_pretrained(first, run, needed=needed)
    with pytest.raises(BadInputError, match="began with"):
        check_pretrained(other, run, needed=needed)
    if needed:
        with pytest.raises(BadInputError, match="began with"):
            check_pretrained(rounded, run, needed=needed)
    else:
        check_pretrained(rounded, run, needed=needed)
    assert run.facts["base"] == first.facts
    run.close()


def test_a_public_corpus_may_move_and_is_known_by_its_content(tmp_path):
    posts = [{"user": f"u{i % 20}", "text": "river stone lamp"} for i in range(40)]
    (tmp_path / "posts.jsonl").write_text("\n".join(map(json.dumps, posts)))
    for name, text in (("first", "green lamp " * 9), ("moved", "green lamp " * 9), ("other", "x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "public.txt").write_text(text)

    def prepared(public):
        data = {"source": "jsonl", "path": str(tmp_path / "posts.jsonl"), "seq_len": 8}
        raw = {
            "data": {**data, "public": str(tmp_path / public / "public.txt"), "test_fraction": 0.0},
            "model": {"overrides": {"num_layers": 1, "embed_dim": 8, "num_heads": 1}},
            "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 4},
            "privacy": {"epsilon": 8.0, "delta": 1e-2},
            "train": {"steps": 2},
        }
        return prepare(validate_config(raw), Console(quiet=True))

    began = json.loads(json.dumps(prepared("first").facts()))
    run = RunDirectory(tmp_path / "run", {}, None, began)
    assert prepared("moved").resume_from(run).config.data.public.endswith("moved/public.txt")
    with pytest.raises(
        BadInputError, match=r"data\.public=.*other/public\.txt is not the one that"
    ):
        prepared("other").resume_from(run)
    run.close()


@pytest.mark.nightly
def test_a_pretrained_base_is_named_and_compared(tmp_path, capsys):
    words = ["river", "stone", "lamp", "green"]
    rng = np.random.default_rng(0)
    rows = [
        json.dumps({"user": f"u{user}", "text": " ".join(rng.choice(words, size=6))})
        for user in range(60)
    ]
    (tmp_path / "posts.jsonl").write_text("\n".join(rows))
    (tmp_path / "public.txt").write_text(" ".join(rng.choice(words, size=400)))
    config = {
        "name": "based",
        "seed": 1,
        "data": {
            "source": "jsonl",
            "path": str(tmp_path / "posts.jsonl"),
            "seq_len": 16,
            "public": str(tmp_path / "public.txt"),
            "validation_fraction": 0.2,
            "test_fraction": 0.0,
        },
        "model": {
            "size": "tiny",
            "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2},
            "lora": {"rank": 2, "targets": ["*/mlp/*"]},
        },
        "pretrain": {"steps": 2, "batch_size": 8, "cache_dir": str(tmp_path / "cache")},
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8, "clipping": "normalized"},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "train": {"steps": 2, "checkpoint_every": 1},
        "execution": {"microbatch_size": 4},
    }
    file, run = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(config))
    assert main(["train", str(file), "--run-dir", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (kept,) = (p for p in (tmp_path / "cache" / "pretrained").iterdir() if p.is_dir())
    assert report["model"]["base"]["name"] == kept.name
    known = yaml.safe_load((run / "config.yaml").read_text())["facts"]
    assert known["base"] == report["model"]["base"]

    load_trained(run)

    # As if it had been interrupted, and the base made again with other rounding.
    model = build_transformer(load_config(file), 259, 1)
    like = without_adapters(jax.eval_shape(model.init, jax.random.key(0)))
    params = load_params(kept, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like))
    for old in sorted(kept.rglob("*"), reverse=True):
        old.unlink() if old.is_file() else old.rmdir()
    kept.rmdir()
    save_params(kept, jax.tree.map(lambda x: np.nextafter(x, np.float32(9)), params))
    with pytest.raises(BadInputError, match="is not the one that this run began with"):
        load_trained(run)
    capsys.readouterr()
    (run / "report.json").unlink()
    assert main(["train", str(file), "--run-dir", str(run)]) == 2
    assert f"is not the one that the run in {run} began with" in capsys.readouterr().err
