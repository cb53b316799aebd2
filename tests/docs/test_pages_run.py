"""README and guides do what they say: every block runs, from top to bottom, on small data."""

import json
import pathlib
import random
import re
import shutil
import subprocess

import pages
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config

# Of the kinds of configurations: what makes a run short. The rest is as the page prints it.
SMALL = {
    "central": [
        "train.steps=2",
        "train.eval_every=2",
        "optimizer.warmup_steps=0",
        "eval.max_users=4",
        "eval.prompt=null",
    ],
    "silos": ["federation.rounds=2", "train.eval_every=2", "eval.max_users=4"],
}
BUNDLED = pages.ROOT / "dpfl_jax" / "models" / "checkpoint" / "bundled" / "quickstart"
LIGHT = {"check.md", "guarantee.md", "pods.md"}  # accounting alone; nothing is trained


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A checkout's configurations, and the files that a reader would have."""
    import pandas as pd

    random.seed(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPFL_CACHE_DIR", str(tmp_path / "cache"))
    for folder in ("configs", "examples", "launch"):
        (tmp_path / folder).symlink_to(pages.ROOT / folder)
    words = ["river", "stone", "lamp", "green", "quiet"]
    posts = [(f"u{i % 400}", " ".join(random.choices(words, k=20))) for i in range(800)]
    pathlib.Path("posts.csv").write_text(
        "\n".join(["user;text", *(f"{user};{text}" for user, text in posts)])
    )
    pathlib.Path("posts.jsonl").write_text(
        "\n".join(json.dumps({"author": u, "text": t, "body": t}) for u, t in posts)
    )
    mails = [
        {"authors": [f"u{i % 90}", f"u{i * 7 % 90}"], "body": t} for i, (_, t) in enumerate(posts)
    ]
    pathlib.Path("mails.jsonl").write_text("\n".join(map(json.dumps, mails)))
    visits = [
        f"p{i % 60},{20 + i % 50},{i % 7 / 7},{i % 3},{i % 2},{i % 9},{i % 5 // 4}"
        for i in range(180)
    ]
    columns = "patient,age,lab_x,lab_y,hospital,days,ill"
    pathlib.Path("visits.csv").write_text("\n".join([columns, *visits]))
    pathlib.Path("new.csv").write_text("\n".join([columns, *visits[:9]]))
    news = pd.DataFrame({"url": [f"https://s{i % 9}.org/{i}" for i in range(40)], "text": "news"})
    pathlib.Path("parts").mkdir()
    news.to_parquet("parts/0.parquet")
    shutil.copytree(BUNDLED, tmp_path / "checkpoints" / "gpt2")
    return tmp_path


def run_command(command):
    """As printed, with fewer steps."""
    command = command[2:] if command[:2] == ["uv", "run"] else command
    if command[0] != "dpfl":
        subprocess.run(command, check=True, timeout=300)
        return
    arguments = command[1:]
    if arguments[0] in {"train", "sweep"}:
        small = SMALL.get(load_config(arguments[1]).variant, [])
        arguments = [*arguments[:2], *small, *(a for a in arguments[2:] if a not in small)]
        own = {a.split("=")[0] for a in small}
        arguments = [a for a in arguments if a in small or a.split("=")[0] not in own]
    assert main(arguments) == 0, " ".join(command)


def run_page(page):
    namespace = {}
    for block in pages.blocks(page):
        exec(block.setup, namespace)
        if block.language == "python" and not block.not_run:
            short = re.sub(r"(\.plan\([^=]*?steps=)\d+", r"\g<1>2", block.code, flags=re.S)
            lines = "\n" * block.line  # what goes wrong has the page's line
            exec(compile(lines + short, str(page), "exec"), namespace)
        elif block.language in {"sh", "bash"}:
            for command in block.commands:
                if block.why_not(command) is None:
                    run_command(command)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[] if page.name in LIGHT else pytest.mark.nightly)
        for page in pages.EXECUTED
    ],
)
def test_a_page_runs(page, workplace):
    run_page(page)
