"""The numbers of the docs are those of the archived manifest."""

import re

import pytest

from reproductions import pages, registry
from reproductions.headlines import HEADLINES
from reproductions.quotes import quoted
from reproductions.registry import LEAST_POWER
from reproductions.runner import ROOT, is_random

# Only what a reader looks up; no result.
NUMBERS = re.compile(r"(?<![\w.#])\d*\.\d+")


@pytest.fixture(scope="module")
def made():
    return pages.archived()


@pytest.mark.parametrize("name", pages.PAGES)
def test_pages_are_as_the_manifest_has_them(name, made):
    page = (ROOT / name).read_text()
    assert pages.filled(page, made) == page, "run `python -m reproductions.pages`"


def test_a_number_changed_by_hand_is_seen(made):
    page = (ROOT / "docs/results/claims.md").read_text()
    counts = page.index("| paper |")
    wrong = page[:counts] + page[counts:].replace("| paper | ", "| paper | 9", 1)
    assert pages.filled(wrong, made) == page != wrong


@pytest.mark.parametrize("name", [p for p in pages.PAGES if p.startswith("docs/results/")])
def test_people_write_no_measured_number(name):
    prose = pages.without_blocks((ROOT / name).read_text())
    assert not NUMBERS.findall(re.sub(r"`[^`]*`", "", prose))


def test_every_headline_is_run_or_says_why_not(made):
    found = pages.Found(made)
    for lines in HEADLINES.values():
        for line in lines:
            assert bool(line.figures) != bool(line.instead), line.claim
            for figure, pattern in line.figures.items():
                assert figure in registry.figures()
                if figure in found.entries:
                    assert found.claims(figure, pattern), (line.claim, figure)


def test_every_claim_of_a_paper_has_its_place_and_at_most_a_dozen_words_of_it(made):
    for entry in made["experiments"]:
        for claim in entry["claims"]:
            if claim["source"] == "paper":
                said = quoted(entry["figure"], claim["claim"])
                assert said, (entry["figure"], claim["claim"])
                assert len(said["quote"].split()) <= 16


def test_no_verdict_refutes_a_paper_below_its_size_or_by_arms_that_are_not_alike(made):
    for entry in made["experiments"]:
        for claim in entry["claims"]:
            if claim["source"] in ("paper", "authors' code") and claim["seeds"]:
                tried = entry["tried"]
                assert claim["holds"] is None or not tried["unfair"]
                refuted = claim["holds"] is False
                assert not refuted or (tried["is_papers_size"] and claim["power"] >= LEAST_POWER)


def test_the_archive_says_what_was_run_with_what(made):
    figures = {e["figure"] for e in made["experiments"] if not e["replication"]}
    page = (ROOT / "docs/results/claims.md").read_text()
    missing = set(registry.figures()) - figures
    assert figures <= set(registry.figures())
    said = re.search("Not yet run for these pages: (.*)", page)
    assert set(re.findall("`(.+?)`", said[1] if said else "")) == missing
    for entry in made["experiments"]:
        assert set(entry) >= {"commit", "versions", "hardware", "form", "seeds", "wall_seconds"}
        assert entry["cpu_seconds"] > 0
    claims = [c for e in made["experiments"] for c in e["claims"]]
    assert made["tally"] == registry.tally(claims)
    assert made["holds"] == (not any(map(registry.broken, claims)))


def test_a_second_run_with_other_seeds_contradicts_nothing(made):
    """What one decides the other decides alike, or leaves open."""
    found = pages.Found(made)
    assert found.again
    assert all(map(is_random, found.again))
    for figure, again in found.again.items():
        for claim in found.claims(figure):
            pair = {claim["verdict"], again.get(claim["claim"], claim["verdict"])}
            assert pair != {"holds", "does not hold"}, (figure, claim["claim"])
