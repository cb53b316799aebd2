"""How loose the theorems' noise is, and where the experiments' noise overspends."""

from __future__ import annotations

from typing import Any

from dpfl_jax.federation.isrl import Budget
from reproductions._plots import panel
from reproductions.isrl._local_sgd import local_sgd_noise
from reproductions.isrl._published import silo_noise
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
        published = silo_noise(budget, N, BATCH, ROUNDS, arm="as_published")
        theorem = silo_noise(budget, N, BATCH, ROUNDS, arm="paper_closed_form")
        sound = silo_noise(budget, N, BATCH, ROUNDS)
        _, local = local_sgd_noise(budget, N, BATCH, ROUNDS, arm="as_published")
        rows.append(
            {
                "epsilon": epsilon,
                "theorem": theorem.epsilon,
                "experiments": published.epsilon,
                "experiments_local": local,
                "sound": sound.epsilon,
                "noise_sound": sound.noise_multiplier,
                "noise_experiments": published.noise_multiplier,
                "noise_theorem": theorem.noise_multiplier,
            }
        )
        one_pass = silo_noise(budget, N, BATCH, 2, arm="paper_closed_form", sampling="disjoint")
        rows[-1]["one_pass_theorem"] = one_pass.epsilon
        spends: tuple[tuple[str, float, Source], ...] = (
            ("Theorem D.1's noise", theorem.epsilon, "paper"),
            ("Theorem E.1's noise, one pass,", one_pass.epsilon, "paper"),
            ("the experiments' noise", published.epsilon, "authors' code"),
            ("our noise", sound.epsilon, "ours"),
        )
        for what, spent, source in spends:
            claims.append(
                Claim(
                    f"{what} spends at most the stated epsilon of {epsilon:g}",
                    round(spent, 4),
                    epsilon,
                    spent <= epsilon,
                    source=source,
                )
            )
    file = settings.out / "isrl-closed-forms.png"
    _draw(rows, file)
    return Outcome(
        claims,
        [file],
        rows,
        [
            "sampling with replacement has no tight accountant: the published noise is accounted "
            "as if batches were Poisson at the same rate, at the clip norm L they state",
            "local SGD's steps are accounted one by one, as if each were released",
        ],
    )


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file) as ax:
        x = [r["epsilon"] for r in rows]
        for key, name in (
            ("experiments_local", "experiments, local SGD"),
            ("experiments", "experiments, MB-SGD"),
            ("theorem", "theorem"),
            ("sound", "sound"),
        ):
            ax.plot(x, [r[key] for r in rows], marker="o", label=name)
        ax.plot(x, x, color="black", linewidth=0.8, label="as stated")
        ax.set(xscale="log", yscale="log", xlabel="stated epsilon", ylabel="epsilon spent")
