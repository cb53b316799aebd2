"""``python -P -m dpfl_jax``: the same as ``dpfl``.

Without ``-P`` Python looks for all modules in the current folder first, before any of ours runs.
"""

import sys

from dpfl_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
