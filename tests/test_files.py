"""Names of the Hugging Face hub: what the local cache holds is used, and nothing is downloaded."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml

from dpfl_jax.cli.main import main
from dpfl_jax.data import DataConfig, SourceConfig, load_examples, load_tokenizer
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import local_path
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.checkpoint import describe, read_config, save_checkpoint

constants = pytest.importorskip("huggingface_hub.constants")
LLAMA = TransformerConfig(
    vocab_size=16,
    max_seq_len=32,
    embed_dim=8,
    num_layers=1,
    num_heads=2,
    mlp_dim=16,
    activation="swiglu",
    tie_embeddings=False,
)


def snapshot(home, kind, name, commit="0" * 39 + "1"):
    """An empty snapshot as downloads leave it; returns its folder."""
    folder = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    made = folder / "snapshots" / commit
    made.mkdir(parents=True)
    return made


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache with a model and a data set, and no way out to the network."""
    import tokenizers

    model = snapshot(tmp_path, "model", "org/tiny")
    shapes = jax.eval_shape(LanguageModel(LLAMA).init, jax.random.key(0))
    save_checkpoint(model, LLAMA, jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes))
    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "lamp", "stone"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(model / "tokenizer.json"))
    data = snapshot(tmp_path, "dataset", "org/posts") / "data"
    data.mkdir()
    rows = [{"user": f"u{i // 2}", "text": "lamp stone"} for i in range(60)]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    # What HF_HOME sets where the library is first imported; a process of its own is asked below.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_of_the_cache(home):
    name = "hf:org/tiny"
    folder = next((home / "hub" / "models--org--tiny" / "snapshots").iterdir())
    assert local_path(name, "model") == str(folder)
    assert read_config(name) == read_config(folder)
    assert load_tokenizer(name).encode("lamp stone") == [3, 4]
    assert describe(name) == describe(folder) | {"name": name}
    shapes = jax.eval_shape(LanguageModel(LLAMA).init, jax.random.key(0))
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    kept = save_checkpoint(home / "out", LLAMA, params, like=name)
    assert (kept / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_data_set_of_the_cache(home):
    for path in ("hf:org/posts/data/train.jsonl", "hf:org/posts/data/*.jsonl"):
        found = load_examples(DataConfig(source="jsonl", path=path, seq_len=32))
        assert (found.store.num_users, found.store.num_examples) == (30, 60)


def test_a_run_by_names(home, capsys):
    config = {
        "data": {"source": "jsonl", "path": "hf:org/posts/data/train.jsonl", "seq_len": 8,
                 "tokenizer": "checkpoint"},
        "model": {"checkpoint": "hf:org/tiny"},
        "mechanism": {"kind": "uls", "group_size": 1, "cohort_size": 4},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "train": {"steps": 2},
    }  # fmt: skip
    (home / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "run.yaml", "--dry-run", "--json"]) == 0
    price = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert price["parameters"] == LanguageModel(LLAMA).num_params
    assert "taken as public" in price["guarantee"]


def test_what_the_cache_does_not_hold_is_one_sentence_with_the_command(home):
    for name, kind, match in (
        ("hf:org/other", "model", "`hf download org/other` does that"),
        ("org/tiny", "model", "no file or folder org/tiny: if .* hub, write hf:org/tiny"),
        ("hf:org/tiny/../../x", "model", "is not a name on the Hugging Face hub"),
        ("hf:org/tiny", "dataset", "`hf download org/tiny --repo-type dataset` does that"),
        ("hf:nothing", "model", "is not a name on the Hugging Face hub: write hf:org/name"),
    ):
        with pytest.raises(BadInputError, match=match) as caught:
            local_path(name, kind)
        assert "\n" not in str(caught.value)


def test_paths_stay_paths(home):
    (home / "org").mkdir()
    (home / "org" / "tiny").mkdir()
    assert local_path("org/tiny", "model") == "org/tiny"  # what is there comes first
    for path in ("posts.jsonl", "data/posts.jsonl", "./a/b", "/no/where", "a/b/c", "parts/*.csv"):
        assert local_path(path, "dataset") == path
    assert local_path(pathlib.Path("a/b.json"), "model") == "a/b.json"


def test_without_the_package_it_is_one_sentence(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BadInputError, match="pip install huggingface_hub"):
        local_path("hf:org/tiny", "model")


def test_hf_home_says_where_the_cache_is(tmp_path):
    folder = snapshot(tmp_path, "model", "org/tiny")
    code = "from dpfl_jax.files import local_path; print(local_path('hf:org/tiny', 'model'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(folder)


def test_no_function_takes_an_address_for_a_folder(tmp_path, monkeypatch):
    import dpfl_jax as dpfl
    from dpfl_jax.accounting import Ledger, statement
    from dpfl_jax.data import load_tokenizer
    from dpfl_jax.data.build import write_store
    from dpfl_jax.data.shards import open_store
    from dpfl_jax.federation import PrivateClient
    from dpfl_jax.models.checkpoint import save_checkpoint
    from dpfl_jax.planning.scaling_law import ScalingLaw
    from dpfl_jax.run.checkpoint import Checkpoints, save_params
    from dpfl_jax.run.directory import RunDirectory
    from dpfl_jax.synthesis import synthesize

    monkeypatch.chdir(tmp_path)
    store = dpfl.from_arrays({"x": np.zeros((2, 1), "float32")}, users=[0, 1])
    shapes = jax.eval_shape(LanguageModel(LLAMA).init, jax.random.key(0))
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
    at = "ftp://host/x"
    for call in (
        lambda: write_store(store, at),
        lambda: open_store(at),
        lambda: load_examples(SourceConfig(source="store", path=at)),
        lambda: load_tokenizer(at),
        lambda: Ledger(at),
        lambda: RunDirectory(at, {}),
        lambda: Checkpoints(pathlib.Path(at), 1),
        lambda: save_params(pathlib.Path(at), params),
        lambda: dpfl.export("run", at),
        lambda: dpfl.export(at, "model"),
        lambda: dpfl.load_exported(at),
        lambda: save_checkpoint(at, LLAMA, params),
        lambda: statement.read(at),
        lambda: ScalingLaw.load(at),
        lambda: synthesize("run", f"{at}/rows.jsonl", 1),
        lambda: synthesize(at, "rows.jsonl", 1),
        lambda: synthesize("run", "rows.jsonl", 1, report=at),
        lambda: PrivateClient(at, epsilon=1.0, delta=1e-5, rounds=1, clip_norm=1.0),
    ):
        with pytest.raises(BadInputError, match="is an address"):
            call()
    assert not list(tmp_path.iterdir())
