"""One row of ``dpfl bench pods``, in a process of its own: the compiler keeps what it has taken."""

from __future__ import annotations

import json
import sys
from typing import Any

from dpfl_jax.config import load_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.training.slices import measure, slice_mesh


def main() -> None:
    """Reads what to compile from standard input, and writes the row."""
    asked = json.load(sys.stdin)
    topology, vocab = asked.pop("topology"), asked.pop("vocab")
    try:
        config: Any = load_config(asked.pop("config"), asked.pop("overrides"))
        mesh = slice_mesh(topology, config.execution.mesh.axes)
        row = measure(config, vocab, topology, mesh, baseline=False, **asked)
    except BadInputError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write("\n" + json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
