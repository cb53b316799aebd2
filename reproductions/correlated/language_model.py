"""ULS, BandMF, BLT and allocation on the bundled language model, at equal epsilon and compute."""

from __future__ import annotations

import pathlib

from reproductions.correlated._training import compared
from reproductions.registry import Outcome, Settings

TITLE = "ULS, BandMF, BLT and allocation on the bundled language model, equal epsilon and compute"
SOURCE = "Choquette-Choo et al. 2023 (arXiv 2306.08153), with users for examples"
OPTIONS = ("seeds",)

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def run(settings: Settings) -> Outcome:
    """Shakespeare by role; one example of 16 expected roles a step."""
    return compared(settings, "language-model", CONFIG, cohort=16, group=1)
