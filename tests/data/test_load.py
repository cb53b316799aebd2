"""The single entry to data."""

import dataclasses

import pydantic
import pytest

from dpfl_jax.data import DataConfig, load_dataset
from dpfl_jax.errors import BadInputError


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [f'{{"who": "user{i % 40}", "said": "sentence number {i} of many"}}' for i in range(400)]
    path.write_text("\n".join(rows))
    return DataConfig(
        source="jsonl", path=str(path), user_column="who", text_column="said", seq_len=16
    )


def test_jsonl_end_to_end(jsonl):
    data = load_dataset(jsonl)
    assert data.public is None
    assert data.train.num_users + data.validation.num_users + data.test.num_users == 40
    assert data.tokenizer.vocab_size == 259
    assert "40 users" in data.description
    without = load_dataset(dataclasses.replace(jsonl, validation_fraction=0.0))
    assert without.validation is None
    assert without.test is not None


def test_public_text_file_and_folder(jsonl, tmp_path):
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "a.txt").write_text("public words " * 10)
    file = load_dataset(dataclasses.replace(jsonl, public=str(tmp_path / "public" / "a.txt")))
    folder = load_dataset(dataclasses.replace(jsonl, public=str(tmp_path / "public")))
    assert file.public.num_examples == folder.public.num_examples == 9


def test_errors(jsonl):
    for change, message in (
        ({"text_column": "text"}, "no column 'text'"),
        ({"path": "/nowhere.jsonl"}, "does not exist"),
        ({"path": None}, "no data files"),
        ({"tokenizer": "words"}, "neither 'bytes'"),
        ({"test_fraction": 0.001}, "test part holds none"),
        ({"test_fraction": 1.5}, "test_fraction is 1.5"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"max_users": 0}, "max_users is 0"),
        ({"public": "/nowhere"}, "does not exist"),
    ):
        with pytest.raises(BadInputError, match=message):
            load_dataset(dataclasses.replace(jsonl, **change))


def test_config_refuses_unknown_keys():
    adapter = pydantic.TypeAdapter(DataConfig)
    assert adapter.validate_python({"path": ["a", "b"]}).path == ("a", "b")
    with pytest.raises(pydantic.ValidationError, match="sourse"):
        adapter.validate_python({"sourse": "jsonl"})
    with pytest.raises(pydantic.ValidationError, match="seq_len"):
        adapter.validate_python({"seq_len": "long"})
