"""An attack on what a silo sends: no arm that claims a guarantee may be caught above it.

The worst case under replace-one: a silo whose other records have no gradient, and one record whose
gradient is +C or -C. The attacker sees every message of the silo, made by the library's own code,
and decides by the likelihood ratio. True and false positive rates give a lower bound on epsilon
with 99 % confidence (Clopper-Pearson).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, events
from dpfl_jax.federation.isrl import Budget, MessageSpec, SiloNoise, silo_guarantee
from reproductions._plots import panel
from reproductions._seeds import of
from reproductions.isrl._published import Published, message_of, silo_noise, with_replacement
from reproductions.registry import Claim, Outcome, Settings
from reproductions.subject.empirical_audit import CONFIDENCE, attack

TITLE = "an attack on a silo's messages"
SOURCE = "Lowy and Razaviyayn 2023, Definition 5 and Theorem D.1; likelihood-ratio attack"

SIZE, BATCH, ROUNDS, DELTA, CLIP = 20, 5, 8, 1e-3, 1.0
EPSILONS = (1.0, 3.0)
HUGE = 1e4  # a record's gradient before clipping


def _loss(w: jax.Array, example: Any) -> jax.Array:
    return w @ example["x"]


@dataclasses.dataclass(frozen=True)
class Silo:
    """A silo under attack.

    Attributes:
      name: for people.
      noise: what it adds.
      spec: how its messages are made.
    """

    name: str
    noise: SiloNoise
    spec: MessageSpec | Published

    @property
    def claimed(self) -> float:
        """What its guarantee says, or a bound for the paper's messages."""
        if isinstance(self.spec, MessageSpec):
            return silo_guarantee(self.noise).epsilon
        z = self.noise.noise_multiplier
        if self.spec.clip == "batch_mean":  # a batch that is drawn moves the sum by up to 2 K C
            return accounting.epsilon(events.gaussian(z / BATCH, ROUNDS), DELTA, relation=REPLACE)
        return with_replacement(z, BATCH, SIZE, ROUNDS, DELTA)[1]


def transcripts(silo: Silo, sign: float, trials: int, seed: int) -> np.ndarray:
    """Messages over their noise [trials, R], of the silo whose first record has this sign."""
    keys = jax.random.split(jax.random.key(of(seed)), trials)
    noise = silo.noise
    found = _sent(silo.spec, keys, sign, noise.noise_multiplier, float(noise.batch))
    return np.asarray(found, np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _sent(
    spec: MessageSpec | Published, keys: jax.Array, sign: Any, z: Any, batch: Any
) -> jax.Array:
    x = jnp.zeros((SIZE, 1)).at[0, 0].set(sign * HUGE)
    message = message_of(_loss, spec, BATCH)

    def one(key: jax.Array) -> jax.Array:
        order, draws = jax.random.split(key)
        rank = jax.random.permutation(order, SIZE).astype(jnp.int32)
        pairs = jax.random.bits(draws, (ROUNDS, 2, 8), jnp.uint32)

        def sent(turn: jax.Array, pair: jax.Array) -> jax.Array:
            size, clip = jnp.asarray(SIZE), jnp.asarray(CLIP, jnp.float32)
            return message(jnp.zeros(1), {"x": x}, size, rank, turn, batch, clip, z * CLIP, pair)[0]

        return jax.vmap(sent)(jnp.arange(ROUNDS), pairs) * batch / (z * CLIP)

    return jax.lax.map(one, keys, batch_size=1000)


def likelihood(silo: Silo, y: np.ndarray, sign: float) -> np.ndarray:
    """Log-likelihood [trials] of transcripts, up to what does not depend on the sign."""
    z, rate = silo.noise.noise_multiplier, silo.noise.batch / SIZE
    # How far the record moves a message, in noise, and how often.
    if isinstance(silo.spec, Published) and silo.spec.clip == "batch_mean":
        shifts, weights = np.array([0.0, silo.noise.batch]), np.array([1 - rate, rate])
    elif silo.spec.sampling == "with_replacement":
        shifts = np.arange(BATCH + 1.0)
        weights = stats.binom.pmf(shifts, BATCH, 1 / SIZE)
    else:
        shifts, weights = np.array([0.0, 1.0]), np.array([1 - rate, rate])
    shifts = sign * shifts / z
    if silo.spec.sampling == "disjoint":
        # In one round, or in none that there are.
        rounds = SIZE // BATCH
        terms = shifts[1] * y[:, :rounds] - shifts[1] ** 2 / 2
        return np.logaddexp.reduce(terms, axis=1)
    with np.errstate(divide="ignore"):
        terms = np.log(weights) + shifts * y[..., None] - shifts**2 / 2
    return np.logaddexp.reduce(terms, axis=-1).sum(axis=1)


def measure(silo: Silo, trials: int, seed: int) -> float:
    """Epsilon that the attack proves."""

    def score(rng: np.random.Generator, inside: bool) -> np.ndarray:
        y = transcripts(silo, 1.0 if inside else -1.0, trials, 2 * seed + inside)
        return likelihood(silo, y, 1.0) - likelihood(silo, y, -1.0)

    return attack(score, trials, DELTA)


def silos(epsilon: float) -> list[Silo]:
    """All ways to make messages, at one target."""
    budget = Budget(epsilon, DELTA)
    made = []
    for sampling, batch in (("poisson", BATCH), ("full", SIZE), ("disjoint", BATCH)):
        spec = MessageSpec(sampling)  # type: ignore[arg-type]
        noise = silo_noise(budget, SIZE, batch, ROUNDS, sampling=spec.sampling)
        made.append(Silo(f"sound, {sampling}", noise, spec))
    theorem = silo_noise(budget, SIZE, BATCH, ROUNDS, arm="paper_closed_form")
    made.append(Silo("paper_closed_form", theorem, MessageSpec()))
    published = silo_noise(budget, SIZE, BATCH, ROUNDS, arm="as_published")
    made.append(Silo("as_published", published, Published()))
    # On Poisson batches: even so the wrong clipping is caught.
    coded = Published("batch_mean", "poisson")
    made.append(Silo("as_published, clipping the mean", published, coded))
    return made


def run(settings: Settings) -> Outcome:
    """Attacks every arm at every epsilon."""
    trials = 20_000 if settings.quick else 200_000
    rows: list[dict[str, Any]] = []
    with settings.console.status("attacking"):
        for epsilon in EPSILONS:
            for seed, silo in enumerate(silos(epsilon)):
                rows.append(
                    {
                        "target": epsilon,
                        "silo": silo.name,
                        "claimed": silo.claimed,
                        "attack": measure(silo, trials, seed),
                    }
                )
    claims = []
    for row in rows:
        name = f"{row['silo']}, target epsilon {row['target']:g}"
        claims.append(
            Claim(
                f"{name}: the attack stays below the claim",
                round(row["attack"], 3),
                f"<= {row['claimed']:.3f}",
                row["attack"] <= row["claimed"],
                source="ours",
            )
        )
        if "mean" in row["silo"]:
            claims.append(
                Claim(
                    f"{name}: the attack breaks the stated epsilon",
                    round(row["attack"], 3),
                    f"> {row['target']:g}",
                    row["attack"] > row["target"],
                    "a record moves the clipped mean by twice the clip norm",
                    source="ours",
                )
            )
    sharp = [
        row["attack"] / row["claimed"]
        for row in rows
        if row["silo"] == "sound, full" and row["target"] == EPSILONS[-1]
    ]
    claims.append(
        Claim(
            f"epsilon {EPSILONS[-1]:g}, sound full batches: the attack finds 40 % of it",
            round(min(sharp), 2),
            ">= 0.4",
            min(sharp) >= 0.4,
            "of Poisson and disjoint batches it finds less in so many transcripts",
            source="ours",
        )
    )
    file = settings.out / "isrl-audit.png"
    _draw(rows, file)
    return Outcome(
        claims,
        [file],
        rows,
        [
            f"{trials} transcripts with either record, of {ROUNDS} messages of the library's own "
            f"code; n = {SIZE}, K = {BATCH}; confidence {CONFIDENCE:g}"
        ],
    )


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file) as ax:
        names = list(dict.fromkeys(r["silo"] for r in rows))
        for at, epsilon in enumerate(EPSILONS):
            part = [r["attack"] for r in rows if r["target"] == epsilon]
            places = np.arange(len(names)) + 0.4 * at
            bars = ax.barh(places, part, 0.38, label=f"target {epsilon:g}")
            ax.bar_label(bars, fmt="%.2g", padding=3, fontsize=8)
            ax.axvline(epsilon, color=f"C{at}", linewidth=0.8, linestyle="--")
        ax.set(xlabel="epsilon that the attack proves")
        ax.set_yticks(np.arange(len(names)) + 0.2, [name.replace("_", " ") for name in names])
