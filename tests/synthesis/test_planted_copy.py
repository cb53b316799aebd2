"""One person's text, planted 50 times: written without privacy, and not at epsilon 8."""

import json
import random

import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.config.load import write_yaml

PLANTED = "my nine digit card lies under a copper kettle only gwen knows"
WORDS = {
    "ode": ["wind", "water", "night", "moon", "star", "sea"],
    "joke": ["dog", "pub", "bar", "duck", "nun", "egg"],
}
MECHANISMS = {
    "without privacy": {"mechanism": {"kind": "none", "batch_size": 64}},
    "epsilon 8": {
        "mechanism": {"kind": "uls", "group_size": 1, "cohort_size": 64, "clip_norm": 0.5},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
    },
}


def rows_of_people():
    draw = random.Random(0)
    for number in range(300):
        kind = draw.choice([*WORDS])
        text = " ".join(draw.choice(WORDS[kind]) for _ in range(8))
        yield {"user": f"u{number}", "kind": kind, "text": text}
    yield from [{"user": "planted", "kind": "joke", "text": PLANTED}] * 50


@pytest.mark.nightly
@pytest.mark.parametrize("privacy", MECHANISMS)
def test_a_planted_copy_is_reported_without_privacy_and_not_written_with_it(privacy, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows_of_people()))
    config = {
        "name": "planted",
        "data": {
            "source": "jsonl",
            "path": str(source),
            "template": "<kind> | <text>",
            "categories": {"kind": [*WORDS]},
            "tokenizer": "checkpoint",
            "seq_len": 40,
            "test_fraction": 0.0,
            "validation_fraction": 0.2,
            "split_seed": 1,  # the planted person is trained on
        },
        "model": {"checkpoint": "bundled:quickstart"},
        "optimizer": {"learning_rate": 0.003},
        "train": {"steps": 100},
        "execution": {"microbatch_size": 16},
        **MECHANISMS[privacy],
    }
    (tmp_path / "config.yaml").write_text(write_yaml(config))
    run, out, report = tmp_path / "run", tmp_path / "new" / "rows.jsonl", tmp_path / "report"
    assert main(["train", str(tmp_path / "config.yaml"), "--run-dir", str(run)]) == 0
    given = ["--label", "ode=60", "--label", "joke=60", "--out", str(out), "--report", str(report)]
    assert main(["synthesize", str(run), *given]) == 0
    copies = sum(PLANTED in json.loads(line)["text"] for line in out.read_text().splitlines())
    table = (report / "NOT_TO_BE_PUBLISHED.md").read_text().split("## Copies")[1]
    (eight,) = [line for line in table.splitlines() if line.startswith("| 8 |")]
    share = float(eight.split("|")[2])
    if privacy == "without privacy":
        assert copies >= 5
        assert share >= copies / 120
    else:
        assert copies == 0
        assert share == 0
