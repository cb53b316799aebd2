"""The proofs of docs/theory name lines of code, and what they assume: both are there."""

import re
import textwrap

import pytest

from dpfl_jax.accounting import IDEALISED
from tests.proofs import LINK, PAGES, SOURCES, anchors, anchors_of
from tests.statements import SOUND

USE = re.compile(r"\[([a-z-]+-\d+)\](?!\()")


def problems(pages, sources):
    """What is wrong, a sentence each."""
    places, found, proved = anchors(sources), [], set()
    for page, text in pages.items():
        links = {m[1]: m.group(2, 3, 4) for m in LINK.finditer(text)}
        proved |= links.keys()
        if (used := set(USE.findall(LINK.sub("", text)))) != links.keys():
            found.append(f"{page}: {used ^ links.keys()} have a link or a step alone")
        for name, place in links.items():
            here = places.get(name, [])
            if len(here) != 1:
                found.append(f"{page}: {name} stands {len(here)} times in the code")
            elif here[0][:2] != place[:2]:
                found.append(f"{page}: {name} is in {here[0][:2]}, not in {place[:2]}")
            elif here[0] != place:
                found.append(
                    f"{page}: {place[1]} ({place[0]}), of {name}, has changed: read the proof "
                    f"again, then replace {place[2]} by {here[0][2]} (python -m tests.proofs)"
                )
    return [*found, *(f"{name} is in no proof" for name in places.keys() - proved)]


def test_every_step_has_its_line():
    assert problems(PAGES, SOURCES) == []
    assert len(anchors(SOURCES)) > 50


def test_a_line_that_goes_is_noticed():
    """Gone, twice, or in another function: of every anchor there is."""
    for name, ((file, *_),) in anchors(SOURCES).items():
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


def test_a_function_that_changes_is_noticed():
    """By what it does: not by its comments, docstring, layout, or the words of what it raises."""
    code = '''
        def f(x):
            """Doubles."""
            if x < 0:
                raise ValueError("negative")
            # proof: some-step-1
            return 2 * x  # twice
    '''

    def hash_of(old="", new=""):
        ((_, name, found),) = anchors_of(textwrap.dedent(code.replace(old, new)))
        assert name == "f"
        return found

    for old, new in (
        ("Doubles", "Two"),
        ("negative", "below 0"),
        (" # twice", ""),
        ("2 * x", "(2*x)"),
    ):
        assert hash_of(old, new) == hash_of()
    for old, new in (
        ("2 * x", "2 + x"),
        ("2 * x", "2.0 * x"),
        ("x < 0", "x <= 0"),
        ("Value", "Type"),
    ):
        assert hash_of(old, new) != hash_of()

    (file, function, _), *_ = anchors(SOURCES)["uls-divisor-1"]
    changed = SOURCES[file].replace("float(self.cohort_size)", "2 * float(self.cohort_size)")
    told = problems(PAGES, {**SOURCES, file: changed})
    assert any(f"uls.md: {function} ({file}), of uls-divisor-1, has changed" in x for x in told)


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
        # J and L stand for the run's numbers.
        numbers = re.sub(r"\b[JL]\b", r"\\d+", re.escape(" ".join(words.split())))
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
    others = {"client", "histogram", "isrl", "ledger", "selection", "README"}
    assert ours | others == {page.removesuffix(".md") for page in PAGES}
    for page, text in PAGES.items():
        if page != "README.md":
            assert len(LINK.sub("", text).split()) < 600, page
            assert f"({page})" in PAGES["README.md"]
