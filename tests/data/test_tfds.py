"""TFDS builders made here: random access, grouped by a key expression, without TensorFlow."""

import json
import sys

import numpy as np
import pytest

tfds = pytest.importorskip("tensorflow_datasets")

from dpfl_jax.data import ByteTokenizer  # noqa: E402
from dpfl_jax.data.build import BuildPlan, build_store  # noqa: E402
from dpfl_jax.data.sources import tfds_source  # noqa: E402
from dpfl_jax.errors import BadInputError  # noqa: E402

NUM = 200


class Posts(tfds.core.GeneratorBasedBuilder):
    """Posts of users, with an image each."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "author": tfds.features.Text(),
                    "url": tfds.features.Text(),
                    "body": tfds.features.Text(),
                    "image": tfds.features.Tensor(shape=(4, 4), dtype=np.uint8),
                    "label": np.int64,
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(NUM):
            yield (
                i,
                {
                    "author": f"author {i % 11}",
                    "url": f"https://www.site{i % 5}.org/{i}",
                    "body": f"post number {i} é",
                    "image": np.full((4, 4), i % 256, np.uint8),
                    "label": i,
                },
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    builder = Posts(data_dir=tmp_path_factory.mktemp("tfds"), file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_path)


def test_text_by_key_expression(folder, tmp_path):
    source = tfds_source(folder, "domain(url)", text_column="body")
    plan = BuildPlan.for_text("bytes", 32, num_shards=2)
    store = build_store(source.rows, tmp_path / "store", plan, sources=source.identity)
    names = store.user_ids(range(store.num_users))
    assert sorted(names) == [f"site{k}.org" for k in range(5)]
    assert store.num_examples == NUM
    batch = store.read(np.arange(NUM))
    texts = [ByteTokenizer().decode(t[m]) for t, m in zip(batch["tokens"], batch["mask"])]
    assert sorted(texts) == sorted(f"post number {i} é" for i in range(NUM))
    for u, name in enumerate(names):
        rows = texts[store.user_offsets[u] : store.user_offsets[u + 1]]
        assert {int(t.split()[2]) % 5 for t in rows} == {int(name[4])}
    assert "tensorflow" not in sys.modules


def test_arrays_by_column(folder, tmp_path):
    source = tfds_source(folder, "author")
    plan = BuildPlan(source.schema, tokenizer=None)
    store = build_store(source.rows, tmp_path / "store", plan, sources=source.identity)
    assert store.num_users == 11
    for u, name in enumerate(store.user_ids(range(11))):
        rows = store.read(np.arange(*store.user_offsets[u : u + 2]))
        assert set(rows) == {"image", "label"}
        assert (rows["label"] % 11 == int(name.split()[1])).all()
        assert (rows["image"] == (rows["label"] % 256)[:, None, None]).all()


@pytest.mark.parametrize("change", [3, -3])
def test_metadata_that_disagree_with_the_files_are_refused(folder, tmp_path, change):
    import shutil

    copy = tmp_path / "1.0.0"
    shutil.copytree(folder, copy)
    path = copy / "dataset_info.json"
    info = json.loads(path.read_text())
    lengths = info["splits"][0]["shardLengths"]
    lengths[0] = str(int(lengths[0]) + change)
    path.write_text(json.dumps(info))
    message = rf"{NUM} examples but its metadata says {NUM + change}"
    with pytest.raises(BadInputError, match=message):
        tfds_source(str(copy), "author", text_column="body")


def test_features_name_no_code_of_others(tmp_path, monkeypatch):
    (tmp_path / "planted_features.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for features in (
        {"pythonClassName": "tensorflow_datasets.core.features.FeaturesDict",
         "featuresDict": {"features": {"a": {"python_class_name": "planted_features.Text"}}}},
        {"type": "planted_features.Text", "content": {}},
    ):  # fmt: skip
        (tmp_path / "features.json").write_text(json.dumps(features))
        for name, more in ((str(tmp_path), {}), ("posts", {"data_dir": str(tmp_path)})):
            with pytest.raises(BadInputError, match=r"features.json names 'planted_features.Text'"):
                tfds_source(name, "author", text_column="body", **more)


def test_a_format_that_loses_examples_is_refused(tmp_path):
    """Parquet is prepared in row groups of which only the first can be read by random access."""
    builder = Posts(data_dir=tmp_path, file_format="parquet")
    builder.download_and_prepare()
    source = tfds.builder_from_directory(str(builder.data_path)).as_data_source(split="train")
    if len(source) == NUM:
        assert tfds_source(str(builder.data_path), "author", text_column="body") is not None
    else:
        with pytest.raises(BadInputError, match="its metadata says"):
            tfds_source(str(builder.data_path), "author", text_column="body")


def test_errors(folder, tmp_path):
    for name, key, settings, message in (
        (str(tmp_path), "author", {}, "cannot open the TFDS data set"),
        ("no_such_set", "author", {"data_dir": str(tmp_path)}, "cannot open the TFDS data set"),
        (folder, "author", {"split": "test"}, "has no split 'test'"),
        (folder, "exec(url)", {}, "unknown function in the key"),
        (folder, "", {}, "user column is empty"),
    ):
        with pytest.raises(BadInputError, match=message):
            tfds_source(name, key, **{"text_column": "body", **settings})
    source = tfds_source(folder, "writer", text_column="body")
    with pytest.raises(BadInputError, match=r"example 0: there is no column 'writer'"):
        next(source.rows())


def test_silos_take_a_store_made_from_tfds(folder, tmp_path):
    """Images with labels from any builder: the users of the store are the subjects."""
    from dpfl_jax.data import DataConfig
    from dpfl_jax.federation.partition import load_subjects

    source = tfds_source(folder, "author")
    plan = BuildPlan(source.schema, tokenizer=None)
    build_store(source.rows, tmp_path / "store", plan, sources=source.identity)
    options = {"source": "store", "path": str(tmp_path / "store"), "split": "within_user"}
    data = load_subjects(DataConfig(classes=NUM, **options))
    assert data.train.num_users == 11
    assert data.train.num_examples + data.held_out.num_examples == NUM
    assert data.task.input_shape == (4, 4)
    for part in (data.train, data.held_out):
        found = part.read(np.arange(part.num_examples))
        np.testing.assert_allclose(found["x"][:, 0, 0], found["label"] / 255, rtol=1e-6)
        owner = np.repeat(part.user_ids(range(part.num_users)), part.examples_per_user)
        assert [f"author {n % 11}" for n in found["label"]] == list(owner)
    for bad, message in (
        ({}, "set data.classes"),
        ({"classes": 5}, "whole numbers from 0 to 4"),
        ({"classes": NUM, "input_columns": ("pixels",)}, "no field 'pixels'"),
    ):
        with pytest.raises(BadInputError, match=message):
            load_subjects(DataConfig(**options, **bad))
