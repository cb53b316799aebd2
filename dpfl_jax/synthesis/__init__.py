"""Synthetic data from a language model that was trained with a guarantee.

What a released model writes is post-processing: its guarantee covers any number of rows, as long as
nothing else that enters (prompts, labels and how many of each, what a column may hold) comes from
private data. ``histogram`` is the one other thing that is read from people, with its own noise.
"""

from dpfl_jax.synthesis.synthesize import Settings, synthesize

__all__ = ["synthesize", "Settings"]
