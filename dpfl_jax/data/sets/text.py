"""Text sets: Shakespeare by speaker, Stack Overflow by user, CC-News by base domain.

Every reader yields (user, text) documents; a user's documents keep the order of the files. LEAF's
task on Shakespeare is to predict the character after a window of characters.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpfl_jax.data.documents import Document
from dpfl_jax.data.keys import UserKey
from dpfl_jax.data.rows import expand_paths, guess_format, open_binary, read_rows, text_of
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.task import Task

# Charles et al. 2024, appendix on data (the federated Stack Overflow set): train before, test from.
STACK_OVERFLOW_CUT = datetime.datetime(2018, 1, 1, tzinfo=datetime.UTC)

# The Moby edition, which comes with the package (see its SOURCE.txt).
SHAKESPEARE = pathlib.Path(__file__).parent / "shakespeare"


def files_in(path: pathlib.Path, patterns: tuple[str, ...], what: str) -> list[pathlib.Path]:
    """Returns ``path`` if it is a file, else the files of the first pattern that matches in it.

    Raises:
      BadInputError: saying ``what`` to put where.
    """
    if path.is_file():
        return [path]
    for pattern in patterns:
        files = sorted(path.glob(pattern))
        if files:
            return files
    raise BadInputError(f"{path} holds no {' or '.join(patterns)}: put there {what}")


def read_shakespeare(path: pathlib.Path, split: str) -> Iterator[Document]:
    """Yields speeches; a user is a speaking role (``play/speaker`` where the play is known).

    Reads ``speeches.jsonl[.gz]`` (play, speaker, text), ``ps_*.xml`` of PlayShakespeare.com, LEAF
    JSON, or the plain text of ``SPEAKER:`` blocks known as tinyshakespeare.
    """
    what = "speeches.jsonl.gz, PlayShakespeare.com's ps_*.xml, or tinyshakespeare's input.txt"
    patterns = ("speeches.jsonl", "speeches.jsonl.gz", "ps_*.xml", "*.json", "input.txt")
    for file in files_in(path, patterns, what):
        if file.suffix == ".xml":
            yield from _play_xml(file)
        elif file.suffix == ".txt":
            yield from _speaker_blocks(file)
        elif file.suffix == ".json":
            yield from _leaf_text(file)
        else:
            key = UserKey("{play}/{speaker}")
            for where, row in read_rows(file, "jsonl"):
                yield key(row, where), text_of(row, "text", where)


def _play_xml(path: pathlib.Path) -> Iterator[Document]:
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise BadInputError(f"{path}: not readable XML ({error})") from error
    play = path.stem.removeprefix("ps_").replace("_", "-")
    for speech in root.iter("sp"):
        speaker = speech.find("speaker")
        if speaker is None:
            continue
        name = speaker.get("long") or " ".join("".join(speaker.itertext()).split())
        lines = [" ".join("".join(line.itertext()).split()) for line in speech.iter("l")]
        text = "\n".join(line for line in lines if line)
        if name and text:
            yield f"{play}/{name}", text


def _speaker_blocks(path: pathlib.Path) -> Iterator[Document]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: the text is not UTF-8 ({error.reason})") from error
    any_block = False
    for block in re.split(r"\n\s*\n", text):
        speaker, colon, speech = block.strip().partition(":\n")
        # A block without "NAME:" has no speaker; none occurs in the known file.
        if colon and speech.strip() and "\n" not in speaker:
            any_block = True
            yield speaker, speech.strip()
    if not any_block:
        raise BadInputError(f"{path}: no 'SPEAKER:' block, so it is not the Shakespeare text")


def _leaf_text(path: pathlib.Path) -> Iterator[Document]:
    """LEAF gives windows of 80 characters and the next one: the next ones spell the text."""
    for user, data in read_leaf(path):
        if data["x"]:
            yield user, data["x"][0] + "".join(data["y"])


def _first(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if name in row:
            return name
    raise BadInputError(f"{where}: none of the columns {list(names)}; there are {sorted(row)}")


def parse_time(value: Any, where: str) -> datetime.datetime:
    """Turns ISO text (UTC unless it says otherwise), a timestamp or epoch seconds into a time."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    try:
        if isinstance(value, str):
            text = value.strip().removesuffix(" UTC").strip()
            value = datetime.datetime.fromisoformat(text)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            value = datetime.datetime.fromtimestamp(value, datetime.UTC)
        if not isinstance(value, datetime.datetime):
            raise ValueError("neither text nor a number")
    except (ValueError, OverflowError) as error:
        raise BadInputError(f"{where}: {value!r} is not a time ({error})") from error
    return value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value


def read_stack_overflow(path: pathlib.Path, split: str) -> Iterator[Document]:
    """Yields posts; columns user (or client_id, user_id), text (or tokens, body), creation_date.

    ``train`` are posts before 2018-01-01 UTC, ``test`` the later ones, by the same and by new
    users. Held-out users, if the files have them, are files named ``validation*``.
    """
    what = "Stack Overflow posts as JSONL, Parquet, CSV or Arrow files with the columns user, text"
    names = ("*.jsonl", "*.jsonl.gz", "*.parquet", "*.csv", "*.arrow")
    files = files_in(path, names, what + " and creation_date")
    held_out = [f for f in files if f.name.startswith("validation")]
    for file in held_out if split == "validation" else [f for f in files if f not in held_out]:
        for where, row in read_rows(file, guess_format(file)):
            user = UserKey(_first(row, ("user", "client_id", "user_id"), where))
            column = _first(row, ("text", "tokens", "body"), where)
            if split != "validation":
                time = row[_first(row, ("creation_date", "created"), where)]
                if (parse_time(time, where) < STACK_OVERFLOW_CUT) != (split == "train"):
                    continue
            yield user(row, where), text_of(row, column, where)


def read_cc_news(path: pathlib.Path, split: str) -> Iterator[Document]:
    """Yields articles; a user is the base domain of the article's URL.

    Split the store afterwards with ``split_within_users(store, 0.1, most=32, smallest=2)``, or in a
    config with ``split: within_user``.
    """
    what = "CC-News articles as JSONL, Parquet or Arrow files with the columns url and text"
    names = ("*.jsonl", "*.jsonl.gz", "*.parquet", "*.arrow")
    for file in files_in(path, names, what):
        for where, row in read_rows(file, guess_format(file)):
            column = _first(row, ("url", "domain"), where)
            yield UserKey(f"domain({column})")(row, where), text_of(row, "text", where)


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file (gzip too).

    Raises:
      BadInputError: naming the file.
    """
    with open_binary(path) as file:
        try:
            return json.loads(file.read().decode())
        except (ValueError, OSError) as error:
            raise BadInputError(f"{path}: not a readable JSON file ({error})") from error


def read_leaf(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (user, data) of one LEAF JSON file, after checking its counts."""
    body = read_json(path)
    try:
        for user, count in zip(body["users"], body["num_samples"], strict=True):
            data = body["user_data"][user]
            if not len(data["x"]) == len(data["y"]) == count:
                raise BadInputError(
                    f"{path}: user {user!r} has {len(data['x'])} inputs and {len(data['y'])} "
                    f"labels, but num_samples says {count}"
                )
            yield user, data
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"{path}: not a LEAF file (users, num_samples, user_data)") from error


# LEAF's 80 characters of Shakespeare; id 0 stands for any other.
LEAF_CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
_IDS = len(LEAF_CHARACTERS) + 1
CHARACTERS_TASK = Task("classes", (), _IDS, _IDS)


def read_windows(section: SourceConfig, split: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields ``x`` int32 [n, seq_len] and ``label`` int32 [n] of each role with enough text."""
    codes = np.zeros(256, np.int32)
    for i, character in enumerate(LEAF_CHARACTERS, start=1):
        codes[ord(character)] = i
    speeches: dict[str, list[str]] = {}
    for role, speech in read_shakespeare(expand_paths(section.path or SHAKESPEARE)[0], split):
        speeches.setdefault(role, []).append(speech)
    length = section.seq_len
    for role, parts in speeches.items():
        raw = np.frombuffer(" ".join(parts).encode("latin-1", "replace"), np.uint8)
        if len(raw) <= length:
            continue
        starts = np.arange(0, len(raw) - length, section.stride)
        ids = codes[raw]
        x = ids[starts[:, None] + np.arange(length)]
        yield role, {"x": x, "label": ids[starts + length]}
