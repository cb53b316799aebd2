"""Beginnings and ends of texts, chats and samples, as configurations of real families have them."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import dpfl_jax as dpfl
from dpfl_jax.data import load_tokenizer, prompt_ids
from dpfl_jax.errors import BadInputError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|start_header_id|>"
    "{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>"
    "{{ m.content }}{{ eos_token }}{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
BEGIN, FLAGS = {"begins": "<s>"}, {"add_bos_token": True, "add_eos_token": False}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>"}
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Special tokens; content of tokenizer_config.json; eos_token_id of generation_config.json, by name;
# what a text begins with and ends with. ``begins``: tokenizer.json itself puts it there.
FAMILIES = {
    "gpt2": (["<|endoftext|>"], {}, ["<|endoftext|>"], None, "<|endoftext|>"),
    "llama2": (["<unk>", "<s>", "</s>"], FAST | LLAMA | FLAGS | BEGIN, ["</s>"], "<s>", "</s>"),
    "llama3_base": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        FAST | {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        | {"begins": "<|begin_of_text|>"},
        ["<|end_of_text|>"], "<|begin_of_text|>", "<|end_of_text|>",
    ),
    "llama3_instruct": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>"],
        FAST | {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
        | {"begins": "<|begin_of_text|>", "chat_template": LLAMA3},
        ["<|end_of_text|>", "<|eot_id|>"], "<|begin_of_text|>", "<|eot_id|>",
    ),
    "qwen_base": (
        QWEN, FAST | {"bos_token": None, "eos_token": "<|endoftext|>", "add_bos_token": False},
        ["<|endoftext|>"], None, "<|endoftext|>",
    ),
    "qwen_instruct": (
        QWEN,
        FAST | {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}
        | {"chat_template": CHATML},
        ["<|im_end|>", "<|endoftext|>"], None, "<|im_end|>",
    ),
    "phi3": (
        ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>"],
        FAST | {"bos_token": "<s>", "eos_token": "<|endoftext|>", "chat_template": PHI3}
        | {"add_bos_token": False, "add_eos_token": False},
        ["<|endoftext|>", "<|assistant|>", "<|end|>"], None, "<|endoftext|>",
    ),
    "deepseek_distill": (
        ["<｜end▁of▁sentence｜>", "<|User|>", "<|Assistant|>", "<｜begin▁of▁sentence｜>"],
        FAST | FLAGS | {"chat_template": DEEPSEEK, "begins": "<｜begin▁of▁sentence｜>"}
        | {"bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>"},
           "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"}},
        ["<｜end▁of▁sentence｜>"], "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    ),
    "gemma_it": (
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        FAST | FLAGS | {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": GEMMA}
        | {"begins": "<bos>"},
        ["<eos>", "<end_of_turn>"], "<bos>", "<eos>",
    ),
    "mistral_instruct": (
        ["<unk>", "<s>", "</s>"], FAST | LLAMA | FLAGS | BEGIN | {"chat_template": MISTRAL},
        ["</s>"], "<s>", "</s>",
    ),
    "zephyr": (  # texts begin with a token, chats do not
        ["<unk>", "<s>", "</s>"], FAST | LLAMA | BEGIN | {"chat_template": ZEPHYR},
        ["</s>"], "<s>", "</s>",
    ),
    "of_ones_own": (
        ["<start>", "<fin>", "</s>"],
        FAST | {"bos_token": "<start>", "eos_token": "<fin>", "begins": "<start>"},
        ["<fin>"], "<start>", "<fin>",
    ),
}  # fmt: skip
CHAT = [{"role": "user", "content": "Well, größer?"}, {"role": "assistant", "content": "Yes 🙂"}]
TEXT = "the lazy dog"


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A folder as a checkpoint of the family has it, but for the model; and what to expect."""
    special, config, ends, begin, end = FAMILIES[request.param]
    made = byte_level(special)
    config = dict(config)
    if token := config.pop("begins", None):
        made.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, made.token_to_id(token))]
        )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [made.token_to_id(token) for token in ends]
    write_ids(tmp_path, "generation_config.json", ids if len(ids) > 1 else ids[0])
    kind = "gpt2" if request.param == "gpt2" else "llama"
    write_ids(tmp_path, "config.json", ids[0], model_type=kind)
    return tmp_path, made, set(ids), begin, end


def byte_level(special):
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["user assistant the lazy dog Well Yes"] * 9, trainer)
    return made


def write_ids(folder, name, eos, **more):
    (folder / name).write_text(json.dumps({"eos_token_id": eos, **more}))


def answers(folder, **columns):
    """Ids of the only example as the model reads them, and which are answers."""
    store = dpfl.from_rows(user="user", seq_len=99, tokenizer=str(folder), **columns)
    held = store.read(np.array([0]))
    length = np.flatnonzero(held["mask"][0])[-1] + 1
    return held["tokens"][0][:length].tolist(), held["mask"][0][:length].tolist()


def test_texts_prompts_and_samples_begin_and_end_as_the_family_says(family):
    folder, made, ends, begin, end = family
    tokenizer = load_tokenizer(folder)
    plain = made.encode(TEXT, add_special_tokens=False).ids
    before = [] if begin is None else [made.token_to_id(begin)]
    after = [made.token_to_id(end)]
    assert ([tokenizer.bos_id], [tokenizer.eos_id]) == (before or [None], after)
    assert tokenizer.stop_ids == ends
    assert prompt_ids(tokenizer, TEXT) == before + plain
    assert prompt_ids(tokenizer, (begin or "") + TEXT) == before + plain
    for text in (TEXT, (begin or "") + TEXT + end):  # as rendered elsewhere
        texts = dpfl.from_texts([("a", text)], str(folder), seq_len=20).read(np.array([0]))
        assert texts["tokens"][0][texts["mask"][0]].tolist() == plain + after
    for written in ("", end):
        row = {"user": "a", "p": "the lazy", "c": " dog" + written}
        ids, learned = answers(folder, rows=[row], prompt="p", completion="c")
        assert ids == before + plain + after
        assert made.decode([i for i, yes in zip(ids, learned) if yes], False) == " dog" + end


def test_chats_begin_once(family):
    folder, made, _, begin, _ = family
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if "chat_template" not in config:
        return
    ids, _ = answers(folder, rows=[{"user": "a", "m": CHAT}], messages="m")
    first = None if begin is None else made.token_to_id(begin)
    assert ids.count(first) == ("bos_token }}" in config["chat_template"])


@pytest.mark.nightly
def test_all_is_as_in_transformers(family):
    transformers = pytest.importorskip("transformers")
    folder, _, ends, _, _ = family
    theirs, mine = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert prompt_ids(mine, TEXT) == theirs(TEXT).input_ids
    assert mine.eos_id == theirs.eos_token_id
    stops = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert mine.stop_ids == set(stops if isinstance(stops, list) else [stops]) == ends
    row = {"user": "a", "p": "the lazy", "c": " dog"}
    ids, _ = answers(folder, rows=[row], prompt="p", completion="c")
    assert ids == [*theirs(TEXT).input_ids, theirs.eos_token_id]
    given = load_tokenizer(theirs)  # the object itself
    assert (given.bos_id, given.eos_id) == (mine.bos_id, mine.eos_id)
    if theirs.chat_template is None:
        return
    ids, learned = answers(folder, rows=[{"user": "a", "m": CHAT}], messages="m")
    whole = theirs.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    prompt = theirs.apply_chat_template(CHAT[:1], return_dict=True, add_generation_prompt=True)
    assert ids == whole
    before = len(prompt["input_ids"])
    assert learned == [False] * before + [True] * (len(whole) - before)


def test_files_that_say_nothing_or_the_wrong_thing(tmp_path):
    made = byte_level(["</s>", "<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInputError, match=r'</s> and <\|endoftext\|>.*"eos_token"'):
        load_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(tmp_path).eos_id == made.token_to_id("</s>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(BadInputError, match=r"has no token '<\|im_end\|>'.*eos_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadInputError, match=r"tokenizer_config\.json is not a JSON"):
        load_tokenizer(tmp_path)
    one = byte_level(["</s>"])
    tokenizer = load_tokenizer(one)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (None, 0, {0})
    with pytest.raises(BadInputError, match="the prompt is empty"):
        prompt_ids(tokenizer, "")
    one.post_processor = processors.RobertaProcessing(("</s>", 0), ("Ġ", one.token_to_id("Ġ")))
    assert load_tokenizer(one).bos_id == one.token_to_id("Ġ")
