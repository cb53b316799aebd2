"""Attacks on mechanisms, and on runs: what they prove is ``evidence``'s."""

from dpfl_jax.evidence import Audit, Trials, audit

__all__ = ["Audit", "Trials", "audit"]
