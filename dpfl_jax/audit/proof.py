"""The largest epsilon that trials of an attack refute, with confidence.

A claim is a whole trade-off curve (``accounting.attacks``): no attack with a rate a of false alarms
has a rate of right alarms above f(a). Trials count both kinds of alarms. For every a the two counts
have independent p-values, which Fisher's method combines; the largest over all a is the p-value of
the claim. Thresholds and attacks are chosen on other trials. The result is stated as an epsilon:
that of the claimed event with the least noise whose curve is still refuted.

This needs independent trials, which the claimed mechanism gives: a true claim is refuted with at
most the stated probability. There is also the bound of Steinke, Nasr and Jagielski (2023, theorem
5.2). It needs only fair coins, but holds only for epsilon at delta, and is far from tight.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special, stats

from dpfl_jax import accounting
from dpfl_jax.accounting import plot_attacks
from dpfl_jax.accounting.attacks import Meaning, meaning
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.audit.trials import Trials, scaled
from dpfl_jax.errors import BadInputError, extra, require
from dpfl_jax.files import can_draw

# Factors by which the claimed noise is divided, 2 % apart; an audit refutes one of these events.
_FACTORS = 1.02 ** np.arange(-125, 71)
_CLAIM = 125
# Rates of false alarms at which p-values are computed; between two rates the worse one counts.
_RATES = np.concatenate([[0.0], np.geomspace(1e-8, 0.05, 500), np.linspace(0.05, 1, 951)[1:]])
_FEW = 800  # with fewer trials, all of them prove, and none choose an attack
_PARTS = 8  # parts of the trials: one to learn from, one to choose an attack on, the rest to prove
_BREAKS = 1e-4  # p-value that breaks a claim on the choosing trials (some fifty p-values are tried)
_GUESSED = (0.5, 0.25, 0.125, 0.0625)  # parts of the units that are guessed in, and as many out
_SEVERAL = 10  # rates from fewer false alarms are chance, and are not drawn
_ALARMS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3, 1e-3)


@dataclasses.dataclass(frozen=True)
class Audit:
    """What trials of an attack prove about a claim.

    Attributes:
      name: name of what was audited.
      how: what ran, in words.
      claimed: epsilon of the claim.
      delta: delta of the claim.
      confidence: confidence of what is proved.
      proved: epsilon of the claimed mechanism with the least noise that is refuted.
      proved_of_any: epsilon that is refuted for any mechanism, from fair coins only.
      p_value: p-value of the claim.
      attack: the attack that was chosen.
      alarms: (false alarms, units out, right alarms, units in), at the attack's threshold.
      points: float [k, 2], rates of false and right alarms at every threshold.
      curve: trade-off curve of the claim.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax import accounting
      >>> from dpfl_jax.audit import Trials, audit
      >>> inside = np.arange(400) % 2 == 0
      >>> seen = np.random.default_rng(0).normal(size=(400, 1)) + inside[:, None]
      >>> trials = Trials(inside, seen, accounting.events.gaussian(1.0, steps=1), delta=1e-5)
      >>> found = audit(trials)
      >>> found.proved <= found.claimed, found.confidence
      (True, 0.95)
    """

    name: str
    how: str
    claimed: float
    delta: float
    confidence: float
    proved: float
    proved_of_any: float
    p_value: float
    attack: str
    alarms: tuple[int, int, int, int]
    points: np.ndarray
    curve: Meaning

    @property
    def exceeds(self) -> bool:
        """Whether the claim is refuted."""
        refuted = self.p_value < 1.0 - self.confidence
        return refuted or max(self.proved, self.proved_of_any) > self.claimed

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON values, without points and curve."""
        hidden = ("points", "curve")
        out = {k: v for k, v in vars(self).items() if k not in hidden}
        return out | {"alarms": list(self.alarms), "exceeds": self.exceeds}

    def __str__(self) -> str:
        verdict = "THE CLAIM IS REFUTED" if self.exceeds else "the claim stands"
        return (
            f"{self.name}: claimed epsilon {rounded_up(self.claimed, 4)}, proved {self.proved:.4g} "
            f"({self.proved_of_any:.3g} of any mechanism) at delta {self.delta:.3g} with "
            f"{self.confidence:g} confidence: {verdict}"
        )


def audit(trials: Trials, confidence: float = 0.95) -> Audit:
    """Returns what trials prove about their claim.

    Args:
      trials: at least several hundred.
      confidence: probability with which a true claim is not refuted, from 0.5 to below 1.

    Raises:
      BadInputError: there are too few trials, or the event has no guarantee.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax import accounting
      >>> from dpfl_jax.audit import Trials, audit
      >>> inside = np.arange(400) % 2 == 0
      >>> seen = np.random.default_rng(0).normal(size=(400, 1)) + 3 * inside[:, None]
      >>> trials = Trials(inside, seen, accounting.events.gaussian(1.0, steps=1), delta=1e-5)
      >>> audit(trials).exceeds  # the shift is three times what was claimed
      True
    """
    require(0.5 <= confidence < 1, "the confidence", confidence, "at least 0.5 and below 1")
    n = len(trials.inside)
    few = n < _FEW
    learn, choose = (np.arange(n) % _PARTS == i for i in range(2))
    prove = ~(learn | choose) | few
    sides = [part & side for part in (choose, prove) for side in (trials.inside, ~trials.inside)]
    if min(side.sum() for side in sides[2 if few else 0 :]) < 20:
        raise BadInputError(
            f"there are {n} trials, but an audit needs several hundred: add canaries"
        )
    family = _Family(trials.event, trials.delta, trials.relation)
    level = 1.0 - confidence
    usual = family.best_rate(int(sides[3].sum()), level)
    if few:  # all trials prove, so that the threshold comes from the claimed noise
        attack, score = "likelihood ratio", trials.scores(learn)["likelihood ratio"]
        cut = trials.threshold(usual)
    else:
        attack, score, cut = _chosen(trials, family, learn, choose, usual, level)
    alarms = _counts(score, cut, sides[2:])
    refuted = family.refuted(alarms, level)
    low = 0.0 if few else float(np.quantile(score[choose], 0.5))
    cuts = np.quantile(score[prove], np.linspace(0, 1, 200))
    rates = np.array([[(score[side] > t).mean() for side in (sides[3], sides[2])] for t in cuts])
    return Audit(
        name=trials.name,
        how=trials.how,
        claimed=family.epsilon(_CLAIM),
        delta=trials.delta,
        confidence=confidence,
        proved=0.0 if refuted < 0 else family.epsilon(refuted),
        proved_of_any=one_run_bound(
            score[prove], trials.inside[prove], (min(low, cut), cut), trials.delta, level
        ),
        p_value=math.exp(family.log_p(alarms, _CLAIM)),
        attack=attack,
        alarms=alarms,
        points=rates,
        curve=family.claim,
    )


def guessed(
    score: np.ndarray,
    inside: np.ndarray,
    event: dp_accounting.DpEvent,
    delta: float,
    confidence: float,
    *,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    name: str,
    how: str,
) -> Audit:
    """Returns what scores of one release prove, if their distribution is unknown.

    Scores may depend on each other: only the bound for any mechanism is used. The units with the
    largest scores are guessed to be in, and those with the smallest to be out. Several sizes of
    these two groups are tried, with a Bonferroni correction.

    Args:
      score: float [n], a function of what was released.
      inside: bool [n], fair coins.
      event: the claimed event.
      delta: delta of the claim.
      confidence: confidence of what is proved.
      relation: adjacency: whether a coin decides if a unit takes part, or which of two does.
      name: name of what is audited.
      how: what ran, in words.
    """
    family = _Family(event, delta, relation)
    level = (1.0 - confidence) / len(_GUESSED)
    cuts = [tuple(map(float, np.quantile(score, (part, 1 - part)))) for part in _GUESSED]
    bounds = [one_run_bound(score, inside, cut, delta, level) for cut in cuts]  # type: ignore[arg-type]
    best = int(np.argmax(bounds))
    thresholds = np.quantile(score, np.linspace(0, 1, 200))
    points = np.array([[(score[s] > t).mean() for s in (~inside, inside)] for t in thresholds])
    claimed = family.epsilon(_CLAIM)
    return Audit(
        name=name,
        how=how,
        claimed=claimed,
        delta=delta,
        confidence=confidence,
        proved=bounds[best],
        proved_of_any=bounds[best],
        p_value=1.0 - confidence if bounds[best] > claimed else 1.0,
        attack=f"losses of the final model, {_GUESSED[best]:g} of them guessed in, as many out",
        alarms=_counts(score, cuts[best][1], [inside, ~inside]),
        points=points,
        curve=family.claim,
    )


def _chosen(
    trials: Trials,
    family: _Family,
    learn: np.ndarray,
    choose: np.ndarray,
    usual: float,
    level: float,
) -> tuple[str, np.ndarray, float]:
    """An attack, its scores and its threshold, chosen on trials that are not used to prove.

    Prefers an attack that breaks the claim on these; else takes the best against the claimed
    mechanism.
    """
    scores = trials.scores(learn)
    sides = [choose & trials.inside, choose & ~trials.inside]
    broken = []
    for attack, score in scores.items():
        # And quantiles of the units that are in, which those that are out may hardly reach.
        cuts = {*np.quantile(score[sides[1]], [1 - a for a in _ALARMS])}
        cuts |= {*np.quantile(score[sides[0]], [0.1, 0.5, 0.7, 0.9, 0.97])}
        for cut in sorted(cuts):
            alarms = _counts(score, cut, sides)
            log_p = family.log_p(alarms, _CLAIM)
            if log_p < math.log(_BREAKS):
                broken.append((-log_p, attack, cut, alarms))
    if broken:
        # Takes the attack that would prove most; among equals, the one with the least p-value.
        best = (-1, 0.0, "", 0.0)
        for surely, attack, cut, alarms in sorted(broken, reverse=True):
            proves = family.refuted(alarms, level, max(best[0] - 1, -1))
            best = max(best, (proves, surely, attack, float(cut)))
        _, _, attack, cut = best
        return attack, scores[attack], cut
    attack, score = next(iter(scores.items()))
    return attack, score, float(np.quantile(score[(learn | choose) & ~trials.inside], 1 - usual))


def _counts(score: np.ndarray, cut: float, sides: list[np.ndarray]) -> tuple[int, int, int, int]:
    inside, outside = sides
    return (
        int((score[outside] > cut).sum()),
        int(outside.sum()),
        int((score[inside] > cut).sum()),
        int(inside.sum()),
    )


class _Family:
    """The claimed event at every noise level of ``_FACTORS``; a *place* is an index into these."""

    def __init__(
        self, event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation
    ) -> None:
        self.known = _curves(repr(event), delta, relation.name)
        self.event, self.delta, self.relation = event, delta, relation

    @property
    def claim(self) -> Meaning:
        """The trade-off curve of the claim."""
        claim_curve = self.curve(_CLAIM)
        assert claim_curve is not None
        return claim_curve

    def curve(self, place: int) -> Meaning | None:
        """The trade-off curve at a place; None if no accountant bounds so little noise."""
        if place not in self.known:
            event = scaled(self.event, float(_FACTORS[place]))
            try:
                curve = meaning(event, self.delta, relation=self.relation)
                self.known[place] = (curve, curve.power(_RATES))
            except BadInputError:
                if place == _CLAIM:
                    raise
                self.known[place] = None
        value = self.known[place]
        return None if value is None else value[0]

    def epsilon(self, place: int) -> float:
        """Epsilon of the event at a place."""
        event = scaled(self.event, float(_FACTORS[place]))
        return accounting.epsilon(event, self.delta, relation=self.relation)

    def log_p(self, alarms: tuple[int, int, int, int], place: int) -> float:
        """Logarithm of the p-value of the event at a place; 0 if it has no curve to refute."""
        if self.curve(place) is None:
            return 0.0
        false, out, right, inside = alarms
        most = self.known[place][1]
        # The true rate lies between two rates of the grid: the right alarms are least surprising
        # at the upper one, and so few false alarms at the lower one.
        p_right = special.bdtrc(right - 1, inside, most[1:]) if right else 1.0
        p_false = special.bdtr(false, out, _RATES[:-1])
        joint = math.log(max(float((p_right * p_false).max()), 1e-300))
        return min(0.0, joint + math.log1p(-joint))  # Fisher's method for a product of two

    def best_rate(self, units: int, level: float) -> float:
        """The rate of false alarms at which ``units`` units in and ``units`` out prove most."""
        units = round(1.25 ** round(math.log(units, 1.25)))  # audits of similar size share a rate
        if (units, level) in self.known:
            return self.known[units, level]
        rates = np.geomspace(2.0 / units, 0.5, 24)
        right = np.floor(units * self.claim.power(rates)).astype(int)

        best, most = 0, -1
        for i in reversed(range(len(rates))):  # from large rates, which mostly prove most
            alarms = (math.ceil(units * rates[i]), units, int(right[i]), units)
            proves = self.refuted(alarms, level, max(most - 1, -1))
            if proves >= most:
                best, most = i, proves
        self.known[units, level] = float(rates[best])
        return self.known[units, level]

    def refuted(self, alarms: tuple[int, int, int, int], level: float, beyond: int = -1) -> int:
        """The last place that is refuted at this level, or ``beyond`` if no later one is.

        Curves are slow to compute: a caller that already has a place asks only for later ones.
        """
        low, high = beyond, len(_FACTORS)  # places are refuted up to one, as curves only grow
        step = 1
        while high - low > 1:
            middle = (low + high) // 2
            if beyond >= 0:
                middle, step = min(middle, low + step), 2 * step
            elif (low, high) == (-1, len(_FACTORS)):
                middle = _CLAIM
            if self.log_p(alarms, middle) < math.log(level):
                low = middle
            else:
                high = middle
        return low


@functools.lru_cache(maxsize=64)
def _curves(event: str, delta: float, relation: str) -> dict[Any, Any]:
    """The curves of a claim by place, kept so that many audits of one claim compute them once."""
    return {}


def one_run_bound(
    score: np.ndarray, inside: np.ndarray, cuts: tuple[float, float], delta: float, level: float
) -> float:
    """Returns the largest epsilon that is refuted for any (epsilon, delta)-private mechanism.

    Source: Steinke, Nasr and Jagielski 2023, theorem 5.2.

    Args:
      score: float [n].
      inside: bool [n], fair coins.
      cuts: guesses are "out" up to the first score, "in" above the second, and none between.
      delta: delta of the claim.
      level: one minus the confidence.
    """
    low, high = cuts
    best = 0.0
    for guess_out in (False, True):
        guessed = (score > high) | (guess_out & (score <= low))
        right = int((guessed & (inside == (score > high))).sum())
        count = int(guessed.sum())
        bottom, top = 0.0, 20.0
        while top - bottom > 1e-3:
            middle = (bottom + top) / 2
            # Each of the two ways to guess gets half of the level.
            if _one_run_p(len(score), count, right, middle, delta) < level / 2:
                bottom = middle
            else:
                top = middle
        best = max(best, bottom)
    return best


def _one_run_p(units: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of ``right`` or more right guesses (theorem 5.2)."""
    chance = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, chance))
    fewer = np.arange(1, right + 1)
    within = np.cumsum(stats.binom.pmf(right - fewer, guesses, chance)) / np.maximum(fewer, 1)
    return min(1.0, tail + 2.0 * units * delta * float(within.max(initial=0.0)))


def plot_audits(audits: Sequence[Audit]) -> Any:
    """Draws each claim's trade-off curve, and the attack's rates with a confidence interval.

    Returns:
      A Matplotlib figure.
    """
    with extra("plots", "a picture"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(5.6 * len(audits), 4.2), layout="constrained")
    axes = figure.subplots(1, len(audits), squeeze=False)
    for ax, audit in zip(axes[0], audits, strict=True):
        plot_attacks(ax, audit.curve)
        false, out, right, inside = audit.alarms
        points = audit.points[audit.points[:, 0] * out >= _SEVERAL]
        ax.plot(points[:, 0], points[:, 1], color="#c2571a", lw=1.2, label="this attack")
        level = (1 - audit.confidence) / 2
        low = stats.beta.ppf(level, right, inside - right + 1) if right else 0.0
        high = stats.beta.ppf(1 - level, false + 1, max(out - false, 1e-9))
        ax.errorbar(
            [max(false / out, 1e-4)],
            [right / inside],
            xerr=[[0], [max(high - max(false / out, 1e-4), 0)]],
            yerr=[[max(right / inside - low, 0)], [0]],
            fmt="o",
            ms=4,
            color="#c2571a",
            label="what the proof rests on",
        )
        verdict = "REFUTED" if audit.exceeds else f"proved {audit.proved:.3g}"
        claimed = rounded_up(audit.claimed, 3)
        ax.set_title(f"{audit.name}: epsilon {claimed} claimed, {verdict}", fontsize=10)
        ax.legend(loc="best", fontsize=8)
    return figure


# ---- the audit of a run, as files in its directory -----------------------------------------------
# Nothing in them is secret: coins are drawn only for the audit, and what attacks saw has the same
# noise as the model. Neither depends on which people took part.

SUMMARY, SEEN, PICTURE = "audit.json", "audit.npz", "audit.png"
FILES = (SUMMARY, SEEN, PICTURE)


@dataclasses.dataclass(frozen=True, eq=False)
class RunAudit:
    """What attacks on a run saw of its canaries: made-up users who took part by fair coins.

    Attributes:
      inside: bool [n], whether each canary took part.
      seen: float32 [n, steps], what was released along each canary's direction (``Trials.seen``).
      texts_inside: bool [m], whether each canary that is a text took part.
      gains: float32 [m], by how much training lowered the final model's loss on each text.
      confidence: confidence of what is to be proved.
      cost: what the canaries cost, as JSON values.
    """

    inside: np.ndarray
    seen: np.ndarray
    texts_inside: np.ndarray
    gains: np.ndarray
    confidence: float
    cost: dict[str, Any]

    def audits(self, stated: Statement, confidence: float | None = None) -> list[Audit]:
        """Returns what each attack that has canaries proves about the run's statement.

        Args:
          stated: the run's guarantee.json; its epsilon is the claim.
          confidence: confidence of what is proved; None: the run's.

        Raises:
          BadInputError: it states no guarantee, or one that cannot be audited.
        """
        cases = stated.cases
        if len(cases) != 1 or len(cases[0]) != 1:
            raise BadInputError(
                "an audit of a run needs a guarantee with a single event, which this one has not: "
                "audit the configuration with --simulate"
            )
        event, privacy = cases[0][0], stated.privacy
        steps = int(np.isfinite(self.seen).all(axis=0).sum())
        if len(self.inside) and steps > (privacy.steps or math.inf):
            raise BadInputError(
                f"canaries saw {steps} steps, but the guarantee is for {privacy.steps}: audit.npz "
                "or guarantee.json was changed since the run: bring the file back"
            )
        level = self.confidence if confidence is None else confidence
        results = []
        if len(self.inside):
            how = f"{len(self.inside)} canaries in the run, {self.inside.sum()} of them in, "
            how += f"and {steps} steps"
            trials = Trials(
                self.inside,
                self.seen,
                event,
                privacy.delta,
                stated.relation,
                name="every release",
                how=how,
            )
            results.append(audit(trials, level))
        if len(self.gains):
            how = f"{len(self.gains)} made-up users, {self.texts_inside.sum()} of them in"
            given = (self.gains, self.texts_inside, event, privacy.delta, level)
            results.append(guessed(*given, name="the final model", how=how))
        # The claim is the stated epsilon, even if the epsilon of its event is lower.
        return [dataclasses.replace(one, claimed=privacy.epsilon) for one in results]

    def write(self, directory: pathlib.Path, stated: Statement) -> dict[str, Any]:
        """Writes ``FILES``, and returns the contents of audit.json."""
        audits = self.audits(stated)
        values = summary(audits) | {"cost": self.cost, "confidence": self.confidence}
        arrays = {"inside": self.inside, "seen": self.seen}
        arrays |= {"texts_inside": self.texts_inside, "gains": self.gains}
        temporary = directory / f".{SEEN}.tmp.npz"
        np.savez(temporary, allow_pickle=False, **arrays)
        os.replace(temporary, directory / SEEN)
        if can_draw():
            plot_audits(audits).savefig(directory / PICTURE, dpi=130)
        (directory / SUMMARY).write_text(json.dumps(values, indent=2) + "\n")
        return values


def summary(audits: list[Audit]) -> dict[str, Any]:
    """Returns the verdict of several audits, and what each proves, as JSON values."""
    refuted = sum(one.exceeds for one in audits)
    return {
        "holds": refuted == 0,
        "refuted": refuted,
        "summary": [str(one) for one in audits],
        "audits": [one.to_json() for one in audits],
    }


def read_run_audit(directory: pathlib.Path) -> RunAudit:
    """Reads the audit of a run.

    Raises:
      BadInputError: the run had no canaries, or a file is missing or damaged.
    """
    if not (directory / SUMMARY).exists():
        raise BadInputError(
            f"the run in {directory} had no canaries, or is not finished, so that nothing can be "
            "proved about it: train with audit.canaries=500, or audit the configuration with "
            "--simulate"
        )
    try:
        values = json.loads((directory / SUMMARY).read_text())
        with np.load(directory / SEEN, allow_pickle=False) as arrays:
            fields = {name: arrays[name] for name in ("inside", "seen", "texts_inside", "gains")}
        seen = RunAudit(**fields, confidence=float(values["confidence"]), cost=dict(values["cost"]))
        wrong = _wrong(seen)
    except (OSError, ValueError, KeyError, TypeError) as error:
        wrong = str(error)
    if wrong is not None:
        raise BadInputError(
            f"the audit files of the run in {directory} ({SUMMARY}, {SEEN}) are damaged or were "
            f"changed: {wrong}"
        )
    return seen


def _wrong(audit: RunAudit) -> str | None:
    """What is inconsistent in an audit, in words, or None."""
    inside, texts = audit.inside, audit.texts_inside
    if not (inside.dtype == texts.dtype == bool and inside.ndim == texts.ndim == 1):
        return "coins are not true or false"
    kinds = {audit.seen.dtype.kind, audit.gains.dtype.kind}
    if kinds != {"f"} or audit.seen.ndim != 2 or len(audit.seen) != len(inside):
        return "it does not hold a row of numbers for each canary"
    if audit.gains.shape != texts.shape or not np.isfinite(audit.gains).all():
        return "gains are not a finite number for each made-up user"
    if not len(inside) + len(texts):
        return "there are no canaries"
    counts = [len(inside), inside.sum(), len(texts), texts.sum()]
    if counts != [audit.cost.get(k) for k in ("canaries", "inside", "texts", "texts_inside")]:
        return "the numbers of canaries in the two files differ"
    if len(inside) and not np.isfinite(audit.seen[:, :1]).all():
        return "nothing was seen of the first step"
    if not 0.5 <= audit.confidence < 1:
        return f"the confidence is {audit.confidence}"
    return None
