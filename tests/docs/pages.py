"""Reads pages: their code blocks, headings and links. What runs of them is in blocks.toml."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
EXECUTED = [ROOT / "README.md", *GUIDES]
NOTES = tomllib.loads(pathlib.Path(__file__).with_name("blocks.toml").read_text())
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M)


@dataclasses.dataclass
class Block:
    """A fenced block.

    Attributes:
      language: ``python``, ``sh``, ``yaml``, ``text``, ...
      code: between the fences.
      line: of the page, for messages.
      page: its name, as blocks.toml has it.
    """

    language: str
    code: str
    line: int
    page: str

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


def name(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def setup(page: pathlib.Path) -> str:
    """Python to run before the page's first block."""
    return NOTES.get(name(page), {}).get("setup", "")


def not_run(page: str, text: str) -> str | None:
    """How the entry begins that leaves out a command or block of Python, or None."""
    starts = NOTES.get(page, {}).get("not_run", {})
    return next((start for start in starts if text.startswith(start)), None)


def blocks(page: pathlib.Path) -> list[Block]:
    """The page's code blocks, in order."""
    text = page.read_text()
    return [
        Block(
            fence["language"],
            fence["code"],
            text.count("\n", 0, fence.start()) + 1,
            name(page),
        )
        for fence in _FENCE.finditer(text)
    ]


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
