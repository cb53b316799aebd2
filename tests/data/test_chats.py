"""Chats, instructions and preferences: which tokens are answers, and rows that are none."""

import csv
import dataclasses
import datetime
import json
import re

import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import pytest
import tokenizers

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.data import DataConfig, load_dataset, load_examples, load_tokenizer
from dpfl_jax.data.chats import ChatTemplate, conversations_in, load_chat_template
from dpfl_jax.data.shards import open_store

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' %}{% generation %}{{ '\n' + m.content }}<|im_end|>"
    "{% endgeneration %}\n{%- else %}{{ '\n' + m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie geht's? 🙂"},
    {"role": "assistant", "content": "Gut, größer 🙃"},
    {"role": "user", "content": "Und nun"},
    {"role": "assistant", "content": "Ende"},
]
SAYS = {"role": "assistant", "content": "Yes"}
ASKS = {"role": "user", "content": "Well?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE tokeniser with ChatML's tokens and template, as a checkpoint has them."""
    path = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["assistant user system Wie geht's Gut Ende"] * 9, trainer)
    made.save(str(path / "tokenizer.json"))
    settings = {
        "chat_template": CHATML,
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def answers(store, tokenizer, row=0, which=...):
    """Text of an example's masked tokens, special ones too, and of all of them."""
    held = store.read(np.array([row]))
    tokens, mask = held["tokens"][0][which], held["mask"][0][which]
    library = load_tokenizer(tokenizer)._tokenizer
    filled = tokens[: np.flatnonzero(mask)[-1] + 1]
    texts = (library.decode(t.tolist(), skip_special_tokens=False) for t in (tokens[mask], filled))
    return tuple(texts)


def rows(*, data_rows, seq_len=160, **more):
    return dpfl.from_rows(data_rows, user="user", seq_len=seq_len, **more)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_mask_covers_exactly_the_answers(folder, tmp_path, template):
    file = tmp_path / "t.jinja"
    file.write_text(template)
    store = rows(
        data_rows=[{"user": "a", "m": CHAT}],
        messages="m",
        tokenizer=str(folder),
        chat_template=str(file),
    )
    learned, all_of_it = answers(store, str(folder))
    after = "\n" if template == CHATML else ""
    first, second = (CHAT[i]["content"] for i in (2, 4))
    start = "\n" if template == MARKED else ""
    assert learned == f"{start}{first}<|im_end|>{after}{start}{second}<|im_end|>{after}"
    start = "<s>" if template == MARKED else ""
    assert all_of_it.startswith(f"{start}<|im_start|>system\nBe brief.<|im_end|>")
    assert all_of_it.endswith(learned[-12:])


def test_files_of_every_kind_and_a_built_store_hold_the_same(folder, tmp_path):
    table = [{"user": u, "messages": CHAT[:n]} for u, n in (("a", 5), ("b", 3), ("a", 3))]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, table)))
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "x.parquet")
    with (tmp_path / "x.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "messages"])
        writer.writerows([row["user"], json.dumps(row["messages"])] for row in table)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    human = [
        {**row, "messages": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}
        for row in table
        if (messages := row["messages"])
    ]
    (tmp_path / "sharegpt.jsonl").write_text("\n".join(map(json.dumps, human)))
    common = {"messages_column": "messages", "tokenizer": str(folder), "seq_len": 64}
    prints = set()
    for kind in ("jsonl", "parquet", "csv"):
        found = load_examples(DataConfig(source=kind, path=str(tmp_path / f"x.{kind}"), **common))
        assert (found.task.kind, found.store.num_users, found.dropped) == ("tokens", 2, 0)
        prints.add(found.store.fingerprint)
    found = load_examples(
        DataConfig(source="jsonl", path=str(tmp_path / "sharegpt.jsonl"), **common)
    )
    prints.add(found.store.fingerprint)
    command = ["data", "build", "--input", str(tmp_path / "x.jsonl"), "--messages-column"]
    command += ["messages", "--tokenizer", str(folder), "--seq-len", "64", "--workers", "1"]
    assert main([*command, "--out", str(tmp_path / "S")]) == 0
    prints.add(open_store(tmp_path / "S").fingerprint)
    data = load_dataset(
        DataConfig(source="store", path=str(tmp_path / "S"), tokenizer=str(folder),
                   validation_fraction=0.0, test_fraction=0.0)
    )  # fmt: skip
    prints.add(data.train.fingerprint)
    assert len(prints) == 1
    assert data.task.kind == "tokens"
    assert data.task.input_shape == (64,)


def test_prompts_and_completions(folder):
    row = {"user": "a", "p": "2 + 2 = ", "c": "4"}
    store = rows(data_rows=[row], prompt="p", completion="c", tokenizer=str(folder))
    assert answers(store, str(folder)) == ("4</s>", "2 + 2 = 4</s>")
    row = {"user": "a", "p": CHAT[:4], "c": CHAT[4:]}  # the earlier answer is not learned
    store = rows(data_rows=[row], prompt="p", completion="c", tokenizer=str(folder))
    assert answers(store, str(folder))[0] == "Ende<|im_end|>\n"


def test_a_model_that_would_prepend_a_second_beginning_is_refused():
    row = {"user": "a", "p": "2 + 2 = ", "c": "4"}
    plan = dpfl.uls(group_size=1, cohort_size=1, sampling_prob=0.5).plan(
        rows(data_rows=[row], prompt="p", completion="c"), steps=1, epsilon=1e3, delta=0.1
    )
    model = dpfl.LanguageModel(dpfl.transformer_config("tiny", vocab_size=259))
    with pytest.raises(dpfl.BadInputError, match=r"prepend another.*bos_id=None"):
        dpfl.fit(model.loss, {}, plan, optax.sgd(0.1))


def test_preferences(folder):
    row = {"user": "a", "p": [ASKS], "c": [SAYS], "r": [{**SAYS, "content": "No"}]}
    store = rows(data_rows=[row], prompt="p", chosen="c", rejected="r", tokenizer=str(folder))
    assert store.schema.pairs
    assert [answers(store, str(folder), which=i)[0] for i in (0, 1)] == [
        "Yes<|im_end|>\n",
        "No<|im_end|>\n",
    ]
    whole = {"user": "a", "c": row["p"] + row["c"], "r": row["p"] + row["r"]}
    implicit = rows(data_rows=[whole], chosen="c", rejected="r", tokenizer=str(folder))
    assert implicit.fingerprint == store.fingerprint
    text = {"user": "a", "p": "Well? ", "c": "Yes", "r": "Yes"}  # the same twice is no mistake
    store = rows(data_rows=[text], prompt="p", chosen="c", rejected="r", tokenizer=str(folder))
    assert {answers(store, str(folder), which=i) for i in (0, 1)} == {("Yes</s>", "Well? Yes</s>")}


def test_what_is_too_long_is_cut_at_the_end_or_left_out_and_counted(tmp_path):
    long = {"user": "a", "p": "x" * 5, "c": "abcdef"}
    hopeless = {"user": "b", "p": "x" * 7, "c": "abc"}
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(long) + "\n" + json.dumps(hopeless))
    config = DataConfig(
        source="jsonl", path=str(file), prompt_column="p", completion_column="c", seq_len=8
    )
    found = load_examples(config)
    assert (found.store.num_examples, found.dropped) == (1, 1)
    assert "1 bad rows left out" in found.left_out
    assert any("too long" in told for told in config.caveats())
    held = found.store.read(np.array([0]))
    np.testing.assert_array_equal(held["mask"][0], [False] * 6 + [True] * 2)
    np.testing.assert_array_equal(held["tokens"][0], [1, *(3 + c for c in b"xxxxxab")])
    command = ["data", "build", "--input", str(file), "--prompt-column", "p", "--seq-len", "8"]
    command += ["--completion-column", "c", "--out", str(tmp_path / "S"), "--workers", "1"]
    assert main(command) == 0
    built = open_store(tmp_path / "S")
    assert built.manifest.build["dropped_rows"] == 1
    assert built.fingerprint == found.store.fingerprint
    with pytest.raises(dpfl.BadInputError, match="no answer begins within seq_len=4 tokens"):
        rows(data_rows=[hopeless], prompt="p", completion="c", seq_len=4)


BAD_ROWS = {
    "row 0: 'm' holds str, not a list": '"hello"',
    "'m' holds text that is not a JSON list": "hello",
    "'m' holds text that is not a JSON": '[{"role": "user", "role": "assistant", "content": "x"}]',
    "'m' holds an empty list": [],
    "message 1: it is str, not an object": ["hello"],
    "message 1: the role is 'robot', not one of": [{"role": "robot", "content": "x"}],
    "message 2: the content is 3, not text": [ASKS, {"role": "assistant", "content": 3}],
    "no message in 'm' is the assistant's": [ASKS],
    "a message holds U\\+FDD0": [ASKS, {**SAYS, "content": "\ufdd0"}],
    "the chat template does not take it: no user": [{**ASKS, "content": "refuse"}, SAYS],
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_bad_messages_are_one_sentence(tmp_path, message):
    (tmp_path / "t").write_text(
        "{% if messages[0].content == 'refuse' %}{{ raise_exception('no user') }}{% endif %}"
        + CHATML
    )
    expected = message.replace("the chat template", f"the chat template {tmp_path / 't'}")
    with pytest.raises(dpfl.BadInputError, match=expected) as error:
        rows(
            data_rows=[{"user": "a", "m": BAD_ROWS[message]}],
            messages="m",
            chat_template=str(tmp_path / "t"),
        )
    assert str(error.value).startswith("row 0")


def test_other_mistakes_are_one_sentence(tmp_path):
    chat = {"user": "a", "m": [ASKS, SAYS], "p": "x", "c": ""}

    def refused(message, template=None, row=chat, **columns):
        if template is not None:
            (tmp_path / "t").write_text(template)
            columns["chat_template"] = str(tmp_path / "t")
        with pytest.raises(dpfl.BadInputError, match=message):
            rows(data_rows=[row], **columns)

    refused("set data.chat_template to a file", messages="m")
    refused("is not a Jinja template: line 1", "{% for %}", messages="m")
    refused("does not take it: 'x' is undefined", "{{ x.y }}", messages="m")
    refused("answers cannot be located", "{{ messages | length }}", messages="m")
    never = "{% if 0 %}{% generation %}{% endgeneration %}{% endif %}"
    refused("marks 0 answers, but the assistant has 1", never, messages="m")
    refused("access to attribute '__class__'", "{{ ''.__class__.x }}", messages="m")
    refused("the answer in 'c' is empty", prompt="p", completion="c")
    refused("of 'm' and 'c' one is text", prompt="m", completion="c")
    refused("no column 'd'", prompt="p", completion="d")
    refused("but data.prompt_column is set", prompt="p")
    refused("data.completion_column and data.messages_column", messages="m", completion="c")
    refused("cannot read the chat template", messages="m", chat_template=str(tmp_path / "none"))
    refused("give either text=", messages="m", text="p", template=CHATML)
    with pytest.raises(dpfl.BadInputError, match="messages_column is for files of conversations"):
        load_examples(DataConfig(source="shakespeare", messages_column="m"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer_config.json").write_text("{")
    with pytest.raises(dpfl.BadInputError, match="is not a JSON file"):
        load_chat_template(str(tmp_path / "bad"))


def test_where_a_template_lies(folder, tmp_path):
    found = load_chat_template(str(folder / "tokenizer.json"))
    assert found is not None
    assert (found.source, found.tokens) == (CHATML, {"bos_token": "<s>", "eos_token": "</s>"})
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_chat_template(str(tmp_path)).source == "yes"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert load_chat_template(str(tmp_path)).source == "newer"
    assert load_chat_template("bytes") is None


def test_pairs_are_stored_bit_for_bit():
    schema = dpfl.data.Schema.answers(13, 70_000, pairs=True)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 70_000, (5, 2, 13)).astype(np.int32),
        "mask": rng.random((5, 2, 13)) < 0.5,
    }
    again = schema.unpack(schema.pack(batch))
    for name, array in batch.items():
        np.testing.assert_array_equal(again[name], array)
        assert again[name].dtype == array.dtype
    read = pydantic.TypeAdapter(dpfl.data.Schema).validate_json(
        json.dumps(dataclasses.asdict(schema))
    )
    assert read == schema
    with pytest.raises(dpfl.BadInputError, match="outside 0"):
        schema.pack({**batch, "tokens": batch["tokens"] + 69_999})


@pytest.mark.nightly
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_tokens_and_mask_are_those_of_transformers(folder, tmp_path, template):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = template
    marked = template == MARKED
    text = theirs.apply_chat_template(CHAT, tokenize=False)
    found = theirs.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=marked, return_tensors=None
    )
    mine, spans = ChatTemplate(template, load_chat_template(theirs).tokens).answers(CHAT, "row")
    assert mine == text
    file = tmp_path / "t"
    file.write_text(template)
    held = rows(
        data_rows=[{"user": "a", "m": CHAT}],
        messages="m",
        tokenizer=theirs,
        chat_template=str(file),
    ).read(np.array([0]))
    ids = found["input_ids"]
    np.testing.assert_array_equal(held["tokens"][0][: len(ids)], ids)
    if marked:
        np.testing.assert_array_equal(held["mask"][0][: len(ids)], found["assistant_masks"])
    assert not held["mask"][0][len(ids) :].any()
    assert re.sub(r"\s", "", text[slice(*spans[1])]) == "Ende<|im_end|>"


HUGE = b'{"user": "z", "n": ' + b"9" * 5000 + b', "m": [{"role": "assistant", "content": "a"}]}'
NO_ROWS = {
    "half a character in JSON text": {"m": '[{"role": "assistant", "content": "a\\ud800"}]'},
    "half a character in an answer": {"m": [{"role": "assistant", "content": "a\ud800"}]},
    "a role that is a list": {"m": [{"from": ["x"], "value": "y"}]},
    "a number of thousands of digits": HUGE,
}


@pytest.mark.parametrize("what", NO_ROWS)
def test_a_row_that_is_no_conversation_stops_nobody_elses(what, tmp_path):
    good = [{"user": f"u{i % 3}", "m": [ASKS, {**SAYS, "content": f"No {i}"}]} for i in range(9)]
    bad = NO_ROWS[what]
    bad = bad if isinstance(bad, bytes) else json.dumps({"user": "z", **bad}).encode()
    lines = [json.dumps(row).encode() for row in good]
    (tmp_path / "t.jinja").write_text(CHATML)

    def config(name, rows, **more):
        (tmp_path / name).write_bytes(b"\n".join(rows))
        given = {"source": "jsonl", "path": str(tmp_path / name), "messages_column": "m"}
        given |= {"chat_template": str(tmp_path / "t.jinja"), "seq_len": 64}
        return DataConfig(**given, **more)

    mixed = [*lines[:4], bad, *lines[4:]]
    found = load_examples(config("mixed.jsonl", mixed, on_bad_row="drop"))
    wanted = load_examples(config("good.jsonl", lines))
    assert found.store.fingerprint == wanted.store.fingerprint
    assert found.dropped == 1
    with pytest.raises(dpfl.BadInputError, match=r"mixed\.jsonl, line 5") as caught:
        load_examples(config("mixed.jsonl", mixed))
    assert "\n" not in str(caught.value)


def test_a_field_that_json_cannot_hold_is_no_reason_to_refuse_a_message(tmp_path):
    at = datetime.datetime(2026, 1, 1)
    rows = [{"user": "a", "m": [SAYS]}, {"user": "b", "m": [{**SAYS, "timestamp": at}]}]
    pq.write_table(pa.Table.from_pylist(rows[::-1]), tmp_path / "x.parquet")
    (tmp_path / "t.jinja").write_text(CHATML)
    conversations = conversations_in({"messages": "m"}, "bytes", str(tmp_path / "t.jinja"))
    table = pq.read_table(tmp_path / "x.parquet").to_pylist()
    first, second = (conversations.document(row, "here") for row in table)
    assert first == second
