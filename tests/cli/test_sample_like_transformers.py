"""``dpfl sample`` against ``generate`` of ``transformers``: what is read, and where it ends."""

import json

import pytest
import tokenizers
from hf_families import saved_by_transformers

from dpfl_jax.cli.main import main


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "begins"), [("gpt2", False), ("llama", True), ("qwen2", False)])
def test_the_same_text_ends_at_the_same_token(name, begins, tmp_path, capsys):
    theirs = saved_by_transformers(name, tmp_path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 61)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>"])
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))

    def generated(ends):
        import torch
        import transformers

        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        theirs.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
        ids = torch.tensor([tokenizer("w5 w7").input_ids])
        found = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        return [i for i in found.tolist() if i not in ends]

    def sampled():
        capsys.readouterr()
        options = ["--prompt", "w5 w7", "--max-tokens", "20", "--temperature", "0", "--json"]
        assert main(["sample", str(tmp_path), *options]) == 0
        return json.loads(capsys.readouterr().out)["tokens"]

    whole = generated([2])
    assert sampled() == whole
    cut = next(token for token in whole[3:] if token not in whole[:3])
    assert generated([2, cut]) == whole[: whole.index(cut)]
    assert sampled() == whole[: whole.index(cut)]
