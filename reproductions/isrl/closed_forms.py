"""How loose the theorems' noise is, and where the experiments' noise overspends."""

from __future__ import annotations

from typing import Any

from dpfl_jax.federation.isrl import Budget
from reproductions._plots import panel
from reproductions.isrl._local_sgd import local_sgd_noise
from reproductions.isrl._published import silo_noise, with_replacement
from reproductions.registry import Claim, Outcome, Settings, Source

TITLE = "what the paper's noise really spends"
SOURCE = "Lowy and Razaviyayn 2023, Theorem D.1, Theorem E.1, appendix I; n = 1238, R = 35, K = 443"

N, ROUNDS, BATCH = 1238, 35, 443
EPSILONS = (0.75, 1.5, 3.0, 6.0, 12.0, 18.0)


def run(settings: Settings) -> Outcome:
    """Computes the table and draws it."""
    delta = 1 / N**2
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for epsilon in EPSILONS:
        budget = Budget(epsilon, delta)
        published = silo_noise(budget, N, BATCH, ROUNDS, arm="as_published").noise_multiplier
        theorem = silo_noise(budget, N, BATCH, ROUNDS, arm="paper_closed_form").noise_multiplier
        sound = silo_noise(budget, N, BATCH, ROUNDS)
        _, local = local_sgd_noise(budget, N, BATCH, ROUNDS, arm="as_published")
        one_pass = silo_noise(budget, N, BATCH, 2, arm="paper_closed_form", sampling="disjoint")
        spent = {
            "theorem": with_replacement(theorem, BATCH, N, ROUNDS, delta),
            "experiments": with_replacement(published, BATCH, N, ROUNDS, delta),
            # A logistic gradient is at most half of the authors' L.
            "logistic": with_replacement(2 * published, BATCH, N, ROUNDS, delta),
            "one_pass": (one_pass.epsilon, one_pass.epsilon),
            "ours": (sound.epsilon, sound.epsilon),
        }
        rows.append(
            {
                "epsilon": epsilon,
                "theorem": spent["theorem"][1],
                "experiments_at_least": spent["experiments"][0],
                "experiments_at_most": spent["experiments"][1],
                "logistic_at_least": spent["logistic"][0],
                "logistic_at_most": spent["logistic"][1],
                "experiments_local": local,
                "sound": sound.epsilon,
                "noise_sound": sound.noise_multiplier,
                "noise_experiments": published,
                "noise_theorem": theorem,
                "one_pass_theorem": one_pass.epsilon,
            }
        )
        claimed: tuple[tuple[str, str, Source], ...] = (
            ("theorem", "Theorem D.1's noise", "paper"),
            ("one_pass", "Theorem E.1's noise, one pass,", "paper"),
            ("experiments", "the experiments' noise, for gradients as large as L,", "paper"),
            ("logistic", "the experiments' noise, for logistic gradients of L/2,", "paper"),
            ("ours", "our noise", "ours"),
        )
        claims += [_claim(words, spent[key], epsilon, source) for key, words, source in claimed]
    file = settings.out / "isrl-closed-forms.png"
    _draw(rows, file)
    return Outcome(
        claims,
        [file],
        rows,
        [
            "batches are drawn with replacement, as the paper has them: at least what some data "
            "attain, at most a bound for all data (j ~ Bin(K, 1/n) draws of a record)",
            "the paper's experiments take L = 2 max |x|, twice the bound of a logistic gradient",
            "local SGD's steps are accounted one by one, as if each were released",
        ],
    )


def _claim(words: str, spent: tuple[float, float], epsilon: float, source: Source) -> Claim:
    """It holds if the bound does, and does not if some data spend more."""
    least, most = spent
    holds = True if most <= epsilon else (False if least > epsilon else None)
    found = f"{most:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
    said = f"{words} spends at most the stated epsilon of {epsilon:g}"
    return Claim(said, found, epsilon, holds, source=source)


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file) as ax:
        x = [r["epsilon"] for r in rows]
        for key, name in (
            ("experiments_local", "experiments, local SGD"),
            ("theorem", "theorem, at most"),
            ("sound", "sound"),
        ):
            ax.plot(x, [r[key] for r in rows], marker="o", label=name)
        ends = ([r[f"experiments_{end}"] for r in rows] for end in ("at_least", "at_most"))
        ax.fill_between(x, *ends, alpha=0.3, label="experiments, MB-SGD")
        ax.plot(x, x, color="black", linewidth=0.8, label="as stated")
        ax.set(xscale="log", yscale="log", xlabel="stated epsilon", ylabel="epsilon spent")
