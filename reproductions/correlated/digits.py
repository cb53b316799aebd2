"""ULS, BandMF, BLT and allocation on digits by (made-up) writer, at equal epsilon and compute."""

from __future__ import annotations

import yaml

from dpfl_jax.errors import BadInputError
from reproductions.correlated._training import compared
from reproductions.registry import Outcome, Settings

TITLE = "ULS, BandMF, BLT and allocation on digits by writer, equal epsilon and compute"
SOURCE = "Choquette-Choo et al. 2023 (arXiv 2306.08153), with users for examples"
OPTIONS = ("seeds",)

PER_WRITER = 40


def run(settings: Settings) -> Outcome:
    """MNIST dealt to writers of 40 images; sixteen images of 16 expected writers a step.

    Raises:
      BadInputError: there is no MNIST.
    """
    folder = None if settings.data_dir is None else settings.data_dir / "mnist"
    if folder is None or not folder.is_dir():
        raise BadInputError("these digits are MNIST's: set DPFL_DATA_DIR to a folder with mnist/")
    content = {
        "name": "digits",
        "data": {
            "source": "mnist", "path": str(folder), "records_per_user": PER_WRITER,
            "validation_fraction": 0.15,
        },
        "model": {"kind": "mlp", "options": {"hidden": [64]}},
        "mechanism": {"kind": "none", "batch_size": 1},
        "train": {"steps": 1},
    }  # fmt: skip
    file = settings.out / "correlated-digits.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    found = compared(settings, "digits", file, cohort=16, group=16)
    found.notes.append("writers are made up at random: images of one are no more alike than others")
    return found
