"""Sensitivity measured on the real step; reductions between algorithms; a subject's batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fed_zoo import MECHANISMS, loss_fn, make_data, make_federation, make_params
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_jax import accounting
from dpfl_jax.clipping import Normalized
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.engine import clipped_sum, make_release
from dpfl_jax.federation.mechanisms import (
    SiloMechanism,
    hi_grad_avg,
    local_group,
    local_item,
    subject_uls,
    user_ldp,
)
from dpfl_jax.federation.participation import Records, SiloFacts
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey

KEY = RootKey.from_seed(5)
CLIP = 0.7
UNITS, ROW, SIZE = 32, 4, 8
COMMON = {"sampling_prob": 0.6, "clip_norm": CLIP}


def one_silo(rng, counts, scale, subject, extreme):
    """A silo whose subjects have ``counts`` records; those of ``subject`` are extreme."""
    subjects = np.repeat(np.arange(len(counts)), counts)
    x = rng.normal(size=(len(subjects), 5)).astype(np.float32)
    y = rng.normal(size=(len(subjects), 3)).astype(np.float32)
    mine = subjects == subject
    x[mine] *= np.float32(scale)
    y[mine] *= np.float32(scale)
    if extreme is not None:
        y[np.flatnonzero(mine)[:1], 0] = extreme
    return FederatedData.from_assignment(
        ArrayRecords({"x": x, "y": y}), subjects, np.zeros_like(subjects), 1
    )


def packed(data, draw, unit_size):
    """One draw in the engine's layout."""
    positions = draw.positions
    shape = (UNITS,) if unit_size is None else (UNITS, unit_size)
    present = np.zeros(shape, bool)
    if unit_size is None:
        present[: draw.size] = True
    else:
        present[: draw.size, : positions.shape[1]] = positions >= 0
    records = data.read(positions[positions >= 0])

    def scatter(leaf):
        out = np.zeros((*shape, *leaf.shape[1:]), leaf.dtype)
        out[present] = leaf
        return out.reshape(UNITS // ROW, ROW, *out.shape[1:])

    units = jax.tree.map(scatter, records)
    if unit_size is not None:
        units = {"examples": units, "mask": present.reshape(UNITS // ROW, ROW, -1)}
    mask = np.arange(UNITS) < draw.size
    weight = np.ones(UNITS, np.float32)
    weight[: draw.size] = draw.weight
    rows = np.int32(-(-draw.size // ROW))
    return units, mask.reshape(-1, ROW), weight.reshape(-1, ROW), rows


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


CASES = {
    "local_item": (local_item(**COMMON, max_records_per_subject=5), None),
    "local_group": (local_group(**COMMON, max_records_per_subject=5, batch_cap=2), None),
    "hi_grad_avg": (hi_grad_avg(**COMMON, max_records_per_subject=5), None),
    "average_then_clip": (
        hi_grad_avg(**COMMON, max_records_per_subject=5, average="average_then_clip"),
        5,
    ),
    "user_ldp": (user_ldp(**COMMON, max_records_per_subject=5), 32),
    "subject_uls": (subject_uls(**COMMON, max_records_per_subject=5, group_size=3), 3),
    "normalized": (
        SiloMechanism(
            participation=Records(
                sampling_prob=0.6, max_records_per_subject=5, average="clip_then_average"
            ),
            clip=Normalized(CLIP),
        ),
        None,
    ),
}


@pytest.fixture(scope="module")
def sums():
    return {
        name: jax.jit(clipped_sum(m, loss_fn, examples_at_once=2)) for name, (m, _) in CASES.items()
    }


def without(mechanism, draw, data, subject):
    """The neighbour's draw: the same coins for everybody else, nothing of ``subject``."""
    silo = data.silos[0]
    if mechanism.kind == "subject_uls":
        keep = silo.subject_of_record[draw.positions[:, 0]] != subject
        return dataclasses.replace(draw, positions=draw.positions[keep], weight=draw.weight[keep])
    chosen = np.unique(draw.positions[draw.positions >= 0])
    return mechanism.participation.assemble(
        silo, chosen[silo.subject_of_record[chosen] != subject], KEY, 0
    )


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    counts=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    exponent=st.integers(-6, 15),
    extreme=st.sampled_from([None, np.nan, np.inf, 3e38]),
)
def test_removing_a_subject_moves_the_real_sum_by_at_most_its_bound(
    sums, name, seed, counts, exponent, extreme
):
    """<= C (HiGradAvgDP, ULS), <= count C (plain sums), <= 2C (UserLDP), whatever the gradients."""
    mechanism, unit_size = CASES[name]
    rng = np.random.default_rng(seed)
    subject = int(rng.integers(len(counts)))
    data = one_silo(rng, counts, 10.0**exponent, subject, extreme)
    silo = data.silos[0]
    draw = mechanism.participation.draw(silo, KEY.child("draw", seed), 0)
    other = without(mechanism, draw, data, subject)
    params = make_params()
    a, _ = sums[name](params, *packed(data, draw, unit_size), CLIP)
    b, _ = sums[name](params, *packed(data, other, unit_size), CLIP)
    a, b = flat(a), flat(b)
    assert np.isfinite(a).all()
    count = int((silo.subject_of_record[draw.positions[draw.positions >= 0]] == subject).sum())
    bound = {
        "local_item": count * CLIP,
        "local_group": min(count, 2) * CLIP,
        "user_ldp": 2 * CLIP,
        "normalized": min(count, 1),
    }.get(name, min(count, 1) * CLIP)
    assert np.linalg.norm(a - b) <= bound * (1 + 1e-4) + 1e-4


@pytest.mark.parametrize("at_once", [1, 3, 64])
@pytest.mark.parametrize("name", ["user_ldp", "average_then_clip", "subject_uls"])
def test_units_that_are_added_up_are_the_units(name, at_once):
    """Some records after others, against ``vmap(grad)`` of the mean; without any unit, 0.

    What fills units up is not looked at: numbers there that are none change no bit.
    """
    mechanism, unit_size = CASES[name]
    data = one_silo(np.random.default_rng(3), [5, 1, 2, 4, 5], 1.0, 0, None)
    plain = jax.jit(clipped_sum(mechanism, loss_fn, strategy="vmap"))
    pieces = jax.jit(clipped_sum(mechanism, loss_fn, examples_at_once=at_once))
    everybody = np.arange(5 if name == "subject_uls" else 17)
    for chosen in (everybody, everybody[:1], everybody[:0]):
        draw = mechanism.participation.assemble(data.silos[0], chosen, KEY, 0)
        units, *more = packed(data, draw, unit_size)
        x, there = units["examples"]["x"], units["mask"]
        holes = x.copy()
        holes[~there] = np.nan
        batch = (make_params(), units, *more, CLIP)
        bad = {"examples": {**units["examples"], "x": holes}, "mask": there}
        (a, seen), (b, told) = plain(*batch), pieces(*batch)
        np.testing.assert_allclose(flat(b), flat(a), rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(flat(told), flat(seen), rtol=2e-5, atol=1e-7)
        assert (np.abs(flat(b)).max() > 0) == bool(len(chosen))
        if len(chosen):
            np.testing.assert_array_equal(
                flat(pieces(make_params(), bad, *more, CLIP)), flat((b, told))
            )


@jax.custom_vjp
def with_more(y, more):
    """``y``; going back, ``more`` gets a gradient of 1, whatever comes (a loss beside the loss)."""
    return y


with_more.defvjp(lambda y, more: (y, None), lambda _, d: (d, jnp.ones_like(d)))


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_subject_of_many_records_moves_no_other(at_once):
    """Absent records may have a gradient: how many of them one unit is taken through must not
    follow from another, also where several are taken at once."""

    def loss(params, record):
        return with_more(record["x"] @ params["w"], -0.8 * jnp.sum(params["w"] * record["z"]))

    mechanism, _ = CASES["subject_uls"]
    mask = np.ones((8, 4), bool)
    mask[:7, 1:] = False
    x, z = np.zeros((2, 8, 4, 4), np.float32)
    x[:7, :, 0] = z[:7, :, 0] = x[7, :, 1] = 1
    summed = jax.jit(mechanism.clipped_grad(loss, examples_at_once=at_once, microbatch_size=8))

    def of(there):
        units = {"examples": {"x": x, "z": z}, "mask": mask & there[:, None]}
        return summed({"w": jnp.ones(4)}, units, there, np.ones(8, np.float32), CLIP).sum["w"]

    moved = np.linalg.norm(of(np.arange(8) < 8) - of(np.arange(8) < 7))
    assert 0.5 * CLIP < moved <= CLIP * (1 + 1e-5)


def linear_loss(params, example):
    """The gradient is the record itself."""
    return jnp.dot(params["w"], example["x"])


def linear_sum(mechanism, data, chosen):
    draw = mechanism.participation.assemble(data.silos[0], np.sort(chosen), KEY, 0)
    total, _ = jax.jit(clipped_sum(mechanism, linear_loss))(
        {"w": jnp.zeros(2)}, *packed(data, draw, None), 1.0
    )
    return np.asarray(total["w"])


def test_fixed_size_batches_break_hierarchical_averaging():
    """Lemma 3.6 of Marathe et al. fails when batches have a fixed size: the counter-example.

    Subject 0 has 3 records. Without it, 3 records of subjects 1 to 3 take its place in a batch of
    6, each turning its subject's mean around: the sum moves by 4C, not by C.
    """
    up, down = [1.0, 0.0], [-1.0, 0.0]
    counts = [3, 2, 2, 2]
    x = np.array([up] * 3 + [up, down] * 3, np.float32)
    subjects = np.repeat(np.arange(4), counts)
    data = FederatedData.from_assignment(
        ArrayRecords({"x": x}), subjects, np.zeros_like(subjects), 1
    )
    mechanism = hi_grad_avg(batch_size=6, clip_norm=1.0, max_records_per_subject=3)
    with_subject = np.array([0, 1, 2, 3, 5, 7])  # its 3 records, and the first of each other
    displaced = np.array([3, 4, 5, 6, 7, 8])  # the same size without it
    poisson_neighbour = np.array([3, 5, 7])
    moved = np.linalg.norm(
        linear_sum(mechanism, data, with_subject) - linear_sum(mechanism, data, displaced)
    )
    assert moved == pytest.approx(4.0, rel=1e-5)
    honest = np.linalg.norm(
        linear_sum(mechanism, data, with_subject) - linear_sum(mechanism, data, poisson_neighbour)
    )
    assert honest <= 1.0 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local_group", "hi_grad_avg", "average_then_clip", "subject_uls"])
def test_one_record_per_subject_reduces_every_method_to_local_item(kind):
    """K = 1: the same draws, gradients, noise, event and update as LocalItemDP."""
    data = make_data(records=60, subjects=500, silos=3, cap=1, how="uniform")
    kwargs = {"max_records_per_subject": 1, "noise_multiplier": 1.1}
    item = make_federation(data, MECHANISMS["local_item"], uneven=False, **kwargs)
    if kind == "subject_uls":
        kwargs["group_size"] = 1
    mine = make_federation(data, MECHANISMS[kind], uneven=False, **kwargs)
    mesh = data_parallel_mesh(jax.devices()[:1])
    updates = []
    for federation in (item, mine):
        builder = RoundBuilder(federation, data, KEY, mesh, microbatch_size=8)
        release = make_release(federation.mechanism, loss_fn, _sgd(), mesh)
        chunk = builder.build(0, np.arange(3)).chunk
        released, _, stats = release(make_params(), None, chunk)
        updates.append(flat(released.update))
        assert float(stats.units) > 0
    np.testing.assert_allclose(updates[0], updates[1], rtol=1e-5, atol=1e-6)
    for a, b in zip(item.silos, mine.silos):
        costs = [accounting.epsilon(p.event(20), 1e-5) for p in (a, b)]
        assert costs[0] == pytest.approx(costs[1], rel=1e-6)


def _sgd():
    import optax

    return optax.sgd(0.1)


@pytest.mark.slow
def test_group_counts_are_those_of_the_whole_batch():
    """Weights do not depend on how a batch is cut into microbatches."""
    data = make_data(records=150, subjects=8, silos=1, cap=30, how="uniform")
    mechanism = MECHANISMS["hi_grad_avg"](max_records_per_subject=30, batch_size=60)
    mesh = data_parallel_mesh(jax.devices()[:1])
    sums = []
    for size in (1, 7, 64):
        federation = make_federation(
            data, MECHANISMS["hi_grad_avg"], uneven=False, max_records_per_subject=30, batch_size=60
        )
        builder = RoundBuilder(federation, data, KEY, mesh, microbatch_size=size)
        release = make_release(mechanism, loss_fn, _sgd(), mesh)
        released, *_ = release(make_params(), None, builder.build(0, np.arange(1)).chunk)
        sums.append(flat(released.update))
    np.testing.assert_allclose(sums[0], sums[1], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(sums[0], sums[2], rtol=2e-5, atol=2e-6)
    draw = mechanism.participation.draw(data.silos[0], KEY, 0)
    subjects = data.subjects[draw.positions]
    np.testing.assert_allclose(draw.weight, 1 / np.bincount(subjects)[subjects])


def test_batch_cap_keeps_at_most_that_many_of_a_subject():
    data = make_data(records=150, subjects=8, silos=1, cap=30, how="uniform")
    silo = data.silos[0]
    common = {"max_records_per_subject": 30, "sampling_prob": 0.7}
    free = local_group(**common).participation.draw(silo, KEY, 3)
    capped = local_group(**common, batch_cap=2).participation.draw(silo, KEY, 3)
    counts = np.bincount(silo.subject_of_record[capped.positions])
    assert counts.max() == 2
    assert set(capped.positions) <= set(free.positions)
    assert np.bincount(silo.subject_of_record[free.positions]).max() > 2


def test_realised_frequencies_are_the_accounted_ones():
    """Of records q, of subjects 1 - (1-q)^K; 4,000 draws, 5 standard deviations."""
    data = make_data(records=80, subjects=10, silos=1, cap=4, how="uniform")
    silo, draws = data.silos[0], 4000
    mechanism = hi_grad_avg(sampling_prob=0.2, max_records_per_subject=4)
    records = np.zeros(silo.num_records)
    subjects = np.zeros(silo.num_subjects)
    for i in range(draws):
        chosen = mechanism.participation.select(silo, KEY, i)
        records[chosen] += 1
        subjects[np.unique(silo.subject_of_record[chosen])] += 1
    assert np.abs(records / draws - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / draws)
    expected = 1 - 0.8 ** np.diff(silo.subject_offsets)
    slack = 5 * np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(subjects / draws - expected) < slack).all()
    assert mechanism.participation.sampling_prob_of(SiloFacts.of(silo)) == 0.2
