"""The formulas printed in papers, one module per family of papers, each by name and with source.

They are here for comparison and reproduction. Where a printed formula is not a valid bound, its
docstring says "NOT A BOUND" and a test shows the violation. None of them is used for a guarantee.
"""

from dpfl_jax.accounting.closed_forms import group, isrl, rpdp, subject

__all__ = ["group", "isrl", "rpdp", "subject"]
