"""Attacks on mechanisms, and on runs: what they prove is ``audit.proof``'s."""
