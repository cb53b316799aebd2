"""Small federations and plain Python references, shared by the federation's tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import (
    fed_avg,
    hi_grad_avg,
    local_group,
    local_item,
    subject_uls,
    user_ldp,
)
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.federation.partition import assign_to_silos, cap_per_subject
from dpfl_jax.noise import Noise

DIM = 5


def loss_fn(params, example):
    """Non-linear, two leaves."""
    hidden = jnp.tanh(params["w"] @ example["x"])
    return jnp.sum((hidden + params["b"] - example["y"]) ** 2)


def make_params():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(3, DIM)), jnp.float32),
        "b": jnp.zeros(3, jnp.float32),
    }


def make_data(records=200, subjects=30, silos=5, cap=3, how="power", seed=0, only=None):
    """Random records; ``only`` maps a silo to the number of records it keeps."""
    rng = np.random.default_rng(seed)
    subject = rng.integers(0, subjects, records)
    keys = rng.integers(0, 2**63, subjects).astype(np.uint64)
    silo = assign_to_silos(subject, keys, silos, how, alpha=2.0)
    keep = cap_per_subject(subject, silo, keys, cap)
    for i, count in (only or {}).items():
        mine = np.flatnonzero((silo == i) & keep)
        keep[mine[count:]] = False
    arrays = {
        "x": rng.normal(size=(records, DIM)).astype(np.float32),
        "y": rng.normal(size=(records, 3)).astype(np.float32),
    }
    return FederatedData.from_assignment(ArrayRecords(arrays), subject, silo, silos, keep=keep)


COMMON = {"batch_size": 12, "max_records_per_subject": 3, "clip_norm": 0.7}
MECHANISMS = {
    "fed_avg": lambda **k: fed_avg(**COMMON | k),
    "local_item": lambda **k: local_item(**COMMON | k),
    "local_group": lambda **k: local_group(**COMMON | {"batch_cap": 2} | k),
    "hi_grad_avg": lambda **k: hi_grad_avg(**COMMON | k),
    "average_then_clip": lambda **k: hi_grad_avg(**COMMON | {"average": "average_then_clip"} | k),
    "user_ldp": lambda **k: user_ldp(**COMMON | k),
    "subject_uls": lambda **k: subject_uls(**COMMON | {"group_size": 2} | k),
}


def make_federation(
    data, make, rounds=2, uneven=True, weights=None, noise_multiplier=0.8, **kwargs
):
    """Silos that differ in clip norm, noise and number of steps."""
    plans = []
    for i, silo in enumerate(data.silos):
        own, sigma = {}, noise_multiplier
        if uneven and make is not MECHANISMS["fed_avg"]:
            own, sigma = {"clip_norm": 0.5 + 0.1 * i}, 0.2 + 0.3 * i
        plans.append(
            SiloPlan(
                make(**own | kwargs),
                SiloFacts.of(silo),
                2 + i % 3 if uneven else 2,
                1.0 if weights is None else weights[i],
                sigma,
            )
        )
    return Federation(tuple(plans), rounds, data.num_silos)


def reference_sum(mechanism, params, data, draw):
    """One unit after the other with plain jax.grad; the sum before noise, as a tree of arrays."""
    unit_loss = mechanism.participation.unit_loss(loss_fn)
    total = jax.tree.map(lambda p: np.zeros(p.shape, np.float64), params)
    for u in range(draw.size):
        positions = draw.positions[u]
        if positions.ndim:
            real = positions >= 0
            records = data.read(np.where(real, positions, 0))
            unit = {"examples": records, "mask": real}
        else:
            unit = jax.tree.map(lambda a: a[0], data.read(positions[None]))
        grad = GRADS[mechanism.kind, unit_loss.__name__](unit_loss)(params, unit)
        norm = np.sqrt(sum(float(jnp.sum(g.astype(float) ** 2)) for g in jax.tree.leaves(grad)))
        weight = 1.0
        if mechanism.private:
            weight = min(1.0, mechanism.clip_norm / max(norm, 1e-30))
        if mechanism.kind == "hi_grad_avg" and not positions.ndim:
            weight *= draw.weight[u]
        total = jax.tree.map(lambda t, g, w=weight: t + w * np.asarray(g, np.float64), total, grad)
    return total


class _Grads(dict):
    def __missing__(self, key):
        self[key] = lambda f, cache={}: cache.setdefault(0, jax.jit(jax.grad(f)))
        return self[key]


GRADS = _Grads()


# Not compiled anew at every step: programs of a thousand silos take all of a process's maps.
_noised = jax.jit(lambda noise, key, clean: noise.add(key, clean), static_argnums=0)


def reference_round(federation, builder, params, optimizer, silos, poison=()):
    """A round as a plain loop over silos and steps. Returns (mean update, dropped)."""
    updates, weights, dropped = [], [], 0
    for i in silos:
        plan, draws = federation.silos[i], builder.draws(i, 0)
        keys = builder.noise_keys(i, 0)
        local, state = params, optimizer.init(params)
        for t in range(plan.local_steps):
            total = reference_sum(plan.mechanism, local, builder.data, draws[t])
            stddev = plan.sigma * plan.mechanism.clip_norm
            divisor = plan.mechanism.participation.divisor(plan.facts)
            noise = Noise(float(stddev), plan.mechanism.clip_norm, plan.mechanism.noise.arithmetic)
            clean = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), total)
            noised = _noised(noise, jnp.asarray(keys[t]), clean)
            grad = jax.tree.map(lambda g, d=divisor: g / jnp.float32(d), noised)
            step, state = optimizer.update(grad, state, local)
            local = optax.apply_updates(local, step)
        if i in poison:
            dropped += 1
            continue
        updates.append(jax.tree.map(lambda a, b: np.asarray(a - b), local, params))
        weights.append(plan.weight)
    mean = jax.tree.map(lambda *u: sum(w * x for w, x in zip(weights, u)) / sum(weights), *updates)
    return mean, dropped
