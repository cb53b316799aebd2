"""Attacks on mechanisms, and on runs: what they prove is ``evidence``'s."""
