"""What the papers' calibrations really cost a subject, by the tight accountant."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from reproductions._plots import panel
from reproductions.registry import Claim, Outcome, Settings
from reproductions.subject import _closed_forms

TITLE = "what the papers' calibrations really cost"
SOURCE = "Marathe et al., text A sections 3 and 5.1, text B sections 3 and 4; target (4, 1e-5)"

EPSILON, DELTA = 4.0, 1e-5
# FEMNIST: 3,500 writers of 145 images over 16 silos, batches of 512. The number of local steps is
# not given in the papers: one pass over the silo's records is 62.
RECORDS, BATCH, CAP, SILOS, ROUNDS = 31_719, 512, 9, 16, 100
Q = BATCH / RECORDS
COLUMNS = ("claimed", "one_silo", "16_silos_fewer_rounds", "16_silos_more_noise")
TEXT_A, TEXT_B = "text A, HiGradAvgDP", "text B, HiGradAvgDP"
GROUP = "LocalGroupDP with constant noise for Z = 3"
USER = "UserLDP, text B"
USER_A = "UserLDP, text A"
CONSTANT = (
    "here with a constant divisor, where text A has the secret number of subjects, and with "
    "Poisson batches, where it draws B records"
)
# Shakespeare: 660 roles of 4,484 characters over 16 silos, batches of 100, 200 rounds.
SPEECH_CAP, SPEECH_BATCH, SPEECH_ROUNDS = 280, 100, 200
SPEECH_RECORDS = 660 * SPEECH_CAP


def calibrate(make: Callable[[float], Any]) -> float:
    """Noise for the papers' target, by the tight accountant."""
    return accounting.calibrate_noise_multiplier(make, EPSILON, DELTA)


def noise_of_records(fraction: float, steps: int) -> float:
    """Noise of DP-SGD at a sampling fraction, by the papers' accountant."""
    return _closed_forms.moments_noise(EPSILON, DELTA, fraction, steps)


def noise_of_user(steps: int) -> float:
    """UserLDP's by text A: of both theorems the larger."""
    return max(
        _closed_forms.user_ldp_noise(EPSILON, DELTA, steps),
        _closed_forms.user_ldp_least_noise(EPSILON, DELTA),
    )


def federated(make: Callable[..., Any], sigma: float, rounds: int, silos: int, local: int) -> float:
    """Real epsilon of a subject with K records in each of ``silos`` silos."""
    event = make(sigma, Q, CAP, local * rounds)
    return accounting.epsilon(events.horizontal([event] * silos), DELTA)


def run(settings: Settings) -> Outcome:
    """Computes the table and draws it."""
    rows: list[dict[str, Any]] = []
    with settings.console.status("accounting"):
        for local in (62, 10):
            for name, make, noise in _recipes():
                alone, louder = noise(local * ROUNDS), noise(local * ROUNDS * SILOS)
                fewer = _closed_forms.rounds_printed(ROUNDS, SILOS)
                rows.append(
                    {
                        "mechanism": name,
                        "local_steps": local,
                        "noise_multiplier": alone,
                        "claimed": EPSILON,
                        "one_silo": federated(make, alone, ROUNDS, 1, local),
                        "16_silos_fewer_rounds": federated(make, alone, fewer, SILOS, local),
                        "16_silos_more_noise": federated(make, louder, ROUNDS, SILOS, local),
                    }
                )
        claims = [*_claims(rows), _same(), *_fractions()]
    file = settings.out / "subject_audit.png"
    _draw(rows, file)
    note = (
        "text A prints the fraction k q with q = k B / |D|, and so k twice; here k counts once, as "
        "in its section 5.1, and is the most records of a subject in a silo (section 3.2); with "
        "their mean, as in Theorem 3.7, subjects above the mean would spend more"
    )
    by = (
        "noise by the moments accountant, as in the papers, and epsilon by the tight one; of an "
        "attacker who sees each local step, over which the papers compose, too"
    )
    return Outcome(claims, [file], rows, [note, by])


def _recipes() -> list[tuple[str, Callable[..., Any], Callable[[int], float]]]:
    """Name, event of a subject, and noise for a number of steps."""
    hi, group = events.poisson_of_averaged, events.poisson_of_several

    def user(sigma: float, prob: float, cap: int, steps: int) -> Any:
        return events.user_ldp(sigma, steps)

    fraction = functools.partial(_closed_forms.hi_grad_fraction, Q, CAP)
    return [
        (TEXT_B, hi, lambda steps: noise_of_records(fraction("B"), steps)),
        (
            GROUP,
            group,
            lambda steps: _closed_forms.noise_by_group(EPSILON, DELTA, 3, Q, steps, moments=True),
        ),
        (TEXT_A, hi, lambda steps: noise_of_records(fraction("A"), steps)),
        (USER, user, lambda steps: _closed_forms.user_ldp_noise(EPSILON, DELTA, steps)),
        (USER_A, user, noise_of_user),
    ]


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    def found(name: str, column: str) -> list[float]:
        return [round(r[column], 3) for r in rows if r["mechanism"] == name]

    def keeps(claim: str, name: str, column: str, why: str) -> Claim:
        values = found(name, column)
        why = f"at 62 and at 10 local steps a round; {why}"
        return Claim(claim, values, EPSILON, max(values) <= EPSILON, why, source="paper")

    more_than_claimed = found(GROUP, "one_silo")
    return [
        keeps(f"{TEXT_A} has epsilon 4 in one silo", TEXT_A, "one_silo", CONSTANT),
        keeps(
            f"{TEXT_B} has epsilon 4 in one silo",
            TEXT_B,
            "one_silo",
            "it takes q for 1 - (1 - q)^K, the chance that a subject is in a batch",
        ),
        keeps(
            f"of two users, {USER}, has epsilon 4 in one silo",
            USER,
            "one_silo",
            "two clipped means may be opposite, so that a step moves by 2C; every batch counts, as "
            "in text A: text B names no fraction. A subject of 9 among 31,719 records, in few "
            "batches, spends about 0.8; one that is the whole silo as much as a user",
        ),
        keeps(
            f"of two users, {USER_A}, has epsilon 4 in one silo",
            USER_A,
            "one_silo",
            "by the larger noise of Theorems 3.10 and 3.11, which asks for "
            f"{_closed_forms.user_ldp_least_noise(EPSILON, DELTA):.0f}",
        ),
        keeps(
            "both: what has epsilon 4 in one silo has it over s silos in R/sqrt(s) rounds",
            TEXT_A,
            "16_silos_fewer_rounds",
            f"{TEXT_A}, 16 silos: R/s rounds would do; {CONSTANT}",
        ),
        keeps(
            "both: what has epsilon 4 in one silo has it over s silos with noise for s times the "
            "steps",
            TEXT_A,
            "16_silos_more_noise",
            f"{TEXT_A}, 16 silos; {CONSTANT}",
        ),
        Claim(
            f"{GROUP}, spends more than epsilon 4 in one silo",
            more_than_claimed,
            f"> {EPSILON:g}",
            min(more_than_claimed) > EPSILON,
            "no recipe of the papers, whose noise follows Z of the batch: K records count, not Z",
            source="ours",
        ),
    ]


def _same() -> Claim:
    """With one record each there is no group in a batch: one noise for all."""
    makers = (events.poisson_of_averaged, events.poisson_of_several, None)
    same = [_one_record(make) for make in makers]
    return Claim(
        "with one record per subject all methods need the noise of LocalItemDP",
        [round(s, 4) for s in same],
        "one number",
        max(same) - min(same) < 1e-4,
        source="arithmetic",
    )


def _one_record(make: Callable[..., Any] | None) -> float:
    """n=2000, B=64, 200 steps, one record per subject."""
    prob = 64 / 2000
    if make is None:
        return calibrate(lambda s: events.poisson(s, prob, 200))
    return calibrate(lambda s: make(s, prob, 1, 200))


def _fractions() -> list[Claim]:
    """Why the two texts disagree about HiGradAvgDP's utility."""
    faces = _ratio(Q, CAP, 62 * ROUNDS)
    q = SPEECH_BATCH / SPEECH_RECORDS
    speech = _ratio(q, SPEECH_CAP, SPEECH_RECORDS // SPEECH_BATCH * SPEECH_ROUNDS)
    return [
        Claim(
            "text A: HiGradAvgDP's noise is about an order of magnitude above LocalItemDP's",
            round(faces, 2),
            "10, of the powers of ten the nearest",
            _is_tenfold(faces),
            "text B takes LocalItemDP's own noise: the sampling fraction K q or q is the main "
            "difference between the two texts; the divisor is another",
            source="paper",
        ),
        Claim(
            "text A: on Shakespeare its noise is higher by another order of magnitude",
            f"{speech:.4g} for {faces:.3g}",
            "10 times, of the powers of ten the nearest",
            _is_tenfold(speech / faces),
            f"one pass a round on both; {SPEECH_CAP} records of a role in a silo, their mean",
            source="paper",
        ),
    ]


def _ratio(q: float, cap: int, steps: int) -> float:
    """Text A's noise for HiGradAvgDP over text B's, which is that of LocalItemDP."""
    noise = {
        text: noise_of_records(_closed_forms.hi_grad_fraction(q, cap, text), steps)
        for text in ("A", "B")
    }
    return noise["A"] / noise["B"]


def _is_tenfold(ratio: float) -> bool:
    return math.sqrt(10) <= ratio < 10 * math.sqrt(10)


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    some = [r for r in rows if r["local_steps"] == 62]
    with panel(file, size=(8, 3.6)) as axes:
        for i, key in enumerate(COLUMNS):
            offsets = [k + 0.2 * (i - 1.5) for k in range(len(some))]
            values = [r[key] for r in some]
            axes.plot(offsets, values, "o", label=key.replace("_", " "))
            for x, value in zip(offsets, values, strict=True):
                axes.annotate(f"{value:.3g}", (x, value), (4, 4), textcoords="offset points")
        axes.set_yscale("log")
        axes.set_xticks(range(len(some)), [r["mechanism"] for r in some], fontsize=8)
        axes.margins(y=0.15)
        axes.set_ylabel("epsilon of a subject at delta 1e-5")
        axes.set_title("What the papers' calibrations really cost (FEMNIST-like)")
