"""The proofs of docs/theory name lines of code, and what they assume: both are there."""

import ast
import functools
import pathlib
import re

import pytest

from dpfl_jax.accounting import IDEALISED
from tests.statements import SOUND

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted((ROOT / "dpfl_jax").rglob("*.py"))
}
ANCHOR = re.compile(r"^\s*# proof: (\S+)$")
LINK = re.compile(r'^\[(\S+)\]: \.\./\.\./(\S+) "(\S+)"$', re.MULTILINE)
PAGES = {
    path.name: path.read_text()
    for path in sorted((ROOT / "docs" / "theory").glob("*.md"))
    if LINK.search(path.read_text())
}
USE = re.compile(r"\[([a-z-]+-\d+)\](?!\()")


def function_at(tree, line, names=()):
    """Dotted name of the innermost class or function that holds a line."""
    for node in ast.iter_child_nodes(tree):
        if not getattr(node, "lineno", line + 1) <= line <= getattr(node, "end_lineno", line):
            continue
        own = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        return function_at(node, line, (*names, node.name) if own else names)
    return ".".join(names)


@functools.cache
def anchors_of(text):
    """(anchor, function) of a file."""
    lines = [(n, m[1]) for n, x in enumerate(text.splitlines(), 1) if (m := ANCHOR.match(x))]
    tree = ast.parse(text) if lines else None
    # The statement that follows: a comment itself belongs to no node.
    return [(name, function_at(tree, number + 1)) for number, name in lines]


def anchors(sources):
    """Anchor -> places (file, function) where it stands in the code."""
    found = {}
    for file, text in sources.items():
        for name, function in anchors_of(text):
            found.setdefault(name, []).append((file, function))
    return found


def problems(pages, sources):
    """What is wrong, a sentence each."""
    places, found, proved = anchors(sources), [], set()
    for page, text in pages.items():
        links = {m[1]: (m[2], m[3]) for m in LINK.finditer(text)}
        proved |= links.keys()
        if (used := set(USE.findall(LINK.sub("", text)))) != links.keys():
            found.append(f"{page}: {used ^ links.keys()} have a link or a step alone")
        for name, place in links.items():
            here = places.get(name, [])
            if len(here) != 1:
                found.append(f"{page}: {name} stands {len(here)} times in the code")
            elif here[0] != place:
                found.append(f"{page}: {name} is in {here[0]}, not in {place}")
    return [*found, *(f"{name} is in no proof" for name in places.keys() - proved)]


def test_every_step_has_its_line():
    assert problems(PAGES, SOURCES) == []
    assert len(anchors(SOURCES)) > 50


def test_a_line_that_goes_is_noticed():
    """Gone, twice, or in another function: of every anchor there is."""
    for name, ((file, _),) in anchors(SOURCES).items():
        text = SOURCES[file]
        gone = re.sub(rf"^ *# proof: {name}\n", "", text, flags=re.MULTILINE)
        elsewhere = f"\n\ndef elsewhere():\n    # proof: {name}\n    return 1\n"
        for changed, words in (
            (gone, f"{name} stands 0 times"),
            (text + elsewhere, f"{name} stands 2 times"),
            (gone + elsewhere, f"{name} is in ('{file}', 'elsewhere')"),
        ):
            told = problems(PAGES, {**SOURCES, file: changed})
            assert any(words in sentence for sentence in told), (words, told)


def test_a_step_without_a_link_is_noticed():
    pages = {**PAGES, "els.md": PAGES["els.md"] + "\nAnd so it is ([els-magic-1]).\n"}
    assert any("els-magic-1" in p for p in problems(pages, SOURCES))


MECHANISM_OF = {"rpdp": "personal"}


@pytest.mark.parametrize(
    "page", [p.removesuffix(".md") for p in PAGES if p not in ("README.md", "ledger.md")]
)
def test_what_a_proof_assumes_is_in_the_guarantee(page):
    """Every quotation is an assumption that runs state; what all share is in all of them."""
    stated = SOUND[MECHANISM_OF.get(page, page)]().privacy
    quoted = re.findall(r"^> (.+)$", PAGES[f"{page}.md"], re.MULTILINE)
    assert quoted
    for words in quoted:
        assert words in stated.assumptions
    assert IDEALISED in stated.assumptions
    assert re.search("root keys? .*secret", "; ".join(stated.assumptions))
    for words in re.findall(r'"([a-z][^"]+)"', re.sub(LINK, "", PAGES[f"{page}.md"])):
        # H and K stand for the run's numbers.
        numbers = re.sub(r"\b[HK]\b", r"\\d+", re.escape(" ".join(words.split())))
        pattern = numbers.replace(r"of\ the\ silos", r"of the \d+ silos")
        assert any(re.search(pattern, told) for told in stated.assumptions), words


def test_every_mechanism_has_a_page_of_a_page():
    from dpfl_jax.config.kinds import CENTRAL, SILOS

    ours = {
        kind
        for kinds in (CENTRAL, SILOS)
        for kind in kinds.names()
        if kinds[kind].__module__.startswith("dpfl_jax.") and kind not in ("none", "fed_avg")
    }
    others = {"isrl", "ledger", "selection", "README"}
    assert ours | others == {page.removesuffix(".md") for page in PAGES}
    for page, text in PAGES.items():
        if page != "README.md":
            assert len(LINK.sub("", text).split()) < 600, page
            assert f"({page})" in PAGES["README.md"]
