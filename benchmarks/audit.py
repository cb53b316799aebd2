"""``dpfl bench audit``: what the audit sees: planted bugs, how tight it is, false alarms."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.rates import TwoStage, certified_rates
from dpfl_jax.audit import Audit, Trials, audit
from dpfl_jax.audit.attacks import simulate
from dpfl_jax.federation.data import Silo
from dpfl_jax.federation.federation import SiloPlan
from dpfl_jax.federation.isrl import message
from dpfl_jax.federation.isrl.privacy import Budget, silo_noise
from dpfl_jax.federation.isrl.schedule import Schedule
from dpfl_jax.federation.mechanisms import (
    SiloMechanism,
    hi_grad_avg,
    local_group,
    local_item,
    subject_uls,
    user_ldp,
)
from dpfl_jax.federation.participation import PersonalRecords, SiloDraw, SiloFacts
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.mechanisms import (
    Mechanism,
    Population,
    allocation,
    banded_inverse,
    bandmf,
    blt,
    els,
    truncated,
    uls,
)
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.noise import Noise
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import UserSampler

HELP = "planted bugs that the audit sees, its tightness and false alarms"
DESCRIPTION = """\
What `dpfl audit --simulate` sees, in three tables.

  bugs      the library's own code with a bug planted in it: the epsilon proved, and the claim
  tightness the epsilon proved of sound mechanisms, over the claim
  alarms    audits of sound mechanisms, each with keys of its own, that refute their claim

examples:
  dpfl bench audit bugs
  dpfl bench audit tightness
  dpfl bench audit alarms --audits 200
"""

DELTA, CONFIDENCE = 1e-5, 0.999
_TOGETHER = 10  # audits that share one simulation, each of trials of its own


# ---- sound mechanisms --------------------------------------------------------------------------


def central(
    kind: Callable[..., Mechanism],
    epsilon: float,
    steps: int,
    prob: float,
    seed: int,
    **options: Any,
) -> Trials:
    """Trials of ULS, BandMF or ELS at a sampling probability."""
    group, fields = options.pop("group_size", 2), options.pop("fields", {})
    units = 1000 * (group if kind is els else 1)
    size: dict[str, Any] = {"batch_size" if kind is els else "cohort_size": prob * units}
    population = Population(1000, 1000 * group, units)
    mechanism = kind(group_size=group, **size, **fields)
    calibrated = mechanism.calibrate(population, steps, epsilon=epsilon, delta=DELTA)
    found = simulate.central(calibrated, RootKey.from_seed(seed), **options)
    return dataclasses.replace(found, name=f"{found.name}, T={steps}, q={prob:g}")


def silos(
    kind: Callable[..., SiloMechanism], epsilon: float, seed: int, *, reach: int = 1,
    rounds: int = 5, local_steps: int = 2, prob: float = 0.05, records: int = 2000, cap: int = 4,
    **options: Any,
) -> Trials:  # fmt: skip
    """Trials of a mechanism of silos at a target."""
    facts = SiloFacts(records, records // cap)
    made = kind(sampling_prob=prob, max_records_per_subject=cap)

    def at(sigma: float) -> SiloPlan:
        return SiloPlan(made, facts, local_steps, noise_multiplier=sigma)

    def event(sigma: float) -> Any:
        return events.horizontal([at(sigma).event(rounds)] * reach)

    plan = at(accounting.calibrate_noise_multiplier(event, epsilon, DELTA))
    return simulate.silos([plan] * reach, rounds, DELTA, RootKey.from_seed(seed), **options)


def personal(budget: float, seed: int, trials: int) -> Trials:
    """Trials of records with this budget, between such as have 8, the largest (or 1)."""
    rounds, local_steps = 4, 2
    sigma = accounting.calibrate_noise_multiplier(
        lambda s: events.two_stage(s, 1.0, 1.0, local_steps, rounds), 8.0, DELTA
    )
    setting = TwoStage(sigma, local_steps, rounds, 1.0, DELTA)
    both = np.array([budget, 1.0 if budget == 8.0 else 8.0])
    rate, other = certified_rates(both, setting, "error").rates.tolist()
    drawn = PersonalRecords(setting=setting, expected_batch=50.0)
    mechanism, key = SiloMechanism(participation=drawn), RootKey.from_seed(seed)
    plan = SiloPlan(mechanism, SiloFacts(500, 500), local_steps, noise_multiplier=sigma)
    return simulate.silos([plan], rounds, DELTA, key, rate=rate, other=other, trials=trials)


def messages(epsilon: float, seed: int, sampling: Any = "poisson", trials: int = 20_000) -> Trials:
    """Trials of the messages of an ISRL silo."""
    batch = 40 if sampling == "disjoint" else 100
    noise = silo_noise(Budget(epsilon, DELTA), 400, batch, 10, sampling=sampling)
    return simulate.messages(noise, RootKey.from_seed(seed), trials=trials)


# By name: epsilon, a seed and a number make trials of a sound mechanism in a second or a few.
SOUND: dict[str, Callable[[float, int, int], Trials]] = {
    "uls": lambda e, s, n: central(uls, e, 5, 0.2, s, trials=n),
    "bandmf": lambda e, s, n: central(
        bandmf, e, 8, 0.1, s, trials=n, fields={"bands": 3, "column": (0.75, 0.5, 0.4375)}
    ),
    "truncated": lambda e, s, n: central(truncated, e, 5, 0.2, s, trials=n, fields={"cap": 260}),
    "allocation": lambda e, s, n: central(allocation, e, 8, 0.25, s, trials=n),
    "blt": lambda e, s, n: central(blt, e, 8, 0.25, s, trials=n),
    "blt, user updates": lambda e, s, n: central(
        blt, e, 8, 0.25, s, trials=n, fields={"user_learning_rate": 0.1, "user_epochs": 2}
    ),
    "banded_inverse": lambda e, s, n: central(banded_inverse, e, 8, 0.25, s, trials=n),
    "els": lambda e, s, n: central(els, e, 5, 0.1, s, trials=n, group_size=3),
    "hi_grad_avg": lambda e, s, n: silos(hi_grad_avg, e, s, reach=2, rounds=2, trials=n),
    "local_group": lambda e, s, n: silos(local_group, e, s, reach=2, rounds=2, trials=n),
    "local_item": lambda e, s, n: silos(local_item, e, s, rounds=2, prob=0.2, trials=n),
    "subject_uls": lambda e, s, n: silos(subject_uls, e, s, rounds=2, prob=0.2, trials=n),
    "user_ldp": lambda e, s, n: silos(user_ldp, e, s, rounds=1, local_steps=1, trials=n // 5),
    "rpdp, smallest budget": lambda e, s, n: personal(e / 4, s, n),
    "rpdp, largest budget": lambda e, s, n: personal(2 * e, s, n),
    "isrl": lambda e, s, n: messages(e, s, trials=n),
    "isrl, full": lambda e, s, n: messages(e, s, "full", n),
    "isrl, disjoint": lambda e, s, n: messages(e, s, "disjoint", n),
}

TIGHTNESS: dict[str, Callable[[], Trials]] = {
    **{
        f"uls, T={steps}, epsilon {epsilon}": lambda e=epsilon, t=steps: central(  # type: ignore[misc]
            uls, e, t, 1.0 if t == 1 else 0.1, 11, trials=90_000 if e == 1 else 30_000
        )
        for steps in (1, 100)
        for epsilon in (1, 4, 8)
    },
    "hi_grad_avg": lambda: silos(hi_grad_avg, 4.0, 11, reach=2, trials=30_000),
    "rpdp, smallest budget": lambda: personal(1.0, 11, 160_000),
    "rpdp, largest budget": lambda: personal(8.0, 11, 30_000),
    "isrl": lambda: messages(4.0, 11, trials=30_000),
}


# ---- bugs --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _wrong_sum(change: Callable[..., Any]) -> Iterator[None]:
    """The clipped sum of central mechanisms, changed: ``change(real, loss, rule, options)``."""
    from dpfl_jax.mechanisms import user_update

    real = user_update.clipped_grad

    def wrong(loss: Any, *, rule: Any, **options: Any) -> Any:
        return change(real, loss, rule, options)

    with mock.patch.object(user_update, "clipped_grad", wrong):
        yield


def _mean_clipped(real: Any, loss: Any, rule: Any, options: Any) -> Any:
    free = real(loss, clip_norm=1e9, **options)

    def bounded(params: Any, units: Any, *, mask: Any) -> Any:
        found = free(params, units, mask=mask)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(found.sum)))
        factor = jnp.minimum(1.0, rule.sensitivity * mask.sum() / jnp.maximum(norm, 1e-9))
        return dataclasses.replace(found, sum=jax.tree.map(lambda x: x * factor, found.sum))

    return bounded


def _bias_unclipped(real: Any, loss: Any, rule: Any, options: Any) -> Any:
    clipped, free = real(loss, rule=rule, **options), real(loss, clip_norm=1e9, **options)

    def bounded(params: Any, units: Any, *, mask: Any) -> Any:
        found = clipped(params, units, mask=mask)
        bias = free(params, units, mask=mask).sum["bias"]
        return dataclasses.replace(found, sum={**found.sum, "bias": bias})

    return bounded


def _halves_clipped(real: Any, loss: Any, rule: Any, options: Any) -> Any:
    """As if each of two devices clipped the half of every user's examples that it holds."""
    whole = real(loss, rule=rule, **options)

    def bounded(params: Any, units: Any, *, mask: Any) -> Any:
        half = jax.tree.leaves(units)[0].shape[1] // 2
        first, second = (
            whole(params, jax.tree.map(lambda x, s=side: x[:, s], units), mask=mask)
            for side in (slice(None, half), slice(half, None))
        )
        return dataclasses.replace(first, sum=jax.tree.map(jnp.add, first.sum, second.sum))

    return bounded


def _half_noise() -> Any:
    real = Noise.add

    def wrong(self: Any, key: Any, tree: Any, *rest: Any) -> Any:
        return real(dataclasses.replace(self, stddev=self.stddev / 2), key, tree, *rest)

    return mock.patch.object(Noise, "add", wrong)


def _key_twice() -> Any:
    return mock.patch.object(
        Plan, "noise_key", lambda self, key, step: key.words("noise", step // 2)
    )


@contextlib.contextmanager
def _one_draw() -> Iterator[None]:
    """Every step of a central mechanism draws, and adds the noise of, the first one."""
    draw = UserSampler.draw
    same = mock.patch.object(UserSampler, "draw", lambda self, step: draw(self, 0))
    with _one_noise(), same:
        yield


def _one_noise() -> Any:
    real = Plan.noise_key

    def wrong(self: Plan, key: RootKey, step: int) -> np.ndarray:
        words = real(self, key, step).copy()
        words[:8] = real(self, key, 0)[:8]  # what follows tells correlated noise which step it is
        return words

    return mock.patch.object(Plan, "noise_key", wrong)


def _one_round() -> Any:
    """The silos' coins and noise of every round are those of the first."""
    real = RoundBuilder.silo_key
    return mock.patch.object(RoundBuilder, "silo_key", lambda self, silo, _: real(self, silo, 0))


@contextlib.contextmanager
def _one_message() -> Iterator[None]:
    """Likewise of messages, whose keys depend on the point, too."""
    real = Schedule.rows

    def rows(self: Any) -> Any:
        found = real(self)
        return found | {"keys": jnp.broadcast_to(found["keys"][:1], found["keys"].shape)}

    with (
        mock.patch.object(Schedule, "rows", rows),
        mock.patch.object(message, "derived_keys", lambda keys, words: keys),
    ):
        yield


def _wrong_records() -> Any:
    """Every record of a silo is drawn at the rate of the next one."""
    real = Silo.at_round

    def wrong(self: Silo, round_index: int) -> Silo:
        now = real(self, round_index)
        assert now.rates is not None
        return dataclasses.replace(now, rates=np.roll(now.rates, -1))

    return mock.patch.object(Silo, "at_round", wrong)


def _noise_once() -> Any:
    real = RoundBuilder.noise_keys
    return mock.patch.object(RoundBuilder, "noise_keys", lambda self, _, r: real(self, 0, r))


def _realised_batch() -> Any:
    real = RoundBuilder.scale

    def wrong(self: RoundBuilder, silo: int, draw: SiloDraw) -> tuple[float, float]:
        return real(self, silo, draw)[0], float(max(draw.size, 1))

    return mock.patch.object(RoundBuilder, "scale", wrong)


def _double_rate() -> Any:
    from dpfl_jax.sampling import schemes

    real = schemes.poisson_indices
    return mock.patch.object(
        schemes, "poisson_indices", lambda rng, n, prob: real(rng, n, min(1.0, 2 * prob))
    )


def _two_devices() -> Mesh:
    return data_parallel_mesh(jax.devices()[:2])


# Where each is planted, and what is audited then.
BUGS: dict[str, tuple[Callable[[], Any], Callable[[], Trials]]] = {
    "none": (contextlib.nullcontext, lambda: central(uls, 2.0, 4, 0.5, 1, trials=6000)),
    "noise / 2": (_half_noise, lambda: central(uls, 2.0, 4, 0.5, 1, trials=6000)),
    "clipping the batch mean": (
        lambda: _wrong_sum(_mean_clipped),
        lambda: central(uls, 2.0, 4, 0.5, 1, trials=6000, directions=400),
    ),
    "key reused in two steps": (_key_twice, lambda: central(uls, 2.0, 4, 0.5, 1, trials=6000)),
    "noise once for all silos": (
        _noise_once,
        lambda: silos(hi_grad_avg, 2.0, 1, rounds=2, trials=6000, prob=0.2),
    ),
    "one draw in all steps": (_one_draw, lambda: central(uls, 2.0, 4, 0.5, 1, trials=3000)),
    "one noise in all steps, correlated": (
        _one_noise, lambda: central(blt, 2.0, 8, 0.25, 1, trials=3000)
    ),
    "one draw in all rounds": (
        _one_round, lambda: silos(hi_grad_avg, 2.0, 1, rounds=2, trials=3000, prob=0.2)
    ),
    "one draw in all rounds, personal": (_one_round, lambda: personal(2.0, 1, 3000)),
    "rates of other records": (_wrong_records, lambda: personal(1.0, 1, 3000)),
    "one draw in all messages": (_one_message, lambda: messages(2.0, 1, trials=3000)),
    "one draw in all messages, full": (_one_message, lambda: messages(2.0, 1, "full", 3000)),
    "one draw in all messages, disjoint": (
        _one_message, lambda: messages(2.0, 1, "disjoint", 3000)
    ),
    "division by the realised batch": (
        _realised_batch,
        lambda: silos(local_item, 2.0, 1, rounds=1, local_steps=1, prob=1.0, records=6, cap=1,
                      against=5, trials=4000),
    ),
    "unclipped bias": (
        lambda: _wrong_sum(_bias_unclipped), lambda: central(uls, 2.0, 4, 0.5, 1, trials=6000)
    ),
    "sampling rate off by 2": (_double_rate, lambda: central(uls, 2.0, 4, 0.25, 1, trials=12_000)),
    "unit split in two by sharding": (
        lambda: _wrong_sum(_halves_clipped),
        lambda: central(uls, 2.0, 4, 0.5, 1, trials=6000, mesh=_two_devices()),
    ),
}  # fmt: skip


def planted(name: str) -> Audit:
    """The audit of the library with this bug in it."""
    plant, trials = BUGS[name]
    with plant():
        return audit(dataclasses.replace(trials(), name=name), CONFIDENCE)


# ---- the command -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("table", choices=("bugs", "tightness", "alarms"))
    parser.add_argument("--audits", type=int, default=200, metavar="N", help="of alarms")
    parser.add_argument(
        "--confidence", type=float, default=CONFIDENCE, metavar="C", help="of alarms"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints one table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=args.json)
    rows = []
    if args.table == "alarms":
        makers = list(SOUND.items())
        for i in range(math.ceil(args.audits / _TOGETHER)):
            name, make = makers[i % len(makers)]
            epsilon = (1.0, 2.0, 4.0)[i % 3]
            whole = make(epsilon, 1000 + i, 4000 * _TOGETHER)
            for part in np.array_split(np.arange(len(whole.inside)), _TOGETHER):
                found = audit(whole.part(part), args.confidence)
                rows.append(_row(f"{name}, epsilon {epsilon:g}", found, 0.0))
            last = rows[-_TOGETHER:]
            console.print(
                f"{name}, claimed {found.claimed:.3g}: proved at most "
                f"{max(r['proved'] for r in last):.3g} in {_TOGETHER} audits, "
                f"{sum(r['exceeds'] for r in last)} refuted",
                highlight=False,
            )
        refuted = sum(r["exceeds"] for r in rows)
        weak = sum(r["p_value"] < 0.05 for r in rows)
        console.print(
            f"{refuted} of {len(rows)} audits of sound mechanisms refute their claim at confidence "
            f"{args.confidence:g} ({weak} would at 0.95)"
        )
    else:
        table = Table("", "claimed epsilon", "proved", "p-value of the claim", "attack", "seconds")
        names: Any = BUGS if args.table == "bugs" else TIGHTNESS
        for name in names:
            start = time.perf_counter()
            if args.table == "bugs":
                found = planted(name)
            else:
                found = audit(dataclasses.replace(TIGHTNESS[name](), name=name), 0.95)
            rows.append(_row(name, found, time.perf_counter() - start))
            sign = "> " if found.exceeds else ""
            table.add_row(
                name,
                f"{found.claimed:.3f}",
                f"{sign}{found.proved:.3f} ({found.proved / found.claimed:.0%})",
                f"{found.p_value:.2g}",
                found.attack,
                f"{rows[-1]['seconds']:.1f}",
            )
        console.print(table)
    return {"machine": platform.platform(), "rows": rows}


def _row(name: str, found: Audit, seconds: float) -> dict[str, Any]:
    return {**found.to_json(), "name": name, "seconds": seconds}
