"""Checkpoints against ``transformers`` itself: the same logits, both ways; and what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_families import FAMILIES, saved_by_transformers, torch_logits
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from dpfl_jax.data import load_tokenizer
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import parameter_shardings
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.checkpoint import (
    checkpoint_dir,
    load_checkpoint,
    read_config,
    save_checkpoint,
    tokenizer_file,
)
from dpfl_jax.models.checkpoint.families import from_transformer, to_transformer
from dpfl_jax.models.checkpoint.files import TensorFiles, copy_companions, without_code
from dpfl_jax.models.params import flat_paths


def load(path, **changes):
    config = dataclasses.replace(read_config(path), **changes)
    model = LanguageModel(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, load_checkpoint(path, config, shapes)


def some_tokens(length=40):
    return np.random.default_rng(0).integers(3, 61, length)


def our_logits(model, params, tokens):
    """Row t: what follows tokens[:t + 1], as transformers has it."""
    shifted = jnp.asarray([*tokens[1:], 0], jnp.int32)  # the model itself puts bos_id first
    model = LanguageModel(dataclasses.replace(model.config, bos_id=int(tokens[0])))
    return jax.jit(model.logits)(params, shifted)


def assert_same(a, b):
    for name, leaf in flat_paths(a).items():
        np.testing.assert_array_equal(leaf, flat_paths(b)[name], err_msg=name)


def test_an_export_holds_no_other_files_of_ours_and_names_no_code(tmp_path):
    """As a checkpoint that somebody sent may lead to them."""
    sent, out = tmp_path / "hub" / "snapshots" / "1", tmp_path / "out"
    blobs = sent.parents[1] / "blobs"
    for folder in (sent, blobs, out):
        folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("s3cr3t")
    (blobs / "a1").write_text("a b")
    (sent / "merges.txt").symlink_to("../../blobs/a1")
    code = {"auto_map": {"AutoTokenizer": "them/theirs--code.Theirs"}}
    (sent / "tokenizer_config.json").write_text(json.dumps(code | {"eos_token": "é"}))
    copy_companions(sent, out)
    assert (out / "merges.txt").read_text() == "a b"
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"eos_token": "é"}
    assert without_code(code) == {}
    (sent / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(BadInputError, match=r"vocab.txt links to .*secret, outside"):
        copy_companions(sent, out)
    assert not (out / "vocab.txt").exists()


@pytest.mark.nightly(
    "gemma",
    "qwen3",
    "phi3",
    "qwen2",
    "mistral",
    "gpt2_untied",
    "llama_linear_biases",
)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    theirs = saved_by_transformers(name, tmp_path / "theirs")
    tokens = some_tokens()
    expected = torch_logits(theirs, tokens)
    assert expected.std() > 0.3
    model, params = load(tmp_path / "theirs", remat="none")
    np.testing.assert_allclose(our_logits(model, params, tokens), expected, atol=1e-4)
    assert model.num_params == sum(p.numel() for p in theirs.parameters())

    # Back, with nothing but our own configuration, and once more to us.
    save_checkpoint(tmp_path / "ours", model.config, params)
    transformers = pytest.importorskip("transformers")
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    np.testing.assert_allclose(torch_logits(opened, tokens), expected, atol=1e-5)
    again, read = load(tmp_path / "ours", remat="none")
    assert again.config == model.config
    assert_same(params, read)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3moe", "phi3", "gemma3"])
def test_files_and_stacks_of_any_number_hold_the_same_model(name, tmp_path):
    saved_by_transformers(name, tmp_path / "one")
    saved_by_transformers(name, tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    model, params = load(tmp_path / "one")
    assert_same(params, load(tmp_path / "many")[1])
    # Written in several files, with the source's configuration and tokeniser.
    (tmp_path / "one" / "tokenizer.json").write_text("{}")
    save_checkpoint(
        tmp_path / "back", model.config, params, like=tmp_path / "one", max_file_bytes=20_000
    )
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert (tmp_path / "back" / "tokenizer.json").exists()
    original, back = (
        json.loads((tmp_path / d / "config.json").read_text()) for d in ("one", "back")
    )
    assert original == back
    assert_same(params, load(tmp_path / "back")[1])
    # Other arrangements of the same blocks.
    tokens = some_tokens(20)
    expected = our_logits(model, params, tokens)
    for change in ({"last_layers": 1}, {"scan_layers": False}):
        other, arranged = load(tmp_path / "one", **change)
        np.testing.assert_allclose(our_logits(other, arranged, tokens), expected, atol=1e-5)
        save_checkpoint(tmp_path / str(change), other.config, arranged)
        assert_same(params, load(tmp_path / str(change))[1])


def own_checkpoint(path, **changes):
    """A checkpoint written by ourselves, for what needs no ``transformers``."""
    config = TransformerConfig(
        vocab_size=32,
        max_seq_len=16,
        embed_dim=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=24,
        activation="swiglu",
        tie_embeddings=False,
        **changes,
    )
    model = LanguageModel(config)
    params = jax.jit(model.init)(jax.random.key(0))
    save_checkpoint(path, config, params)
    return model, params


def test_each_device_reads_its_own_part(tmp_path):
    own_checkpoint(tmp_path / "c")
    model, whole = load(tmp_path / "c")
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    places = parameter_shardings(shapes, mesh)
    split = load_checkpoint(tmp_path / "c", model.config, shapes, places)
    assert_same(whole, split)
    up = split["blocks"]["mlp"]["up"]["kernel"]
    assert up.sharding == NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    assert up.addressable_shards[0].data.size == up.size // 4


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in ("gpt2", "llama")])
def test_each_device_reads_its_own_part_of_every_family(name, tmp_path):
    """Parts of tensors that hold several parameters side by side, too."""
    saved_by_transformers(name, tmp_path)
    model, whole = load(tmp_path)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    split = load_checkpoint(tmp_path, model.config, shapes, parameter_shardings(shapes, mesh))
    assert_same(whole, split)


def test_type_is_a_choice(tmp_path):
    model, params = own_checkpoint(tmp_path / "c")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    low = load_checkpoint(
        tmp_path / "c",
        model.config,
        shapes,
        dtype=lambda path: "bfloat16" if "kernel" in path else "float32",
    )
    for name, leaf in flat_paths(low).items():
        full = flat_paths(params)[name]
        wanted = full.astype(jnp.bfloat16) if "kernel" in name else full
        assert leaf.dtype == wanted.dtype
        np.testing.assert_array_equal(leaf, wanted)
    save_checkpoint(tmp_path / "low", model.config, params, dtype="bfloat16")
    tensors = load_file(tmp_path / "low" / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "low" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def edit_tensors(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


OF_EXPERTS = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(DOWN), f"no tensor '{DOWN}'"),
        (lambda t: t.update({"model.more": t[DOWN]}), "tensor 'model.more', for which"),
        (
            lambda t: t.update({DOWN: t[DOWN][:, :-1].copy()}),
            rf"'{DOWN}' of .* has shape \(16, 23\), but .* \(16, 24\)",
        ),
        (lambda t: t.update({DOWN: t[DOWN].astype(np.int8)}), f"'{DOWN}' of .* has type I8"),
    ],
    ids=["missing", "extra", "shape", "type"],
)
def test_a_tensor_that_does_not_fit_is_named(damage, message, tmp_path):
    own_checkpoint(tmp_path / "c")
    edit_tensors(tmp_path / "c", damage)
    with pytest.raises(BadInputError, match=message):
        load(tmp_path / "c")


def test_no_stored_tensor_is_dropped(tmp_path):
    """``transformers`` reads another head as one, and model.safetensors before the index."""
    own_checkpoint(tmp_path / "c")
    embedding = "model.embed_tokens.weight"
    edit_config(tmp_path / "c", tie_word_embeddings=True)
    edit_tensors(tmp_path / "c", lambda t: t.update({"lm_head.weight": t[embedding].copy()}))
    model, params = load(tmp_path / "c")
    assert model.config.tie_embeddings
    assert "head" not in params

    def another_head(tensors):
        tensors["lm_head.weight"][-1, -1] += 1

    edit_tensors(tmp_path / "c", another_head)
    with pytest.raises(BadInputError, match="tie_word_embeddings to false"):
        load(tmp_path / "c")
    edit_config(tmp_path / "c", tie_word_embeddings=False)
    load(tmp_path / "c")
    single = tmp_path / "c" / "model.safetensors"
    shutil.copy(single, tmp_path / "c" / "model-00001-of-00001.safetensors")
    weights = dict.fromkeys(load_file(single), "model-00001-of-00001.safetensors")
    index = tmp_path / "c" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(BadInputError, match="remove the one that is not the model"):
        load(tmp_path / "c")
    single.unlink()
    load(tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert', but only gpt2, llama, mistral, qwen2"),
        ({"hidden_act": "relu"}, "hidden_act 'relu', but only 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "has no factor"),
        ({"attention_bias": True}, "attention_bias True and mlp_bias False, but only the same"),
        ({"rope_theta": "far"}, "rope_theta 'far', which is not valid"),
        ({"rope_parameters": [1]}, "a setting of the wrong type"),
        ({"hidden_size": None}, "no number hidden_size"),
        ({"model_type": "mixtral"}, "model_type 'mixtral', but only .*, qwen3_moe"),
        ({"model_type": "qwen3_moe"}, "no number moe_intermediate_size"),
        (OF_EXPERTS | {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\], but only \[\]"),
        (OF_EXPERTS | {"decoder_sparse_step": 2}, "decoder_sparse_step 2, but only 1"),
        (OF_EXPERTS | {"output_router_logits": True}, "output_router_logits True, but only False"),
        (OF_EXPERTS | {"num_experts_per_tok": 5}, "cannot choose 5 of 4 experts"),
        ({"model_type": "gemma3"}, "model_type 'gemma3', but only .*, gemma3_text"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope'"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias True"),
        (
            {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
            "has layer_types .*, but a window is only supported in all layers but every n-th",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(changes, message, tmp_path):
    own_checkpoint(tmp_path / "c")
    edit_config(tmp_path / "c", **changes)
    with pytest.raises(BadInputError, match=message):
        load(tmp_path / "c")


def test_no_checkpoint_no_pickle_nothing_elsewhere(tmp_path):
    with pytest.raises(BadInputError, match=r"no checkpoint in .*: it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(BadInputError, match="a pickle, which is never opened"):
        TensorFiles(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(BadInputError, match="names a file elsewhere"):
        TensorFiles(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(BadInputError, match="which is not there"):
        TensorFiles(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(BadInputError, match="cannot be read as a safetensors file"):
        TensorFiles(tmp_path)


LLAMA3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "hidden_act": "silu",
}
# The numbers of parameters are those that the models' makers publish.
KNOWN = {
    "GPT-2": (
        {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "bos_token_id": 50256,
        },
        124_439_808,
    ),
    "Llama 2 7B": (
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
        },
        6_738_415_616,
    ),
    "Llama 3.1 8B": (LLAMA3_8B, 8_030_261_248),
    "Llama 3.2 1B": (
        LLAMA3_8B
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "rope_scaling": LLAMA3_8B["rope_scaling"] | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "Mistral 7B": (
        {
            "model_type": "mistral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "bos_token_id": 1,
        },
        7_241_732_096,
    ),
    "Qwen 2.5 0.5B": (
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "bos_token_id": 151643,
        },
        494_032_768,
    ),
    "Qwen 3 0.6B": (
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "bos_token_id": 151643,
        },
        596_049_920,
    ),
    "Qwen 3 30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "bos_token_id": 151643,
        },
        30_532_122_624,
    ),
    "Phi-3 mini": (
        {
            "model_type": "phi3",
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "sliding_window": 2047,
            "bos_token_id": 1,
        },
        3_821_079_552,
    ),
    "Gemma 3 1B": (
        {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "bos_token_id": 2,
        },
        999_885_952,
    ),
    "VaultGemma 1B": (
        {
            "model_type": "vaultgemma",
            "vocab_size": 256000,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 1024,
            "sliding_window": 512,
            "bos_token_id": 2,
        },
        1_038_741_120,
    ),
    "Gemma 2B": (
        {
            "model_type": "gemma",
            "vocab_size": 256000,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "bos_token_id": 2,
            "hidden_act": "gelu",
        },
        2_506_172_416,
    ),
    "Gemma 2 2B": (
        {
            "model_type": "gemma2",
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "bos_token_id": 2,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        2_614_341_888,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_published_models_have_their_number_of_parameters(name, tmp_path):
    content, parameters = KNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert LanguageModel(config).num_params == parameters
    # And back: what we would write describes the same model.
    again = to_transformer(from_transformer(config, "bfloat16"), "config.json")
    assert again == config


def test_models_of_no_family_and_full_directories_are_refused(tmp_path):
    odd = TransformerConfig(vocab_size=32, max_seq_len=8, embed_dim=8, num_layers=1, num_heads=2)
    params = jax.eval_shape(LanguageModel(odd).init, jax.random.key(0))
    with pytest.raises(BadInputError, match="belongs to none of the families"):
        save_checkpoint(tmp_path / "new", odd, params)
    own_checkpoint(tmp_path / "c")
    with pytest.raises(BadInputError, match="not an empty directory"):
        own_checkpoint(tmp_path / "c")


# ---- what comes with the package ----------------------------------------------------------------


def test_the_bundled_checkpoint_says_what_it_is_and_is_small():
    folder = checkpoint_dir("bundled:quickstart")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2e6
    card = (folder / "README.md").read_text()
    assert "examples/pretrain_quickstart.py" in card
    assert "PSF License" in card
    model = LanguageModel(read_config("bundled:quickstart"))
    assert f"{model.num_params:,} parameters" in card
    tokenizer = load_tokenizer(tokenizer_file("bundled:quickstart"))
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (
        model.config.vocab_size,
        model.config.bos_id,
    )
    # It has learnt English documentation: better than its tokens' frequencies by far.
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = load_checkpoint("bundled:quickstart", model.config, shapes)
    text = "Return the number of items in the list. If the argument is not given, return None."
    ids = np.asarray(tokenizer.encode(text))
    example = {"tokens": ids, "mask": np.ones(len(ids), bool)}
    assert model.loss(params, example) < 4.0


def test_only_what_is_bundled_has_such_a_name(tmp_path):
    with pytest.raises(
        BadInputError, match="no checkpoint 'bundled:gpt5': bundled are bundled:qui"
    ):
        read_config("bundled:gpt5")
    with pytest.raises(BadInputError, match="bundled are"):
        checkpoint_dir("bundled:../bundled/quickstart")
    assert checkpoint_dir(tmp_path) == tmp_path
