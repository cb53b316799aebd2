"""Pages: every code block is of a known kind and valid, every link leads somewhere."""

import pathlib
import re
import urllib.parse

import pages
import pytest
import yaml

from dpfl_jax.cli.main import COMMANDS, build_parser
from dpfl_jax.config import load_config
from dpfl_jax.config.load import validate_config

IDS = [pages.name(page) for page in pages.EXECUTED]
# One page has one place for a kind of configuration to stand on.
BASES = {"federation": "subject/quickstart", "": "quickstart"}


def test_what_is_not_run_is_still_there_and_says_why():
    """What no test executes is counted here: a new one needs a reason, and a new number."""
    run, used = {"commands": 0, "python": 0}, {}
    for page in pages.EXECUTED:
        for block in pages.blocks(page):
            assert block.language in {"python", "sh", "bash", "yaml", "text"}, (
                f"{block.page}:{block.line}: a code block of the kind {block.language!r}"
            )
            if block.language in {"sh", "bash"}:
                parts, kind = [" ".join(words) for words in block.commands], "commands"
            elif block.language == "python":
                parts, kind = [block.code], "python"
            else:
                continue
            for part in parts:
                if (start := pages.not_run(block.page, part)) is None:
                    run[kind] += 1
                else:
                    used.setdefault((block.page, start), []).append(kind)
    noted = {
        (page, start): why
        for page, notes in pages.NOTES.items()
        for start, why in notes.get("not_run", {}).items()
    }
    assert set(noted) == set(used)
    assert all(len(why) > 10 for why in noted.values())
    left_out = [kind for kinds in used.values() for kind in kinds]
    assert (left_out.count("commands"), left_out.count("python")) == (50, 1)
    assert run["commands"] > 40
    assert run["python"] > 10


def test_guides_hold_no_hidden_comments_and_the_tutorial_is_short():
    texts = {page.name: page.read_text() for page in pages.EXECUTED}
    assert [name for name, text in texts.items() if "<!--" in text] == []
    assert len(texts["finetune.md"].splitlines()) <= 100


@pytest.mark.parametrize("page", pages.EXECUTED, ids=IDS)
def test_commands_and_configurations_are_valid(page, monkeypatch):
    """Also those that no test runs: their options are known and their overrides fit."""
    monkeypatch.setenv("DPFL_DATA_DIR", "/data")
    monkeypatch.chdir(pages.ROOT)
    for block in pages.blocks(page):
        if block.language == "yaml":
            check_yaml(block)
        if block.language not in {"sh", "bash"}:
            continue
        for command in block.commands:
            if command[:2] == ["uv", "run"]:
                command = command[2:]
            if command[0] != "dpfl":
                continue
            where = f"{block.page}:{block.line}: {' '.join(command)}"
            assert command[1] in COMMANDS, where
            if command[1] in {"bench", "reproduce"} and not (pages.ROOT / "benchmarks").exists():
                continue
            args, rest = build_parser(command[1]).parse_known_args(command[1:])
            overrides = [*getattr(args, "overrides", []), *rest]
            assert all("=" in word or word.startswith("runs/") for word in overrides), where
            config = pathlib.Path(getattr(args, "config", None) or "")
            if config.suffix == ".yaml" and config.exists():
                load_config(config, overrides)


def check_yaml(block):
    """Its sections fit a whole configuration of their kind."""
    sections = yaml.safe_load(block.code)
    kind = next(key for key in BASES if key in sections or not key)
    base = yaml.safe_load((pages.ROOT / "configs" / f"{BASES[kind]}.yaml").read_text())
    whole = base | sections
    if {"lora", "module"} & set(sections.get("model", {})):
        whole["mechanism"] = {"kind": "uls", "cohort_size": 8, "group_size": 1}
    validate_config(whole, f"the block in line {block.line}")


@pytest.mark.parametrize("page", pages.ALL, ids=pages.name)
def test_links_lead_somewhere(page):
    inline, steps = pages.links(page)
    for link in steps:
        assert (page.parent / link).is_file(), f"{pages.name(page)}: {link}"
    for link in inline:
        where = f"{pages.name(page)}: {link}"
        parts = urllib.parse.urlsplit(link)
        if parts.scheme:
            assert parts.scheme in {"http", "https"}, where
            assert "." in parts.netloc, where
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.is_file(), where
        if pages.ROOT / "docs" in page.parents:  # the site has nothing else
            assert pages.ROOT / "docs" in target.parents, where
        if parts.fragment:
            assert parts.fragment in pages.anchors(target), where


def test_files_that_pages_name_are_there():
    for page in pages.ALL:
        named = re.findall(
            r"\b(?:configs|examples|notebooks|launch)/[\w/-]+\.(?:yaml|py|sh|ipynb)",
            re.sub(r"https?://\S+", "", page.read_text()),
        )
        assert [n for n in named if not (pages.ROOT / n).exists()] == [], pages.name(page)


def test_ten_rows_of_the_large_table_are_shown():
    folder = pages.ROOT / "docs" / "results"
    whole, shown = (
        [
            line
            for line in (folder / file).read_text().splitlines()
            if "| v" in line and line.count("|") > 8
        ]
        for file in ("pods-table.md", "pods.md")
    )
    assert (len(whole), len(shown)) == (100, 10)
    assert set(shown) <= set(whole)
