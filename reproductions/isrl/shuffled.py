"""Theorem 5.1: Gaussian messages that a shuffler has mixed, at the noise of the theorem's proof."""

from __future__ import annotations

import math
from typing import Any

from scipy import optimize

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, closed_forms, events
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl import Budget
from dpfl_jax.federation.isrl.privacy import silo_noise
from reproductions._plots import columns, panel
from reproductions.isrl._baselines import central_noise
from reproductions.isrl.rates import slope
from reproductions.registry import Claim, Outcome, Settings, within

TITLE = "with a shuffler, Gaussian noise reaches the central rates"
SOURCE = "Lowy and Razaviyayn 2023, Theorem 5.1 and its proof (G.1); all silos answer"

BUDGET = Budget(1.0, 1e-6)
BASE = {"silos": 100_000, "n": 16}
SWEEPS = {"silos": (1_000, 10_000, 100_000, 1_000_000), "n": (4, 8, 16, 32)}
SLOPES = {"ISRL-DP": (-1, -2), "shuffle": (-2, -2), "central": (-2, -2)}


def rounds_of(silos: int, n: int) -> int:
    """R by the proof, whose largest term is n^2 N^2 epsilon^2 / M here."""
    return math.ceil(n**2 * silos * BUDGET.epsilon**2)


def shuffled_noise(budget: Budget, silos: int, n: int, rounds: int) -> float:
    """The noise of a record's gradient over L, K = 1, by the steps of the proof of Theorem G.1.

    Advanced composition over rounds; one record of n drawn by each silo (amplification by 1/n);
    shuffling of the N reports (Theorem D.5 with one record a silo); and the Gaussian mechanism, for
    which the proof has a closed form and this the exact epsilon.

    Unit: a record. Adjacency: replace it. Trusted: its silo, and a shuffler.

    Raises:
      BadInputError: there are too few silos for the theorem.
    """
    # Dwork and Roth, Theorem 3.20, with half of delta for the rounds and half for the composition.
    slack, rate = budget.delta / 2, 1 / n

    def composed(epsilon: float) -> float:
        first = math.sqrt(2 * rounds * math.log(1 / slack)) * epsilon
        return first + rounds * epsilon * math.expm1(epsilon) - budget.epsilon

    a_round = optimize.brentq(composed, 0.0, budget.epsilon)
    mixed = math.log1p(math.expm1(a_round) / rate)
    mixed_delta = budget.delta / (2 * rounds) / rate
    limit = silos / (16 * math.log(2 / (mixed_delta / 2)))
    if limit <= 1:
        raise BadInputError(f"Theorem 5.1 needs more than {silos} silos here")

    def shuffled(epsilon: float) -> float:
        return closed_forms.shuffled_epsilon(epsilon, silos, 1, mixed_delta / 2) - mixed

    most = math.log(limit) * (1 - 1e-9)
    local = most if shuffled(most) <= 0 else optimize.brentq(shuffled, 0.0, most)
    # One record a silo: delta + 2 N local_delta (``closed_forms.shuffled_delta``).
    local_delta = mixed_delta / (4 * silos)
    return accounting.calibrate_noise_multiplier(
        lambda z: events.gaussian(z, 1), local, local_delta, relation=REPLACE, use_cache=False
    )


def noises(silos: int, n: int) -> dict[str, float]:
    """Notion -> standard deviation of the noise on the mean of N gradients, L = 1."""
    rounds = rounds_of(silos, n)
    shuffled = shuffled_noise(BUDGET, silos, n, rounds)
    own = silo_noise(BUDGET, n, 1, rounds).noise_multiplier
    central = central_noise(BUDGET, [n] * silos, [1] * silos, rounds).noise_multiplier
    alike = math.sqrt(silos)  # of N silos that add noise each
    return {"ISRL-DP": own / alike, "shuffle": shuffled / alike, "central": central / silos}


def price(silos: int, n: int, sigma: float) -> float:
    """sigma^2 / R, the variance that noise leaves in the mean of R rounds' gradients.

    The privacy term of a strongly convex loss's risk is d / (2 mu) times that.
    """
    return sigma**2 / rounds_of(silos, n)


def constant(silos: int, n: int) -> float:
    """The C of Theorem G.1: its variance of the noise is C times logarithms, for L = 1."""
    rounds, delta = rounds_of(silos, n), BUDGET.delta
    logs = math.log(rounds * silos / delta) * math.log(rounds / delta) * math.log(1 / delta)
    scale = rounds * silos * logs / (n * silos * BUDGET.epsilon) ** 2
    return shuffled_noise(BUDGET, silos, n, rounds) ** 2 / scale


def run(settings: Settings) -> Outcome:
    """Sweeps the number of silos, and of records, for three notions."""
    rows: list[dict[str, Any]] = []
    for name, values in SWEEPS.items():
        for value in values:
            setting = BASE | {name: value}
            facts = {"varied": name, "value": value, "rounds": rounds_of(**setting)}
            facts["constant"] = constant(**setting)
            for notion, sigma in noises(**setting).items():
                rows.append(facts | {"notion": notion, "price": price(**setting, sigma=sigma)})
    file = settings.out / "isrl-shuffled.png"
    _draw(rows, file)
    return Outcome(
        _claims(rows),
        [file],
        rows,
        [
            f"epsilon {BUDGET.epsilon:g}, delta {BUDGET.delta:g} for every record; K = 1 and the "
            "proof's rounds; the price is the noise's variance in the mean of all rounds",
            "shuffle's noise is that of the proof's steps, each with its number where the proof "
            "has a constant: composition, sampling, shuffling, one Gaussian; shuffling is Theorem "
            "D.5 with one record a silo, where the proof has Theorem 3.8 of Feldman et al. 2020",
            "ISRL-DP's and central noise are accounted exactly, shuffle's by bounds: the prices "
            "compare calibrations, not what the notions need",
        ],
    )


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    for notion, expected in SLOPES.items():
        for name, want in zip(SWEEPS, expected, strict=True):
            part = [r for r in rows if (r["notion"], r["varied"]) == (notion, name)]
            claims.append(
                within(
                    f"{notion}: price of privacy against {'N' if name == 'silos' else 'n'}, slope",
                    slope([r["value"] for r in part], [r["price"] for r in part]),
                    want,
                    0.25,
                    "within 0.25; the theorem's rate has logarithms",
                    source="paper" if notion == "shuffle" else "ours",
                )
            )
    found = [r["constant"] for r in rows if r["notion"] == "shuffle"]
    claims.append(
        Claim(
            f"there is a constant C for Theorem G.1's noise, at epsilon {BUDGET.epsilon:g}",
            [float(f"{min(found):.3g}"), float(f"{max(found):.3g}")],
            "between the same two numbers at all N and n",
            max(found) <= 2 * min(found),
            f"within a factor of 2 over the sweeps, at delta {BUDGET.delta:g}",
            source="paper",
        )
    )
    most = SWEEPS["silos"][-1]
    last = {r["notion"]: r["price"] for r in rows if r["value"] == most}
    falling = [last[notion] for notion in SLOPES]
    claims.append(
        Claim(
            f"with {most:,} silos, trust in a shuffler pays: ISRL-DP > shuffle > central",
            [float(f"{v:.2g}") for v in falling],
            "falling",
            falling[0] > falling[1] > falling[2],
            f"their calibrations ask for the same noise at about {crossing():,} silos",
            source="ours",
        )
    )
    return claims


def crossing() -> int:
    """Number of silos from which the theorem asks for less noise than ISRL-DP itself."""

    def more(log_silos: float) -> float:
        sigmas = noises(round(math.exp(log_silos)), BASE["n"])
        return sigmas["shuffle"] - sigmas["ISRL-DP"]

    low, high = (math.log(SWEEPS["silos"][end]) for end in (0, -1))
    return int(float(f"{math.exp(optimize.brentq(more, low, high, xtol=1e-3)):.2g}"))


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, 1, 2, size=(9, 3.6)) as axes:
        for ax, name in zip(axes, SWEEPS, strict=True):
            for notion in SLOPES:
                part = [r for r in rows if (r["notion"], r["varied"]) == (notion, name)]
                ax.loglog(*columns(part, "value", "price"), "o-", label=notion)
            label = "silos" if name == "silos" else "records of a silo"
            ax.set(xlabel=label, ylabel="price of privacy")
