"""Makes the files of this version that later ones must read.

    python -m tests.artefacts

writes ``VERSION/`` beside this file: guarantees of every mechanism, and in files.tar.gz a table, a
finished run on it, its export and predictions, a run that was interrupted, and a store. For a
release; what is in development may be made anew, in the commit that changes a format.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator

from dpfl_jax import __version__
from dpfl_jax.cli.main import main
from dpfl_jax.run.checkpoint import Checkpoints
from tests.statements import SOUND

FOLDER = pathlib.Path(__file__).parent
FILES = "files.tar.gz"
CONFIG = """\
name: artefact
seed: 0
data:
  source: csv
  path: visits.csv
  user_column: patient
  target_column: ill
  classes: 2
  delimiter: ";"
  validation_fraction: 0.3
model: {kind: linear}
mechanism: {kind: uls, cohort_size: 6, group_size: 2, clip_norm: 1.0}
privacy: {epsilon: 8.0, delta: 1.0e-2}
optimizer: {name: sgd, learning_rate: 0.3}
train: {steps: 4, eval_every: 2, checkpoint_every: 2}
"""


def make(folder: pathlib.Path) -> None:
    """Writes everything into a folder."""
    (folder / "guarantees").mkdir(parents=True)
    for name, made in SOUND.items():
        file = folder / "guarantees" / f"{name.replace(', ', '_').replace(' ', '_')}.json"
        file.write_text(made().dumps())
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        _make_files()
        with tarfile.open(folder / FILES, "w:gz") as tar:
            tar.add(".", filter=_of_nobody)


def _make_files() -> None:
    """In the current folder, so that no file names where it lay."""
    rows = [
        f"p{i % 20};{i % 7 / 7:.2f};{i % 5 / 5:.2f};{int(i % 7 + i % 5 + i % 3 > 6)}"
        for i in range(60)
    ]
    pathlib.Path("visits.csv").write_text("\n".join(["patient;age;dose;ill", *rows]) + "\n")
    pathlib.Path("config.yaml").write_text(CONFIG)
    texts = [json.dumps({"user": f"u{i % 5}", "text": f"text {i} of u{i % 5}"}) for i in range(15)]
    pathlib.Path("posts.jsonl").write_text("\n".join(texts) + "\n")
    _run("train", "config.yaml", "--run-dir", "run")
    with _interruption_after_a_checkpoint():
        _run("train", "config.yaml", "--run-dir", "interrupted", code=1)
    _run("export", "run", "exported")
    _run("predict", "exported", "visits.csv", "--delimiter", ";", "--out", "predicted.csv")
    _run("data", "build", "--input", "posts.jsonl", "--seq-len", "8", "--out", "store")
    for run in ("run", "interrupted"):
        report = pathlib.Path(run, "report.json")
        report.write_text(json.dumps(json.loads(report.read_text()) | {"run_dir": run}, indent=2))
        for picture in pathlib.Path(run).glob("*.png"):
            picture.unlink()  # nothing reads them


def _run(*words: str, code: int = 0) -> None:
    if main(list(words)) != code:
        sys.exit(f"dpfl {' '.join(words)} failed")


@contextlib.contextmanager
def _interruption_after_a_checkpoint() -> Iterator[None]:
    save = Checkpoints.save

    def interrupted(self: Checkpoints, *args: object) -> None:
        save(self, *args)
        os.kill(os.getpid(), signal.SIGTERM)
        Checkpoints.save = save

    Checkpoints.save = interrupted
    try:
        yield
    finally:
        Checkpoints.save = save


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    target = FOLDER / __version__
    if target.exists():
        sys.exit(f"{target} is there: remove it, unless it is that of a release")
    with tempfile.TemporaryDirectory(dir=FOLDER) as part:
        make(pathlib.Path(part, "made"))
        pathlib.Path(part, "made").rename(target)
    sys.stdout.write(f"written: {target}\n")
