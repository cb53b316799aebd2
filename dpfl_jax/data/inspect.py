"""What ``dpfl data inspect`` shows: counts, (private) quantiles of examples per user, a histogram.

The median number of examples per user is the group size that Charles et al. 2024 (section 6)
suggest; the exact one is itself information about the users.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from dpfl_jax.buckets import as_given
from dpfl_jax.data.owners import SharedStore, grouped_by_owner_set
from dpfl_jax.data.shards import ShardStore
from dpfl_jax.data.store import Store
from dpfl_jax.errors import BadInputError, at_least, extra, positive, probability
from dpfl_jax.randomness import RootKey


def private_quantile(
    counts: np.ndarray, quantile: float, epsilon: float, largest: int, rng: np.random.Generator
) -> int:
    """Releases one quantile of the counts with pure epsilon-DP for adding or removing a user.

    The exponential mechanism (McSherry & Talwar 2007; Smith 2011, algorithm 2, here over integers):
    candidate v in 1..largest has the score ``-|quantile * below - (1 - quantile) * above|`` with
    ``below`` the counts < v and ``above`` the counts > v. Adding or removing one user changes a
    score by at most ``max(quantile, 1 - quantile)``, and the score does not depend on the number of
    users. v is drawn with probability proportional to exp(epsilon * score / (2 * sensitivity)).

    Args:
      counts: int64 [num_users], examples of each user.
      quantile: in (0, 1); 0.5 for the median.
      epsilon: privacy loss.
      largest: public upper bound of the answer; must not be looked up in the data.
      rng: secret randomness.

    Returns:
      An integer in 1..largest.

    Raises:
      BadInputError: a parameter is out of range.
    """
    probability("the quantile", quantile, zero=False, one=False)
    positive("epsilon", epsilon)
    at_least("the upper bound", largest, 1)
    ordered = np.sort(np.asarray(counts))
    candidates = np.arange(1, largest + 1)
    below = np.searchsorted(ordered, candidates, side="left")
    above = len(ordered) - np.searchsorted(ordered, candidates, side="right")
    scores = -np.abs(quantile * below - (1.0 - quantile) * above)
    sensitivity = max(quantile, 1.0 - quantile)
    # Adding Gumbel noise and taking the largest samples the exponential mechanism exactly.
    noisy = epsilon * scores / (2.0 * sensitivity) + rng.gumbel(size=largest)
    return int(candidates[np.argmax(noisy)])


def private_quantiles(
    counts: np.ndarray,
    quantiles: list[float],
    epsilon: float,
    largest: int,
    key: RootKey | None = None,
) -> list[int]:
    """Releases several quantiles; each gets an equal share of epsilon (basic composition)."""
    key = key or RootKey.generate()
    if not quantiles:
        raise BadInputError("no quantile is asked for: give at least one, e.g. 0.5")
    share = epsilon / len(quantiles)
    return [
        private_quantile(counts, q, share, largest, key.numpy("private-quantile", i))
        for i, q in enumerate(quantiles)
    ]


QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def _examples_of_each(store: Any) -> np.ndarray:
    return store.examples_per_owner if isinstance(store, SharedStore) else store.examples_per_user


def size_histogram(counts: np.ndarray) -> list[dict[str, int]]:
    """Returns the number of users with 1, 2-3, 4-7, ... examples (bounds inclusive)."""
    level = np.floor(np.log2(counts)).astype(int)
    return [
        {"from": 2**k, "to": 2 ** (k + 1) - 1, "users": int((level == k).sum())}
        for k in range(int(level.max(initial=-1)) + 1)
    ]


def summary(store: ShardStore | SharedStore) -> dict[str, Any]:
    """Returns exact counts. They are information about the users: see ``private_summary``."""
    counts, disk = _examples_of_each(store), grouped_by_owner_set(store)
    manifest = disk.manifest
    shared = {"most_owners": store.most_owners} if isinstance(store, SharedStore) else {}
    return {
        "store": as_given(os.fspath(disk.path)),
        "users": store.num_users,
        "examples": store.num_examples,
        **shared,
        "examples_per_user": {
            "mean": float(counts.mean()),
            # The smallest count that at least this share of the users do not exceed.
            **{f"q{q:g}": int(np.quantile(counts, q, method="inverted_cdf")) for q in QUANTILES},
        },
        "median": int(np.quantile(counts, 0.5, method="inverted_cdf")),
        "histogram": size_histogram(counts),
        "schema": dataclasses.asdict(store.schema),
        "format": manifest.shard_format,
        "shards": len(manifest.shards),
        "bytes": sum(s.bytes for s in (*manifest.shards, manifest.index)),
        "fingerprint": store.fingerprint,
        "private": False,
    }


def private_summary(
    store: Store,
    epsilon: float | None,
    quantiles: list[float],
    largest: int,
    seed: int | None = None,
) -> dict[str, Any]:
    """Returns quantiles of examples per user that are epsilon-DP for adding or removing a user.

    The result says nothing else about the store, not even the number of users.

    Raises:
      BadInputError: epsilon is missing, or a parameter is out of range.
    """
    if epsilon is None:
        raise BadInputError("--private needs --epsilon: the privacy loss you accept, e.g. 1")
    key = RootKey.generate() if seed is None else RootKey.from_seed(seed)
    if isinstance(store, SharedStore):
        raise BadInputError(
            "--private is for records of one owner each, but these records have several: leave "
            "--private out"
        )
    values = private_quantiles(store.examples_per_user, quantiles, epsilon, largest, key)
    return {
        "private": True,
        "epsilon": epsilon,
        "delta": 0.0,
        "unit": "user",
        "adjacency": "add-or-remove",
        "mechanism": "exponential mechanism per quantile, epsilon shared equally",
        "largest": largest,
        "public_seed": seed is not None,
        "quantiles": {f"{q:g}": v for q, v in zip(quantiles, values)},
    }


def plot_sizes(store: Store, path: str | os.PathLike[str]) -> None:
    """Draws users and their examples by size class (log scale) into a PNG file."""
    with extra("plots", "a picture"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    counts = _examples_of_each(store)
    edges = [2.0**k for k in range(int(np.log2(counts.max())) + 2)]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.hist(counts, bins=edges, label="users", alpha=0.8)
    axes.hist(counts, bins=edges, weights=counts, label="examples", histtype="step", lw=2)
    median = int(np.quantile(counts, 0.5, method="inverted_cdf"))
    axes.axvline(median, color="black", ls="--", label=f"median {median}")
    axes.set(xscale="log", yscale="log", xlabel="examples of a user", ylabel="number")
    axes.set_title(f"{store.num_users} users, {store.num_examples} examples")
    axes.legend()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror or error}") from error


def show(result: dict[str, Any], console: Any) -> None:
    """Prints a summary as tables."""
    from rich.table import Table

    if result["private"]:
        title = f"examples per user, {result['epsilon']:.12g}-DP (add or remove a user)"
        if result["public_seed"]:
            title += ", but not against those who know the seed"
        table = Table(title=title)
        table.add_column("quantile", justify="right")
        table.add_column("examples", justify="right")
        for q, value in result["quantiles"].items():
            table.add_row(q, str(value))
        console.print(table)
        return
    console.print(
        f"{result['store']}: {result['users']} users, {result['examples']} examples"
        + (f" of up to {result['most_owners']} owners each, " if "most_owners" in result else ", ")
        + f"{result['shards']} {result['format']} shards, {result['bytes'] / 1e6:.1f} MB"
    )
    for field in result["schema"]["fields"]:
        console.print(f"  {field['name']}: {field['dtype']} {tuple(field['shape'])}")
    table = Table(title="examples per user (exact: information about the users)")
    table.add_column("examples", justify="right")
    table.add_column("users", justify="right")
    table.add_column("")
    most = max((row["users"] for row in result["histogram"]), default=1)
    for row in result["histogram"]:
        bar = "█" * round(40 * row["users"] / most)
        table.add_row(f"{row['from']}-{row['to']}", str(row["users"]), bar)
    console.print(table)
    quantiles = result["examples_per_user"]
    console.print("  ".join(f"{k} {v:g}" for k, v in quantiles.items()))
