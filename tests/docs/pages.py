"""Reads pages: their code blocks, what is said about them in comments, headings and links.

Two kinds of HTML comments, which no reader of a page sees, are about the code block below them:

    <!-- setup            Python that runs before the page's next block, in the same namespace
    frame = ...
    -->
    <!-- not run: REASON -->            the block cannot run in a test
    <!-- not run "PREFIX": REASON -->   nor can its commands that begin so
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
EXECUTED = [ROOT / "README.md", *GUIDES]
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_COMMENT = re.compile(r"<!-- (setup\n.*?|not run.*?)-->\n", re.S)
_MARK = re.compile(r'not run(?: "(?P<prefix>[^"]+)")?: (?P<reason>.+)', re.S)
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M)


@dataclasses.dataclass
class Block:
    """A fenced block.

    Attributes:
      language: ``python``, ``sh``, ``yaml``, ``text``, ...
      code: between the fences.
      line: of the page, for messages.
      setup: Python to run before it.
      not_run: prefix of commands ("" for all of the block) -> why they are not run.
    """

    language: str
    code: str
    line: int
    setup: str
    not_run: dict[str, str]

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a shell block, split into words, without comments."""
        joined = self.code.replace("\\\n", " ")
        lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
        out = []
        for words in lines:
            while "&&" in words:
                cut = words.index("&&")
                out.append(words[:cut])
                words = words[cut + 1 :]
            out.append(words)
        return [words for words in out if words]

    def why_not(self, command: list[str]) -> str | None:
        """The reason why a command is not run, or None."""
        text = " ".join(command)
        return next((why for start, why in self.not_run.items() if text.startswith(start)), None)


def blocks(page: pathlib.Path) -> list[Block]:
    """The page's code blocks, in order."""
    text, out, done = page.read_text(), [], 0
    for fence in _FENCE.finditer(text):
        setup, not_run = "", {}
        for comment in _COMMENT.findall(text, done, fence.start()):
            if comment.startswith("setup"):
                setup += comment.removeprefix("setup\n")
            else:
                mark = _MARK.fullmatch(comment.strip())
                assert mark, f"{page.name}: <!-- {comment}--> is not understood"
                not_run[mark["prefix"] or ""] = mark["reason"]
        line = text.count("\n", 0, fence.start()) + 1
        out.append(Block(fence["language"], fence["code"], line, setup, not_run))
        done = fence.end()
    return out


def links(page: pathlib.Path) -> tuple[list[str], list[str]]:
    """Where the page's links lead, and those of steps of proofs, which name lines of code."""
    text = prose(page)
    named = re.findall(r"^\[\S+\]: (\S+)", text, re.M)
    inline = re.findall(r"\]\(([^)\s]+)\)", text) + [to for to in named if "://" in to]
    return inline, [to for to in named if "://" not in to]


def prose(page: pathlib.Path) -> str:
    """The page without its code and comments."""
    text = _FENCE.sub("", page.read_text())
    return re.sub(r"`[^`\n]+`", "``", re.sub(r"<!--.*?-->", "", text, flags=re.S))


def anchors(page: pathlib.Path) -> set[str]:
    """What ``page.md#...`` may name, as Python-Markdown makes it of headings."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("", page.read_text()), flags=re.S)
    out: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        bare = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        slug = re.sub(r"[-\s]+", "-", bare.strip().lower())
        out.add(slug)
    return out
