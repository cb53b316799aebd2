"""Private rows that public data hold already are left out, each by itself."""

import json
import random

import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.data.near_duplicates import NearDuplicates
from dpfl_jax.data.shards import open_store

WORDS = [f"word{k}" for k in range(500)]


def text(seed, count=60):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def changed(words, places):
    out = words.split()
    for place in places:
        out[place] = "other"
    return " ".join(out)


def test_copies_with_small_changes_are_found_and_nothing_else():
    public = NearDuplicates(text(k) for k in range(200))
    for k in range(200):
        assert text(k) in public
        assert text(k).upper().replace(" ", ",  ") in public  # case, spaces and punctuation
        assert changed(text(k), [30]) in public  # 51 of 56 runs of five words, of 61 in all
        assert text(1000 + k) not in public
    # At the limit the similarity itself decides: 46 of 56 runs are 46/66 = 0.70 of all.
    assert changed(text(0), [10, 40]) not in public
    assert " ".join(text(0).split()[:30]) not in public  # a part is no near-duplicate
    assert text(0) + " " + text(7) not in public


def test_short_and_empty_texts():
    public = NearDuplicates(["Hello world", "", "!?"])
    assert "hello, world!" in public
    assert "hello there world" not in public
    assert "" not in public
    assert "..." not in public


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(out, *options):
    return main(["data", "build", "--out", str(out), "--seq-len", "16", *options, "--json"])


def test_a_build_leaves_out_private_rows_of_public_text(tmp_path, capsys):
    private = [{"user": f"u{k % 5}", "text": text(k)} for k in range(20)]
    mine = write(tmp_path / "mine.jsonl", private)
    public = write(tmp_path / "public.jsonl", [{"text": text(3)}, {"text": changed(text(8), [9])}])
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "page.txt").write_text(text(14))
    options = ("--input", mine, "--remove-near-duplicates-of", public, str(folder))
    assert build(tmp_path / "a", *options) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dropped_rows"] == 3
    kept = [row for k, row in enumerate(private) if k not in (3, 8, 14)]
    assert build(tmp_path / "b", "--input", write(tmp_path / "kept.jsonl", kept)) == 0
    stores = [open_store(tmp_path / name) for name in "ab"]
    assert stores[0].fingerprint == stores[1].fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--source", "shakespeare"), None),
        (("--source", "digits"), "compares texts"),
    ],
)
def test_only_texts_are_compared(tmp_path, capsys, options, message):
    public = write(tmp_path / "public.jsonl", [{"text": "to be"}])
    args = [*options, "--remove-near-duplicates-of", public]
    if message is None:
        args[-1] = str(tmp_path / "missing.jsonl")
        message = "missing.jsonl does not exist"
    assert build(tmp_path / "out", *args) == 2
    assert message in capsys.readouterr().err
