"""``dpfl reproduce userlevel/budgets``: its verdicts on losses whose truth is planted."""

import numpy as np
import pytest

from dpfl_jax.planning import Option
from reproductions.registry import judged
from reproductions.userlevel import budgets

NOISE = np.array([-0.01, 0.0, 0.01])


def planted(best):
    """Losses with the best group size of each budget; larger errors, larger excess."""
    losses = {}
    for i, b in enumerate(budgets.BUDGETS):
        for g in budgets.GROUPS:
            excess = abs(np.log2(g) - np.log2(best[b]))
            # Not one noise for all: differences of equal noise would have no interval.
            losses["uls", g, b] = 5.0 - 0.4 * i + 0.1 * excess + np.roll(NOISE, g % 3)
        losses["els", 8, b] = 5.1 - 0.2 * i + NOISE
    picks = {b: Option("uls", g, b // g, 0.1, 1.0, 1.0) for b, g in best.items()}
    return losses, picks


@pytest.mark.parametrize(
    ("best", "holds"),
    [
        # Worth more; a larger group is better; against G = 1, 4, 16 for all; near; ULS gains more.
        ({64: 1, 256: 4, 1024: 16}, [True, True, True, True, True, True, True]),
        ({64: 4, 256: 4, 1024: 4}, [None, None, True, None, True, True, True]),
        ({64: 16, 256: 4, 1024: 1}, [False, None, True, True, True, True, True]),
    ],
)
def test_verdicts_follow_what_was_planted(best, holds):
    """None: equal losses decide nothing."""
    losses, picks = planted(best)
    assert [c.holds for c in judged(budgets._claims("made up", losses, picks, 2000))] == holds


def test_a_bad_choice_and_one_seed_are_told():
    losses, picks = planted({64: 1, 256: 4, 1024: 16})
    worst = {b: Option("uls", 16, b // 16, 0.1, 1.0, 1.0) for b in picks}
    told = [claim.holds for claim in judged(budgets._claims("made up", losses, worst, 2000))]
    assert told[:6] == [True, True, True, False, None, False]
    single = {key: values[:1] for key, values in losses.items()}
    told = [claim.holds for claim in judged(budgets._claims("made up", single, picks, 2000))]
    assert told == [None] * 7  # no interval without two seeds
    rows = budgets._rows("made up", losses, picks)
    assert len(rows) == 12
    assert sum(row["planned"] for row in rows) == 3
    assert all(min(row["losses"]) < row["loss"] < max(row["losses"]) for row in rows)
