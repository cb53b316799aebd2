"""From a finished run to a directory for others: weights, tokeniser, guarantee."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, Literal

from dpfl_jax import __version__
from dpfl_jax.accounting.statement import NAME, read
from dpfl_jax.errors import BadInputError
from dpfl_jax.models.checkpoint import save_checkpoint
from dpfl_jax.run.directory import write_atomically
from dpfl_jax.training.trained import load_trained


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
    which: Literal["last", "best"] = "last",
) -> dict[str, Any]:
    """Writes a run's model in the Hugging Face layout, adapters merged.

    Args:
      run: run directory, finished.
      out: a directory that does not exist or is empty.
      dtype: of the tensors, float32 or bfloat16.
      max_file_bytes: more go into several files.
      which: checkpoint, the last or the one with the lowest held-out loss.

    Returns:
      out, parameters, guarantee (in words) and privacy (its fields).

    Raises:
      BadInputError: the run is not finished, its base is gone, or the model is of no known family.
    """
    if max_file_bytes < 1:
        raise BadInputError("the size of a weights file must be above 0")
    trained = load_trained(run, dtype=dtype, which=which)
    stated = read(pathlib.Path(run) / NAME)
    base = trained.config.model.checkpoint
    target = save_checkpoint(
        out,
        trained.model.config,
        trained.params,
        like=base,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
    )
    report = trained.report
    facts = dict(report["model"])
    if base is not None:
        facts["checkpoint"] = pathlib.Path(base).name  # where it lay is nobody's business
    told = {
        "run": report["name"],
        "steps": report["steps"],
        "exported_step": trained.step,
        "finished_at": report["finished_at"],
        "model": facts,
        "dpfl_jax": __version__,
    }
    write_atomically(target / "run.json", json.dumps(told, indent=2) + "\n")
    write_atomically(target / NAME, stated.dumps())
    return {
        "out": str(target),
        "parameters": trained.model.num_params,
        "step": trained.step,
        "guarantee": report["guarantee"],
        "privacy": report["privacy"],
    }
