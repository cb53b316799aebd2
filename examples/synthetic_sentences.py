"""Synthetic sentences of Shakespeare's people, with a label: from a CSV file to a folder to share.

``python examples/synthetic_sentences.py OUT``: two minutes on two CPU cores. OUT/synthetic may be
given away, OUT/report not: it says whether a classifier learns from the rows what a question is.
"""

from __future__ import annotations

import csv
import pathlib
import re
import sys
from collections.abc import Iterator

from dpfl_jax.cli.main import main as dpfl
from dpfl_jax.data.sets import SHAKESPEARE, read_shakespeare


def sentences() -> Iterator[tuple[str, str, str]]:
    """Yields role, mark (a question has "?", a statement "."), and sentence without its mark."""
    for role, speech in read_shakespeare(SHAKESPEARE, "train"):
        for found in re.findall(r"[^.?!]+[.?]", " ".join(speech.split()))[:2]:
            if 12 <= len(sentence := found[:-1].strip(" -")) <= 75:
                yield role, found[-1], sentence


def main(out: str, rows: int = 5000, steps: int = 80, people: int = 400) -> None:
    """Writes ``rows`` with epsilon 8 for each role, training with ``people`` expected in a step."""
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sentences.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("role", "mark", "sentence"), *sentences()])
    data = ["data.template=<mark> <sentence>", "data.categories={mark: ['?', '.']}"]
    data += ["data.seq_len=32", "data.validation_fraction=0.2", "privacy.delta=1e-4"]
    speed = ["execution.packing=0", "execution.microbatch_size=64", "eval.max_users=200"]
    train = ["finetune", "bundled:quickstart", str(folder / "sentences.csv"), "--full"]
    train += ["--user-column", "role", "--steps", str(steps), "--out", str(folder / "model")]
    if not (folder / "model" / "run" / "report.md").exists():
        done([*train, f"mechanism.cohort_size={people}", *data, *speed])
    questions = 3 * rows // 10  # taken as known without these plays
    write = ["synthesize", str(folder / "model" / "run"), "--temperature", "0.7"]
    write += ["--label", f"?={questions}", "--label", f".={rows - questions}"]
    write += ["--out", str(folder / "synthetic" / "rows.jsonl"), "--report", str(folder / "report")]
    done(write)


def done(command: list[str]) -> None:
    """Runs ``dpfl``, and ends with its exit status if that is not 0."""
    if status := dpfl(command):
        sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "synthetic-sentences")
