"""Names of the Hugging Face hub: what lies in the local cache. Nothing is ever downloaded here."""

from __future__ import annotations

import os
import re
from typing import Literal

from dpfl_jax.errors import BadInputError

_PREFIX = "hf:"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/(.*))?")
# Names that end so are files that are not there.
_FILES = {".arrow", ".csv", ".gz", ".json", ".jsonl", ".model", ".parquet", ".tsv", ".txt"}


def local_path(path: str | os.PathLike[str], kind: Literal["model", "dataset"]) -> str:
    """Where a path, or what a name of the hub stands for, lies on this machine.

    Args:
      path: a path, returned as it is; or ``hf:org/name``, the newest snapshot in the cache, or
        ``hf:org/name/part``, something in it. A mistyped path is never taken for a name.
      kind: of the repository.

    Raises:
      BadInputError: the cache does not hold it; the sentence has the command that downloads it.
    """
    text = os.fspath(path)
    meant = text.startswith(_PREFIX)
    found = _NAME.fullmatch(text.removeprefix(_PREFIX))
    if meant and (found is None or ".." in (found[2] or "").split("/")):
        raise BadInputError(f"{text!r} is no name of the Hugging Face hub: write hf:org/name")
    if not meant:
        named = found is not None and not found[2] and os.path.splitext(text)[1] not in _FILES
        if named and not text.startswith(".") and not os.path.lexists(text):
            raise BadInputError(
                f"there is no file or folder {text}: if it is a name of the Hugging Face hub, "
                f"write hf:{text}"
            )
        return text
    assert found is not None
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(found[1], repo_type=kind, local_files_only=True)
    except ImportError as error:
        raise BadInputError(
            f"{text} is a name of the Hugging Face hub: pip install huggingface_hub, which knows "
            "where its cache is"
        ) from error
    except (OSError, ValueError) as error:
        of = "" if kind == "model" else " --repo-type dataset"
        raise BadInputError(
            f"{text}: the local Hugging Face cache does not hold it, and nothing is "
            f"downloaded here: `hf download {found[1]}{of}` does that"
        ) from error
    return os.path.join(folder, found[2]) if found[2] else folder
