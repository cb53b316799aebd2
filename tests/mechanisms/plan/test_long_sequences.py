"""Attention block by block and losses in pieces, inside the sums of mechanisms, on every layout."""

import chex
import jax
import numpy as np
import pytest
from neighbours import removed

from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, uls
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh, parameter_shardings, place
from dpfl_jax.models import LanguageModel, TransformerConfig, attention, transformer

GROUP, LENGTH, VOCAB, CLIP = 2, 20, 16, 0.3
UNITS = {
    "els": els(batch_size=8, group_size=1, clip_norm=CLIP),
    "uls": uls(group_size=GROUP, cohort_size=8, clip_norm=CLIP),
}


def model(how):
    return LanguageModel(
        TransformerConfig(
            num_layers=2,
            embed_dim=16,
            num_heads=4,
            num_kv_heads=2,
            mlp_dim=32,
            vocab_size=VOCAB,
            max_seq_len=LENGTH,
            attention=how,
        )
    )


def buffers(unit, rows=2, row=8):
    rng = np.random.default_rng(0)
    lead = (rows, row) if unit == "els" else (rows, row, GROUP)
    tokens = rng.integers(0, VOCAB, (*lead, LENGTH)).astype("i4")
    examples = {"tokens": tokens, "mask": np.ones(tokens.shape, bool)}
    mask = rng.random((rows, row)) < 0.8
    if unit == "els":
        return examples, mask
    present = rng.random(lead) < 0.6
    present[..., 0] = True
    return {"examples": examples, "mask": present}, mask


def total(unit, how, params, axes, units, mask, **options):
    mesh = make_mesh(**axes)
    loss = model(how).loss
    summed = jax.jit(clipped_sum_over_microbatches(UNITS[unit], loss, mesh, **options))
    placed = place(params, parameter_shardings(params, mesh))
    return jax.device_get(summed(placed, units, mask, np.int32(2)))


@pytest.mark.nightly
@pytest.mark.slow(
    "uls-{'sequence': 4}", "uls-{'fsdp': 2, 'tensor': 2}", "els-{'fsdp': 2, 'sequence': 2}"
)
@pytest.mark.parametrize(
    "axes",
    [{}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"sequence": 4}, {"fsdp": 2, "sequence": 2}],
    ids=str,
)
@pytest.mark.parametrize("unit", UNITS)
def test_sums_and_sensitivity_on_every_layout(unit, axes, monkeypatch):
    params = jax.tree.map(lambda x: 4 * x, model("plain").init(jax.random.key(0)))
    units, mask = buffers(unit)
    want, want_stats = total(unit, "plain", params, {}, units, mask, strategy="vmap")
    monkeypatch.setattr(attention, "BLOCK", 8)
    monkeypatch.setattr(transformer, "_MAX_LOGITS", 4 * 4 * VOCAB)
    got, stats = total(unit, "blockwise", params, axes, units, mask)
    chex.assert_trees_all_close(got, want, atol=1e-5)
    chex.assert_trees_all_close(stats, want_stats, rtol=1e-5)
    where = (0, np.flatnonzero(mask[0])[0])
    less, _ = total(unit, "blockwise", params, axes, *removed(units, mask, where))
    moved = sum(np.square(a - b).sum() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(less)))
    assert CLIP * (1 - 1e-2) <= np.sqrt(moved) <= CLIP * (1 + 1e-4)


def product(params, example):
    return (params["w"] * example["tokens"]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 8])
def test_what_cannot_be_split_is_refused(parts):
    """A loss without positions, and 20 of them over 8 devices."""
    units, mask = buffers("els")
    params, loss = {"w": np.ones(LENGTH, "f4")}, product
    if parts == 8:
        params, loss = model("plain").init(jax.random.key(0)), model("plain").loss
    mesh = make_mesh(sequence=parts)
    summed = jax.jit(clipped_sum_over_microbatches(UNITS["els"], loss, mesh))
    with pytest.raises(BadInputError, match=rf"mesh.sequence={parts} splits .* set data.seq_len"):
        summed(params, units, mask, np.int32(2))
