"""``python -m dpfl_jax``: the same as ``dpfl``."""

import sys

from dpfl_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
