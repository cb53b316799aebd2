"""Records with subjects, from what a configuration names: a training part and a held-out part."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpfl_jax.config.federated import FederatedDataConfig
from dpfl_jax.data import ArrayStore, DataConfig, load_dataset, split_by_user, split_within_users
from dpfl_jax.data.sets import arrays, text
from dpfl_jax.data.shards import open_store
from dpfl_jax.data.splits import limit_store
from dpfl_jax.data.store import Store
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation import tabular

Subject = tuple[str, dict[str, np.ndarray]]

# LEAF's 80 characters of Shakespeare; id 0 stands for any other.
LEAF_CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)


@dataclasses.dataclass(frozen=True)
class SubjectData:
    """Subjects, split.

    Attributes:
      train: what is spread over silos; a user of the store is a subject.
      held_out: what is evaluated.
      description: one line.
      num_classes: of classification tasks, else 0.
      input_shape: of one input of classification tasks, else ().
      vocab_size: of text, else 0.
      bos_id: of token sequences.
    """

    train: Store
    held_out: Store
    description: str
    num_classes: int = 0
    input_shape: tuple[int, ...] = ()
    vocab_size: int = 0
    bos_id: int = 1


def load_subjects(config: FederatedDataConfig) -> SubjectData:
    """Reads and splits the data of a configuration.

    Raises:
      BadInputError: files or packages that are not there, or a part that is empty.
    """
    extra: dict[str, Any] = {}
    if config.source == "python_source":
        data = load_dataset(
            DataConfig(
                source="python_source",
                seq_len=config.seq_len,
                validation_fraction=0.0,
                test_fraction=0.0,
                max_users=config.max_subjects,
                max_examples_per_user=config.max_records_per_subject,
                public="none",
            )
        )
        assert data.tokenizer is not None
        store, what = data.train, "a subject is a source file of an installed package"
        extra = {"vocab_size": data.train.schema.vocab_size, "bos_id": data.tokenizer.bos_id}
    else:
        users, what, extra = _named(config)
        store = ArrayStore.from_users(users)
        store = limit_store(store, config.max_subjects, config.max_records_per_subject)
    train, held_out = _split(store, config)
    description = (
        f"{config.source}: {train.num_users} subjects with {train.num_examples} records "
        f"(before the cap per silo) in training, {held_out.num_users} with "
        f"{held_out.num_examples} held out; {what}"
    )
    return SubjectData(train, held_out, description, **extra)


def _split(store: Store, config: FederatedDataConfig) -> tuple[Store, Store]:
    fraction = config.validation_fraction
    if config.split == "by_subject":
        parts = split_by_user(store, {"held_out": fraction}, config.split_seed)
        train, held_out = parts["train"], parts["held_out"]
    else:
        train, held_out = split_within_users(store, fraction, most=2**31 - 1, smallest=2)
    for name, part in (("training", train), ("held-out", held_out)):
        if part.num_users == 0:
            raise BadInputError(
                f"the {name} part holds none of the {store.num_users} subjects: change "
                "data.validation_fraction or data.split_seed, or give more subjects"
            )
    return train, held_out


def _named(config: FederatedDataConfig) -> tuple[list[Subject], str, dict[str, Any]]:
    if config.source == "digits":
        x, y = digits()
        shape: tuple[int, ...] = (8, 8)
    elif config.source == "breast_cancer":
        facts = {"num_classes": 2, "input_shape": (30,)}
        return list(tabular.breast_cancer()), "a subject is a patient with one record", facts
    elif config.source == "heart_disease":
        patients = list(tabular.heart_disease(_path(config)))
        what = f"a subject is a patient with one record, of {len(arrays.HOSPITALS)} hospitals"
        return patients, what, {"num_classes": 2, "input_shape": (13,)}
    elif config.source == "shakespeare":
        roles = list(_windows(_path(config), config))
        what = f"a subject is a speaking role; the task is the character after {config.seq_len}"
        size = len(LEAF_CHARACTERS) + 1
        return roles, what, {"num_classes": size, "vocab_size": size}
    elif config.source == "store":
        return _stored(_path(config), config)
    elif config.source == "femnist":
        writers = {
            name: {"x": d["image"], "label": d["label"]}
            for name, d in arrays.read_femnist(_path(config), "train")
        }
        facts = {"num_classes": 62, "input_shape": (28, 28)}
        return list(writers.items()), "a subject is a writer", facts
    else:
        found = list(arrays.read_mnist(_path(config), "train"))
        x = np.concatenate([d["image"] for _, d in found])
        y = np.concatenate([d["label"] for _, d in found])
        shape = (28, 28)
    what = (
        f"writers are synthetic: {config.records_per_subject} images of mixed labels each, drawn "
        "at random"
    )
    subjects = list(_writers(x, y, config.records_per_subject, config.split_seed))
    return subjects, what, {"num_classes": 10, "input_shape": shape}


def _stored(
    path: pathlib.Path, config: FederatedDataConfig
) -> tuple[list[Subject], str, dict[str, Any]]:
    """The users of a built store of images with labels."""
    store, classes = open_store(path), config.num_classes
    fields = {f.name: f for f in store.schema.fields}
    for option, name in (("input_field", config.input_field), ("label_field", config.label_field)):
        if name not in fields:
            raise BadInputError(
                f"the examples of {path} have no field {name!r}, but {sorted(fields)}: "
                f"set data.{option}"
            )
    if classes is None:
        raise BadInputError("data.source=store needs data.num_classes: how many labels there are")
    shape = tuple(size for size in fields[config.input_field].shape if size != 1)

    def users() -> Iterator[Subject]:
        names = store.user_ids(range(store.num_users))
        for name, (start, stop) in zip(names, itertools.pairwise(store.user_offsets)):
            found = store.read(np.arange(start, stop))
            x, label = found[config.input_field], found[config.label_field]
            scale = 255.0 if x.dtype == np.uint8 else 1.0
            if label.ndim != 1 or not ((label >= 0) & (label < classes)).all():
                raise BadInputError(
                    f"{path}: subject {name!r} has labels that are not whole numbers from 0 to "
                    f"{classes - 1}: check data.label_field and data.num_classes"
                )
            own = {"x": x.reshape(len(x), *shape).astype(np.float32) / scale,
                   "label": label.astype(np.int32)}  # fmt: skip
            # Other numbers of a record: its silo, or its budget.
            used = (config.input_field, config.label_field)
            rest = {n: a for n, a in found.items() if a.ndim == 1 and n not in used}
            yield name, rest | own

    facts = {"num_classes": classes, "input_shape": shape}
    return list(users()), "a subject is a user of the store", facts


def _path(config: FederatedDataConfig) -> pathlib.Path:
    if config.path is None:
        raise BadInputError(
            f"data.source={config.source} needs data.path: the folder that holds its files"
        )
    path = pathlib.Path(config.path)
    if not path.exists():
        raise BadInputError(f"{path} does not exist: put the {config.source} files there")
    return path


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 real images of 8 x 8, bundled with scikit-learn; float32 in 0..1 and int32."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BadInputError(
            "data.source=digits needs scikit-learn: install it, or use data.source=python_source"
        ) from None
    found = load_digits()
    return (found.images / 16.0).astype(np.float32), found.target.astype(np.int32)


def _writers(x: np.ndarray, y: np.ndarray, size: int, seed: int) -> Iterator[Subject]:
    digest = hashlib.sha256(b"dpfl_jax synthetic writers %d" % seed).digest()
    order = np.random.default_rng(np.frombuffer(digest, np.uint32)).permutation(len(x))
    for number, start in enumerate(range(0, len(order), size)):
        mine = order[start : start + size]
        yield f"writer {number:05d}", {"x": x[mine], "label": y[mine]}


def _windows(path: pathlib.Path, config: FederatedDataConfig) -> Iterator[Subject]:
    """Windows of characters and the one that follows, per speaking role (LEAF's task)."""
    codes = np.zeros(256, np.int32)
    for i, character in enumerate(LEAF_CHARACTERS, start=1):
        codes[ord(character)] = i
    speeches: dict[str, list[str]] = {}
    for role, speech in text.read_shakespeare(path, "all"):
        speeches.setdefault(role, []).append(speech)
    length = config.seq_len
    for role, parts in speeches.items():
        raw = np.frombuffer(" ".join(parts).encode("latin-1", "replace"), np.uint8)
        if len(raw) <= length:
            continue
        starts = np.arange(0, len(raw) - length, config.stride)
        ids = codes[raw]
        x = ids[starts[:, None] + np.arange(length)]
        yield role, {"x": x, "label": ids[starts + length]}
