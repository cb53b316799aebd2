"""The first command, whole: what it learns, shows and leaves, and that others can open it."""

import json
import pathlib

import numpy as np
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config
from dpfl_jax.data import load_dataset
from dpfl_jax.training.start import data_section

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run directory, its report, and what was shown."""
    out = tmp_path_factory.mktemp("quickstart") / "run"
    assert main(["train", str(QUICKSTART), "--run-dir", str(out)]) == 0
    return out, json.loads((out / "report.json").read_text())


def test_its_data_and_model_are_those_that_come_with_the_package():
    """The same people for everybody, and no variable, file or network to have."""
    config = load_config(QUICKSTART)
    assert config.data.path is None
    data = load_dataset(data_section(config))
    assert data.train.num_users + data.validation.num_users == 1286
    mine = set(data.train.user_ids(range(data.train.num_users)))
    assert mine.isdisjoint(data.validation.user_ids(range(data.validation.num_users)))
    assert "Hamlet/HAMLET" in mine | set(data.validation.user_ids(range(data.validation.num_users)))


@pytest.mark.nightly
def test_privacy_costs_something_and_far_from_all(run):
    _, report = run
    assert report["privacy"]["unit"] == "user"
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    before, after = (report["eval"][when]["loss"] for when in ("initial", "final"))
    without = report["outside_guarantee"]["without_privacy"][-1]["loss"]
    assert without < after < before
    assert before - after > 0.5 * (before - without)


@pytest.mark.nightly
def test_it_leaves_a_picture_and_samples(run):
    out, report = run
    assert (out / "curves.png").stat().st_size > 10_000
    assert report["samples"]["before"] != report["samples"]["after"]
    for text in report["samples"].values():
        assert text.startswith(load_config(QUICKSTART).eval.prompt.strip())


@pytest.mark.nightly
def test_its_export_opens_in_transformers(run, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, _ = run
    capsys.readouterr()
    assert main(["export", str(folder), str(tmp_path / "out"), "--json"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("My lord, I am", return_tensors="pt").input_ids
    assert ids[0, 0] == theirs.config.bos_token_id
    with torch.no_grad():
        logits = theirs(ids).logits[0].numpy()
    from dpfl_jax.training.export import load_trained

    mine = load_trained(folder)
    np.testing.assert_array_equal(ids[0, 1:], mine.tokenizer.encode("My lord, I am"))
    found = np.asarray(mine.model.logits(mine.params, np.asarray(ids[0, 1:])))
    np.testing.assert_allclose(found, logits[: len(found)], atol=2e-4)
    assert (
        json.loads((tmp_path / "out" / "guarantee.json").read_text())["privacy"]["unit"] == "user"
    )
