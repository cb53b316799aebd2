"""The audit of a run, as files in its directory: what attacks saw, what that proves, a picture.

Nothing in them is secret: coins are drawn for the audit alone, and what attacks saw is noised like
the model. Which people took part has no influence on either.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from dpfl_jax.accounting.statement import Statement
from dpfl_jax.audit.proof import Audit, audit, guessed, plot_audits
from dpfl_jax.audit.trials import Trials
from dpfl_jax.errors import BadInputError

SUMMARY, SEEN, PICTURE = "audit.json", "audit.npz", "audit.png"
FILES = (SUMMARY, SEEN, PICTURE)


@dataclasses.dataclass(frozen=True, eq=False)
class RunAudit:
    """What attacks on a run saw of its canaries.

    Attributes:
      inside: bool [n], whether each canary took part, by fair coins.
      seen: float32 [n, steps], what was released along each one's direction (``Trials.seen``).
      texts_inside: bool [m], whether each canary that is a text took part.
      gains: float32 [m], by how much training lowered the final model's loss on each text.
      confidence: of what is to be proved.
      cost: what canaries cost, as JSON values.
    """

    inside: np.ndarray
    seen: np.ndarray
    texts_inside: np.ndarray
    gains: np.ndarray
    confidence: float
    cost: dict[str, Any]

    def audits(self, stated: Statement, confidence: float | None = None) -> list[Audit]:
        """What each attack that has canaries proves about the run's statement.

        Args:
          stated: the run's guarantee.json; its epsilon is the claim.
          confidence: default that of the run.

        Raises:
          BadInputError: it states no guarantee, or one that no audit knows.
        """
        cases = stated.cases
        if len(cases) != 1 or len(cases[0]) != 1:
            raise BadInputError("the guarantee is not of one event: it cannot be audited")
        event, privacy = cases[0][0], stated.privacy
        steps = int(np.isfinite(self.seen).all(axis=0).sum())
        if len(self.inside) and steps > (privacy.steps or math.inf):
            raise BadInputError(
                f"canaries saw {steps} steps, but the guarantee is of {privacy.steps}: "
                "audit.npz or guarantee.json is not as the run left it"
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
        # The stated epsilon is the claim, whatever its event costs.
        return [dataclasses.replace(one, claimed=privacy.epsilon) for one in results]

    def write(self, directory: pathlib.Path, stated: Statement) -> dict[str, Any]:
        """Writes ``FILES``; returns what audit.json says."""
        audits = self.audits(stated)
        values = summary(audits) | {"cost": self.cost, "confidence": self.confidence}
        arrays = {"inside": self.inside, "seen": self.seen}
        arrays |= {"texts_inside": self.texts_inside, "gains": self.gains}
        temporary = directory / f".{SEEN}.tmp.npz"
        np.savez(temporary, allow_pickle=False, **arrays)
        os.replace(temporary, directory / SEEN)
        plot_audits(audits).savefig(directory / PICTURE, dpi=130)
        (directory / SUMMARY).write_text(json.dumps(values, indent=2) + "\n")
        return values


def summary(audits: list[Audit]) -> dict[str, Any]:
    """The verdict of several audits, and what each proves, as JSON values."""
    refuted = sum(one.exceeds for one in audits)
    return {
        "holds": refuted == 0,
        "refuted": refuted,
        "summary": [str(one) for one in audits],
        "audits": [one.to_json() for one in audits],
    }


def read(directory: pathlib.Path) -> RunAudit:
    """Reads the audit of a run.

    Raises:
      BadInputError: the run had no canaries, or a file is missing or damaged.
    """
    if not (directory / SUMMARY).exists():
        raise BadInputError(
            f"the run in {directory} had no canaries, or is not finished: only units that were in "
            "or out by coins prove anything of a run; train with audit.canaries=500, or audit the "
            "configuration with --simulate"
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
            f"what the audit of the run in {directory} saw ({SUMMARY}, {SEEN}) is not as the run "
            f"left it: {wrong}"
        )
    return seen


def _wrong(audit: RunAudit) -> str | None:
    """What is inconsistent in an audit, in words; None if nothing is."""
    inside, texts = audit.inside, audit.texts_inside
    if not (inside.dtype == texts.dtype == bool and inside.ndim == texts.ndim == 1):
        return "coins are not true or false"
    kinds = {audit.seen.dtype.kind, audit.gains.dtype.kind}
    if kinds != {"f"} or audit.seen.ndim != 2 or len(audit.seen) != len(inside):
        return "what was seen is not a row of numbers for each canary"
    if audit.gains.shape != texts.shape or not np.isfinite(audit.gains).all():
        return "gains are not a finite number for each made-up user"
    if not len(inside) + len(texts):
        return "there are no canaries"
    counts = [len(inside), inside.sum(), len(texts), texts.sum()]
    if counts != [audit.cost.get(k) for k in ("canaries", "inside", "texts", "texts_inside")]:
        return "there are other numbers of canaries than it says"
    if len(inside) and not np.isfinite(audit.seen[:, :1]).all():
        return "nothing was seen of the first step"
    if not 0.5 <= audit.confidence < 1:
        return f"the confidence is {audit.confidence}"
    return None
