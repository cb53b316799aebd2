"""Named data sets: who owns an example, what is learned, which files are needed.

A data set of your own is a ``DataSource`` in any module; configurations name it by
``data.source: package.module:NAME``. Nothing is downloaded.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import hashlib
import importlib.metadata
import io
import json
import math
import os
import pathlib
import re
import struct
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dpfl_jax.data.documents import Document
from dpfl_jax.data.keys import UserKey
from dpfl_jax.data.rows import FORMATS, expand_paths, guess_format, open_binary, read_rows, text_of
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.errors import BadInputError, extra, imported
from dpfl_jax.task import Task


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A data set.

    Attributes:
      read: ``(section, split) -> iterator`` of (user, text), in any order of users; or of (user,
        dict of arrays with a leading axis), each user once: ``x`` and ``label`` as ``task`` says,
        ``silo`` int32 if a silo is known, and any plain number of a record, such as its budget.
      unit: what a user is.
      task: what is learned; None for texts, which are tokenised.
      splits: the splits that the files define; ``("all",)`` if they define none.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.data import DataSource
      >>> def read(section, split):
      ...     yield "ann", {"x": np.zeros((2, 3), np.float32), "label": np.zeros(2, np.int32)}
      >>> source = DataSource(read, unit="person")  # `data.source: package.module:NAME` in YAML
      >>> [user for user, _ in source.read(None, "all")]
      ['ann']
    """

    read: Callable[[SourceConfig, str], Iterator[tuple[str, Any]]]
    unit: str
    task: Task | None = None
    splits: tuple[str, ...] = ("all",)


def _files(
    read: Callable[[pathlib.Path, str], Iterator[tuple[str, Any]]],
    bundled: pathlib.Path | None = None,
) -> Callable[[SourceConfig, str], Iterator[tuple[str, Any]]]:
    """Reads ``data.path``, or by default what comes with the package."""
    return lambda section, split: read(expand_paths(section.path or bundled)[0], split)


# ---- Python source, which is on every machine ----------------------------------------------------
# The public corpus is the standard library without its tests. The private users are the source
# files of the installed third-party packages: several thousand with heavy-tailed sizes. The store's
# fingerprint identifies what was installed.


_OWN_NAME = "dpfl-jax"
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}


def _read(path: pathlib.Path) -> bytes | None:
    """Returns the file's bytes; None if it is empty, unreadable or not UTF-8."""
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return data if data.strip() else None


def standard_library_files(with_tests: bool = False) -> dict[str, bytes]:
    """Returns the source files of the standard library: relative path -> contents."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"} if with_tests else _SKIPPED_FOLDERS
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - skipped)
        for path in (pathlib.Path(folder, n) for n in sorted(names) if n.endswith(".py")):
            data = _read(path)
            if data is not None:
                files[path.relative_to(root).as_posix()] = data
    return files


def _installed_paths() -> dict[str, pathlib.Path]:
    """Source files of installed distributions: package-relative path -> file."""
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"]).resolve()
    site_names = {"site-packages", "dist-packages"}
    paths: dict[str, pathlib.Path] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.sub(r"[-_.]+", "-", name).lower() == _OWN_NAME:
            continue
        for file in distribution.files or ():
            relative = file.as_posix()
            if not relative.endswith(".py") or relative.startswith(("..", "/")):
                continue
            path = pathlib.Path(str(distribution.locate_file(file)))
            parents = path.resolve().parents
            if stdlib in parents and not any(p.name in site_names for p in parents):
                continue
            paths.setdefault(relative, path)
    return paths


def installed_package_files() -> dict[str, bytes]:
    """Returns the private users: package-relative path (the user id) -> contents.

    It leaves out this package, empty files, files that are not UTF-8, copies of files of the
    standard library, and all but the first of equal files in path order: a text that two users have
    would be protected as if only one had it.

    Raises:
      BadInputError: no third-party package is installed.
    """
    seen = {hashlib.sha256(d).digest() for d in standard_library_files(with_tests=True).values()}
    files = {}
    for relative, path in sorted(_installed_paths().items()):
        data = _read(path)
        if data is None:
            continue
        digest = hashlib.sha256(data).digest()
        if digest not in seen:
            seen.add(digest)
            files[relative] = data
    if not files:
        raise BadInputError(
            "no third-party packages are installed, so there are no private users: use another "
            "data source"
        )
    return files


# ---- texts ---------------------------------------------------------------------------------------
# Readers yield (user, text) documents; a user's documents keep the order of the files.


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
    raise BadInputError(f"{path} holds no {' or '.join(patterns)}: put {what} there")


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
    """LEAF has windows of 80 characters, each with the next one; these next ones are the text."""
    for user, data in read_leaf(path):
        if data["x"]:
            yield user, data["x"][0] + "".join(data["y"])


def _first(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if name in row:
            return name
    raise BadInputError(f"{where}: none of the columns {list(names)}; there are {sorted(row)}")


def parse_time(value: Any, where: str) -> datetime.datetime:
    """Turns ISO text (UTC by default), a timestamp or epoch seconds into a time."""
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


# ---- arrays --------------------------------------------------------------------------------------
# Readers yield (user, dict of arrays with a leading axis). Features are raw, or scaled by published
# constants: means and deviations of the data would be information about people that no guarantee
# counts.


User = tuple[str, dict[str, np.ndarray]]

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# Kinds of chest pain and of resting ECG, by UCI's description.
_CODES = {2: (1, 2, 3, 4), 6: (0, 1, 2)}


def read_femnist(path: pathlib.Path, split: str) -> Iterator[User]:
    """Yields ``x`` float32 [28, 28] (1 = white) and ``label`` int32 in 0..61 per writer.

    Reads ``<split>.json``, ``<split>/*.json`` or ``*.json`` files whose name contains the split.
    LEAF lists a writer in both splits; a writer may also be spread over files of one split.
    """
    files = sorted({*path.glob(f"{split}.json"), *path.glob(f"{split}/*.json")})
    files = files or sorted(path.glob(f"*{split}*.json"))
    if not files:
        raise BadInputError(
            f"{path} holds no {split}.json or {split}/*.json: put LEAF's files there"
        )
    parts: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for user, data in read_leaf(file):
            parts.setdefault(user, []).append(data)
    for user, pieces in parts.items():
        pixels = [image for piece in pieces for image in piece["x"]]
        images = np.asarray(pixels, np.float32)
        if len(pixels) and images.shape[1:] != (784,):
            raise BadInputError(f"{path}: user {user!r} has images of {images.shape[1:]}, not 784")
        labels = np.asarray([y for piece in pieces for y in piece["y"]], np.int32)
        if len(pixels):
            yield user, {"x": images.reshape(-1, 28, 28), "label": labels}


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads an idx file of unsigned bytes, gzip or not.

    Raises:
      BadInputError: it is not an idx file, or is truncated.
    """
    try:
        with open_binary(path) as file:
            data = file.read()
    except (OSError, EOFError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"{path}: damaged ({error})") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise BadInputError(f"{path}: not an idx file of bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if body.size != math.prod(shape):
        raise BadInputError(f"{path}: has {body.size} values, but its header says {shape}")
    return body.reshape(shape)


def read_mnist(path: pathlib.Path, split: str) -> Iterator[User]:
    """Yields ``x`` float32 [28, 28] in 0..1 and ``label`` int32; each image is a user."""
    stem = {"train": "train", "test": "t10k"}[split]
    arrays = []
    for name in (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"):
        files = [p for p in (path / name, path / f"{name}.gz") if p.is_file()]
        if not files:
            raise BadInputError(f"{path} holds no {name}[.gz]: put MNIST's four idx files there")
        arrays.append(read_idx(files[0]))
    images, labels = arrays
    if len(images) != len(labels):
        raise BadInputError(f"{path}: {len(images)} images but {len(labels)} labels")
    for i in range(len(images)):
        image = images[i : i + 1].astype(np.float32) / np.float32(255)
        yield f"{split}-{i:05d}", {"x": image, "label": labels[i : i + 1].astype(np.int32)}


def read_heart_disease(path: pathlib.Path, split: str) -> Iterator[User]:
    """Yields ``x`` float32 [13], ``label`` int32 (disease or not), ``silo`` int32 (hospital).

    FLamby's rules (Ogier du Terrail et al. 2022, Fed-Heart-Disease): columns 10 to 12 are dropped,
    then rows with a missing value; chest pain (column 2) and resting ECG (column 6) become
    indicators, the first value left out; the label is whether the last column is above 0. 740
    patients remain: 303, 261, 46, 130. ``path`` is the folder of all four files, or the file of one
    hospital, which is then silo 0.
    """
    rows: list[tuple[int, int, list[float]]] = []
    for silo, hospital in enumerate(HOSPITALS):
        name = f"processed.{hospital}.data"
        if path.is_file() and path.name != name:
            continue
        file = path if path.is_file() else path / name
        if not file.is_file():
            raise BadInputError(
                f"{path} holds no {file.name}: put UCI's four processed files there"
            )
        with open_binary(file) as binary:
            text = binary.read().decode(errors="replace")
        for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
            if not cells:
                continue
            if len(cells) != 14:
                raise BadInputError(f"{file}, line {number}: {len(cells)} columns instead of 14")
            kept = [*cells[:10], cells[13]]
            if "?" in kept:
                continue
            try:
                rows.append((silo, number, [float(c) for c in kept]))
            except ValueError as error:
                raise BadInputError(f"{file}, line {number}: {error}") from error
    if not rows:
        raise BadInputError(
            f"{path} is not the file of a hospital: give processed.va.data, or another's"
        )
    table = np.array([r[2] for r in rows])
    features: list[np.ndarray] = []
    for column in range(10):
        values = table[:, column]
        if column in _CODES:
            features += [values == v for v in _CODES[column][1:]]
        else:
            features.append(values)
    x = np.stack(features, axis=1).astype(np.float32)
    for i, (silo, number, cells_kept) in enumerate(rows):
        yield (
            f"{HOSPITALS[silo]}/{number:04d}",
            {
                "x": x[i : i + 1],
                "label": np.array([cells_kept[-1] > 0], np.int32),
                "silo": np.array([0 if path.is_file() else silo], np.int32),
            },
        )


# (middle, half width) of age, sex, chest pain x3, resting blood pressure, cholesterol, fasting
# blood sugar, resting ECG x2, largest heart rate, angina, ST depression: usual values in medicine.
_FLAG = (0.5, 0.5)
HEART_SCALE = np.array(
    [
        *((55, 10), _FLAG, _FLAG, _FLAG, _FLAG, (130, 20), (220, 90), _FLAG, _FLAG, _FLAG),
        *((140, 25), _FLAG, (1, 1)),
    ],
    np.float64,
)


def read_scaled_heart_disease(path: pathlib.Path, split: str) -> Iterator[User]:
    """Yields ``read_heart_disease`` with features scaled to order 1 by ``HEART_SCALE``."""
    middle, width = HEART_SCALE.T
    for name, patient in read_heart_disease(path, split):
        yield name, {**patient, "x": ((patient["x"] - middle) / width).astype(np.float32)}


# ---- what scikit-learn bundles: real, and no download --------------------------------------------

# Least and largest value of each of the 30 features, as scikit-learn's description prints them.
BREAST_CANCER_RANGES = np.array(
    [
        *((6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501.0), (0.053, 0.163)),
        *((0.019, 0.345), (0.0, 0.427), (0.0, 0.201), (0.106, 0.304), (0.05, 0.097)),
        *((0.112, 2.873), (0.36, 4.885), (0.757, 21.98), (6.802, 542.2), (0.002, 0.031)),
        *((0.002, 0.135), (0.0, 0.396), (0.0, 0.053), (0.008, 0.079), (0.001, 0.03)),
        *((7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254.0), (0.071, 0.223)),
        *((0.027, 1.058), (0.0, 1.252), (0.0, 0.291), (0.156, 0.664), (0.055, 0.208)),
    ],
    np.float64,
)


def _load(name: str) -> tuple[np.ndarray, np.ndarray]:
    with extra("sklearn", f"data.source={name}"):
        from sklearn import datasets
    bunch: Any = getattr(datasets, f"load_{name}")()
    return np.asarray(bunch.data, np.float64), np.asarray(bunch.target)


def _people(what: str, x: np.ndarray, label: np.ndarray) -> Iterator[User]:
    for i in range(len(x)):
        yield f"{what} {i:05d}", {"x": x[i : i + 1].astype(np.float32), "label": label[i : i + 1]}


def read_digits(section: SourceConfig, split: str) -> Iterator[User]:
    """Yields 1,797 images: ``x`` float32 [8, 8] in 0..1, ``label`` int32; each is a user."""
    x, label = _load("digits")
    return _people("image", x.reshape(-1, 8, 8) / 16.0, label.astype(np.int32))


def read_breast_cancer(section: SourceConfig, split: str) -> Iterator[User]:
    """Yields 569 patients: ``x`` float32 [30] about in -1..1, ``label`` int32.

    Features are square roots of their place in the published range, stretched to -1..1.
    """
    x, label = _load("breast_cancer")
    low, high = BREAST_CANCER_RANGES.T
    return _people(
        "patient", 2 * np.sqrt(np.clip((x - low) / (high - low), 0, 1)) - 1, label.astype(np.int32)
    )


def read_diabetes(section: SourceConfig, split: str) -> Iterator[User]:
    """Yields 442 patients: ``x`` float32 [10], unscaled; ``label`` float32, the progression."""
    x, label = _load("diabetes")
    return _people("patient", x, label.astype(np.float32))


# ---- the table -----------------------------------------------------------------------------------


_PARTS = ("train", "test")
SETS: dict[str, DataSource] = {
    "shakespeare": DataSource(_files(read_shakespeare, SHAKESPEARE), "speaking role"),
    "stack_overflow": DataSource(_files(read_stack_overflow), "account", None, _PARTS),
    "cc_news": DataSource(_files(read_cc_news), "base domain"),
    "characters": DataSource(read_windows, "speaking role", CHARACTERS_TASK),
    "femnist": DataSource(_files(read_femnist), "writer", Task("classes", (28, 28), 62), _PARTS),
    "mnist": DataSource(_files(read_mnist), "image", Task("classes", (28, 28), 10), _PARTS),
    "digits": DataSource(read_digits, "image", Task("classes", (8, 8), 10)),
    "heart_disease": DataSource(
        _files(read_scaled_heart_disease), "patient", Task("classes", (13,), 2)
    ),
    "breast_cancer": DataSource(read_breast_cancer, "patient", Task("classes", (30,), 2)),
    "diabetes": DataSource(read_diabetes, "patient", Task("regression", (10,), scaled=False)),
}


def data_source(name: str) -> DataSource:
    """Returns the data set called ``name``.

    Raises:
      BadInputError: there is no such data set.
    """
    if name in SETS:
        return SETS[name]
    if ":" not in name:
        known = ("python_source", "store", *FORMATS, *SETS)
        raise BadInputError(
            f"unknown data source {name!r}: use {', '.join(known)}, or package.module:NAME"
        )
    source = imported(name, "data.source")
    if not isinstance(source, DataSource):
        raise BadInputError(f"data.source is {name!r}, which is not a dpfl_jax.data.DataSource")
    return source
