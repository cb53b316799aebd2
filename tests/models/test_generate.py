"""Sampling with a cache: the same logits as reading everything at once, and the right draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.errors import BadInputError
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.generate import Sampling, generate, generate_texts, sample_token

SMALL = TransformerConfig(vocab_size=23, max_seq_len=12, embed_dim=16, num_layers=2, num_heads=4)
VARIANTS = {
    "gpt2": {"positions": "learned", "norm": "layer", "use_bias": True},
    "llama": {"activation": "swiglu", "num_kv_heads": 2, "tie_embeddings": False},
    "gemma2": {
        "activation": "geglu",
        "norm_plus_one": True,
        "scale_embeddings": True,
        "post_norms": True,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "scan_layers": False,
    },
    "gemma3": {
        "activation": "geglu",
        "head_norms": True,
        "num_layers": 3,
        "sliding_window": 4,
        "global_every": 2,
        "local_rope_theta": 100.0,
    },
}


def make(name="llama"):
    model = LanguageModel(dataclasses.replace(SMALL, **VARIANTS[name]))
    params = jax.jit(lambda key: jax.tree.map(lambda x: 6 * x, model.init(key)))
    return model, params(jax.random.key(0))


@pytest.mark.nightly
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_with_a_cache_are_those_without(name):
    model, params = make(name)
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 23, 12), jnp.int32)
    expected = jax.jit(model.logits)(params, tokens)
    assert float(expected.std()) > 0.3
    cache, rows = model.init_cache(params), []
    next_logits = jax.jit(model.next_logits)
    read = jnp.concatenate([jnp.asarray([model.config.bos_id]), tokens[:-1]])
    for part in (read[:5], read[5:6], read[6:11], read[11:]):  # a prompt, then pieces
        logits, cache = next_logits(params, cache, part)
        rows.append(logits)
    np.testing.assert_allclose(jnp.concatenate(rows), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_most_likely_text_is_found_token_by_token(name):
    model, params = make(name)
    prompt = [5, 9, 3]
    options = {"max_tokens": 9, "key": jax.random.key(0), "temperature": 0.0}
    read = [model.config.bos_id, *prompt]
    sampled = list(generate(model, params, read, **options))
    text, logits = list(prompt), jax.jit(model.logits)
    for _ in range(9):
        padded = jnp.asarray([*text, *[0] * (12 - len(text))], jnp.int32)
        text.append(int(logits(params, padded)[len(text)].argmax()))
    assert sampled == text[3:]
    stopped = generate(model, params, read, stop_ids={sampled[4], 99}, **options)
    assert list(stopped) == sampled[: sampled.index(sampled[4])]


def test_draws_follow_the_logits():
    """10,000 draws: the share of each token is within 5 standard deviations (1e-5 false alarms)."""
    logits = jnp.log(jnp.asarray([0.1, 0.2, 0.3, 0.4]))
    keys = jax.random.split(jax.random.key(0), 10_000)

    def shares(**options):
        drawn = jax.vmap(lambda k: sample_token(logits, k, **options))(keys)
        return np.bincount(drawn, minlength=4) / len(keys)

    np.testing.assert_allclose(shares(), [0.1, 0.2, 0.3, 0.4], atol=0.025)
    squared = np.array([0.1, 0.2, 0.3, 0.4]) ** 2
    np.testing.assert_allclose(shares(temperature=0.5), squared / squared.sum(), atol=0.025)
    np.testing.assert_allclose(shares(top_k=2), [0, 0, 3 / 7, 4 / 7], atol=0.025)
    assert shares(top_k=2)[:2].sum() == 0
    nucleus = shares(top_p=0.69)  # the least set of at least that probability, 0.4 and 0.3
    np.testing.assert_allclose(nucleus, [0, 0, 3 / 7, 4 / 7], atol=0.025)
    assert nucleus[:2].sum() == 0
    assert shares(top_p=0.39)[:3].sum() == 0


PROMPTS = [[1], [1, 4, 5, 6], [1, 7]] * 5


def texts(model, params, batch_size=4, temperature=0.5, **options):
    found = generate_texts(
        model,
        params,
        PROMPTS,
        max_tokens=8,
        key=jax.random.key(1),
        sampling=Sampling(temperature, stop_ids=frozenset({3, 9})),
        batch_size=batch_size,
        **options,
    )
    return sorted(found, key=lambda text: text.number)


@pytest.mark.nightly
def test_texts_do_not_depend_on_the_batch():
    """Nor on which of them are drawn; with one key for each, number 0 is that of ``generate``."""
    model, params = make()
    found = texts(model, params)
    assert [text.number for text in found] == list(range(15))
    assert len({tuple(text.tokens) for text in found}) > 10
    assert {text.ended for text in found} == {True, False}
    assert all(len(text.tokens) == 8 for text in found if not text.ended)
    assert texts(model, params, batch_size=1) == found
    assert texts(model, params, batch_size=7, skip={0, 3, 4}) == found[1:3] + found[5:]
    devices = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("data"))
    assert texts(model, params, batch_size=8, sharding=split) == found
    options = {"max_tokens": 8, "key": jax.random.key(1), "temperature": 0.5, "stop_ids": {3, 9}}
    assert list(generate(model, params, [1], **options)) == found[0].tokens


def test_what_is_judged_bad_is_drawn_again_and_the_rest_stays():
    """Rejection of one token at a time: its law is the model's, given that it is good."""
    model, params = make()

    def validator(text, over):
        bad = [place for place, token in enumerate(text.tokens) if token % 2]
        return bad[0] if bad else 2 if over and len(text.tokens) == 2 else None

    plain = texts(model, params, temperature=5.0)
    found = texts(model, params, temperature=5.0, validator=validator)
    assert texts(model, params, batch_size=2, temperature=5.0, validator=validator) == found
    assert sum(text.redraws for text in found) > 10
    for before, text in zip(plain, found):
        assert all(token % 2 == 0 for token in text.tokens)
        assert len(text.tokens) != 2  # there the end is drawn again, too
        assert text.valid
        kept = next((n for n, token in enumerate(before.tokens) if token % 2), 0)
        assert text.tokens[:kept] == before.tokens[:kept]
    hopeless = texts(model, params, validator=lambda text, over: 0)
    assert {(text.valid, text.redraws) for text in hopeless} == {(False, 200)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 11}, "are 13 tokens long, but the model takes at most 12"),
        ({"max_tokens": 0}, "at least 1"),
        ({"prompt": []}, "no token"),
        ({"prompt": [23]}, "outside the model's vocabulary of 23"),
        ({"temperature": -1.0}, "temperature is -1.0, but it must be at least 0"),
        ({"top_k": 0}, "top_k is 0, but it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0, but it must be above 0"),
    ],
)
def test_bad_settings(change, message):
    model, params = make()
    settings = {"prompt": [1, 4, 5], "max_tokens": 2, "key": jax.random.key(0)} | change
    with pytest.raises(BadInputError, match=message):
        generate(model, params, **settings)
