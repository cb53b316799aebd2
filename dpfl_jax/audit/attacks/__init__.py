"""Attacks on mechanisms and on runs; ``audit.proof`` turns their trials into bounds on epsilon."""
