"""Tokenisers made here and loaded from disk."""

import json
import os

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_jax.data import ByteTokenizer, load_tokenizer
from dpfl_jax.data.chats import load_chat_template
from dpfl_jax.errors import BadInputError
from dpfl_jax.models.checkpoint.files import read_json

CORPUS = ["the quick brown fox jumps over the lazy dog", "to be or not to be", "a b c d e f g"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(CORPUS, trainer)
    made.enable_truncation(4)  # must not survive loading: it would drop text
    made.enable_padding()
    made.save(str(path / "bpe.json"))
    text = path / "corpus.txt"
    text.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(text), model_prefix=str(path / "sp"), vocab_size=36, minloglevel=2
    )
    return path


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode_batch([text])[0].tolist() == ids


@pytest.mark.parametrize("name", ["bpe.json", "sp.model"])
def test_files_round_trip_and_keep_all_text(folder, name):
    tokenizer = load_tokenizer(folder / name)
    text = "the lazy dog jumps over the quick brown fox"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.bos_id not in ids
    assert tokenizer.eos_id is not None
    assert tokenizer.eos_id not in ids
    batch = tokenizer.encode_batch([text, "", "dog"])
    assert [b.tolist() for b in batch] == [ids, [], tokenizer.encode("dog")]
    assert all(np.issubdtype(b.dtype, np.integer) for b in batch)
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text


def test_fingerprints_differ_and_repeat(folder):
    names = ["bytes", folder / "bpe.json", folder / "sp.model"]
    prints = [load_tokenizer(n).fingerprint for n in names]
    assert len(set(prints)) == 3
    assert prints == [load_tokenizer(n).fingerprint for n in names]


def test_a_tokenizer_without_special_tokens_is_given_none(tmp_path):
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    )
    made.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(tmp_path / "words.json")
    assert (tokenizer.bos_id, tokenizer.vocab_size, tokenizer.eos_id) == (None, 2, None)
    assert tokenizer.decode([0]) == "a"


def test_bad_files(tmp_path):
    with pytest.raises(BadInputError, match="cannot read the tokenizer file"):
        load_tokenizer(tmp_path / "none.json")
    for name, message in (("x.json", "not a tokenizers JSON"), ("x.model", "not a SentencePiece")):
        (tmp_path / name).write_text("{}")
        with pytest.raises(BadInputError, match=message):
            load_tokenizer(tmp_path / name)
    for name in ("t.json", "t.jinja", "config.json"):  # of a folder that somebody sent: no end
        os.mkfifo(tmp_path / name)
    for read in (load_tokenizer, lambda path: load_chat_template("bytes", str(path))):
        with pytest.raises(BadInputError, match="regular file"):
            read(tmp_path / ("t.json" if read is load_tokenizer else "t.jinja"))
    with pytest.raises(BadInputError, match="regular file"):
        read_json(tmp_path / "config.json", "checkpoint")
    with pytest.raises(BadInputError, match="neither 'bytes' nor"):
        load_tokenizer("words")


def test_a_tokenizer_that_fails_on_a_text_is_named(tmp_path):
    """A panic of the library is no Exception, and its reason may quote the text."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}, unk_token="a"))
    told = json.loads(made.to_str())
    empty = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}
    told["pre_tokenizer"] = empty | {"invert": False}
    (tmp_path / "t.json").write_text(json.dumps(told))
    tokenizer, text = load_tokenizer(tmp_path / "t.json"), "a" * 40 + "b"
    for encode in (tokenizer.encode, lambda t: tokenizer.encode_batch([t])):
        with pytest.raises(BadInputError, match=r"t.json fails on a text") as error:
            encode(text)
        assert "aaa" not in str(error.value)
