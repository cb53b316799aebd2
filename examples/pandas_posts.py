"""A DataFrame of posts: a small language model that learns no author by heart.

``python examples/pandas_posts.py posts.csv author body``; without arguments, on invented posts.
"""

from __future__ import annotations

import random
import sys

import jax
import optax
import pandas as pd

import dpfl_jax as dpfl

WORDS = ["the", "river", "runs", "under", "a", "green", "stone", "bridge", "all", "night"]


def invented(authors: int) -> pd.DataFrame:
    """Each author has one to four posts of ten words that follow one another in a circle."""
    rng = random.Random(0)
    rows = []
    for author in range(authors):
        for _ in range(1 + author % 4):
            start = rng.randrange(10)
            text = " ".join(WORDS[(start + i) % 10] for i in range(10))
            rows.append({"author": f"author {author}", "body": text})
    return pd.DataFrame(rows)


def main(frame: pd.DataFrame, user: str, text: str, steps: int = 30) -> dpfl.FitResult:
    """Trains on four authors in five; the others are held out."""
    names = frame[user].drop_duplicates()
    held_out = frame[user].isin(names[::5])
    train, validation = (
        dpfl.from_pandas(part, user=user, text=text, seq_len=48)
        for part in (frame[~held_out], frame[held_out])
    )
    config = dpfl.transformer_config(
        "tiny", vocab_size=259, max_seq_len=48, num_layers=1, embed_dim=32, remat="none"
    )
    model = dpfl.LanguageModel(config)
    plan = dpfl.uls(group_size=2, cohort_size=len(names) // 5, clipping="normalized").plan(
        train, steps=steps, epsilon=8.0
    )
    params = model.init(jax.random.key(0))
    result = dpfl.fit(model.loss, params, plan, optax.adam(1e-2), validation=validation)
    for when, held_out in (("before", result.initial), ("after", result.final)):
        print(f"held-out loss {when}: {held_out.loss:.3f}" if held_out else when)
    print(result.guarantee)
    return result


if __name__ == "__main__":
    given = sys.argv[1:]
    main(pd.read_csv(given[0]), given[1], given[2]) if given else main(
        invented(300), "author", "body"
    )
