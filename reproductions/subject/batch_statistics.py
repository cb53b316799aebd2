"""How many subjects a batch holds, and how large the largest group is: no training, no privacy."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.partition import assign_to_silos
from dpfl_jax.randomness import RootKey
from reproductions._plots import columns, panel, reported, ticks
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, near
from reproductions.subject._batches import batch_statistics

TITLE = "distinct subjects and largest groups in a batch"
SOURCE = "Marathe et al., text A Figure 2, section 5.2; text B Figures 1, 2, 4, Appendix E.2"

SILOS = 16
ALPHAS = (1.0, 2.0, 4.0, 8.0, 16.0)
SPREADS = (0.0, 0.65, 1.3)  # of Shakespeare's roles: standard deviation over mean


def records_of(subjects: int, mean: float, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Records per subject: log-normal with a mean and a standard deviation; int64 [subjects]."""
    if spread == 0:
        return np.full(subjects, round(mean))
    variance = np.log1p((spread / mean) ** 2)
    counts = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), subjects)
    return np.maximum(1, np.rint(counts * mean / counts.mean())).astype(np.int64)


def simulate(
    subjects: int, mean: float, spread: float, batch: int, alpha: float, draws: int
) -> dict[str, Any]:
    """Batches of one silo of a simulated federation, by Poisson sampling."""
    rng = np.random.default_rng(of(0))
    counts = records_of(subjects, mean, spread, rng)
    owner = np.repeat(np.arange(subjects), counts)
    keys = rng.integers(0, 2**63, subjects).astype(np.uint64)
    silos = assign_to_silos(owner, keys, SILOS, "power", alpha=alpha)
    one = silos == 0
    data = FederatedData.from_assignment(
        ArrayRecords({}), owner[one], np.zeros(one.sum(), np.int64), 1
    )
    silo = data.silos[0]
    found = batch_statistics(silo, batch / silo.num_records, draws, RootKey.from_seed(of(1)))
    return {
        "distinct": float(found.distinct_subjects.mean()),
        "mean_z": float(found.largest_group.mean()),
        "dominant_z": found.dominant_group,
        "histogram_z": np.bincount(found.largest_group).tolist(),
    }


def run(settings: Settings) -> Outcome:
    """Simulates the federations of the papers and draws the histograms."""
    draws = 200 if settings.quick else 1000
    rows: list[dict[str, Any]] = []
    with settings.console.status("simulating batches"):
        for alpha in ALPHAS:
            rows.append(
                {"set": "FEMNIST", "alpha": alpha} | simulate(3500, 145, 0, 512, alpha, draws)
            )
        rows.append(
            {"set": "FEMNIST, spread sizes", "alpha": 1.0}
            | simulate(3500, 145, 60, 512, 1.0, draws)
        )
        rows.append({"set": "Small-FEMNIST", "alpha": 1.0} | simulate(350, 145, 0, 256, 1.0, draws))
        for spread in SPREADS:
            rows.append(
                {"set": f"Shakespeare, spread {spread:g}", "alpha": 1.0}
                | simulate(660, 4484, spread * 4484, 100, 1.0, draws)
            )
    by = {(r["set"], r["alpha"]): r for r in rows}
    femnist = {a: by["FEMNIST", a] for a in ALPHAS}
    first, last = femnist[1.0], femnist[16.0]
    speech = [by[f"Shakespeare, spread {spread:g}", 1.0] for spread in SPREADS]
    faces, small = [first, by["FEMNIST, spread sizes", 1.0]], by["Small-FEMNIST", 1.0]
    means = [femnist[a]["mean_z"] for a in ALPHAS]
    claims = [
        near(
            "text B: 475 distinct subjects in a FEMNIST batch",
            first["distinct"],
            475,
            0.1,
            source="paper",
        ),
        near(
            "text B: 310 distinct subjects at skew 16", last["distinct"], 310, 0.1, source="paper"
        ),
        _at_any_spread(
            "text B: 86 distinct subjects in a Shakespeare batch",
            [r["distinct"] for r in speech],
            86,
            8.6,
        ),
        _at_any_spread("both: the dominant Z is 3 (FEMNIST)", [r["dominant_z"] for r in faces], 3),
        _at_any_spread(
            "both: the dominant Z is 3 (Shakespeare)", [r["dominant_z"] for r in speech], 3
        ),
        near("both: mean Z is 3 at skew 2", femnist[2.0]["mean_z"], 3, 0.1, source="paper"),
        near("both: mean Z is 6 at skew 16", last["mean_z"], 6, 0.1, source="paper"),
        Claim(
            "mean Z grows with the skew",
            [round(m, 2) for m in means],
            "increasing",
            bool(np.all(np.diff(means) > 0)),
            source="paper",
        ),
        near("text B: mean Z is 4 with 350 subjects", small["mean_z"], 4, 0.1, source="paper"),
    ]
    file = settings.out / "subject_batch_statistics.png"
    _draw(rows, file)
    notes = [
        "sizes: equal, or log-normal with standard deviation 60 (FEMNIST) and up to 1.3 times the "
        "mean (Shakespeare); the papers do not give them, so a claim is only decided if it comes "
        "out the same at all of them",
        "batches are Poisson with the paper's expected size; the statistics are not private",
    ]
    return Outcome(claims, [file], rows, notes)


def _at_any_spread(claim: str, found: list[float], expected: float, room: float = 0.0) -> Claim:
    """Holds if it does at every spread of sizes, undecided if that matters."""
    close = {abs(value - expected) <= room for value in found}
    holds = close.pop() if len(close) == 1 else None
    return Claim(claim, found, expected, holds, "at each spread of sizes", source="paper")


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, 1, 2, size=(9, 3.4)) as (left, right):
        for row in rows:
            if row["set"] == "FEMNIST":
                share = np.array(row["histogram_z"]) / sum(row["histogram_z"])
                left.plot(range(len(share)), share, "o-", ms=3, label=f"a = {row['alpha']:g}")
        left.set(xlabel="largest group Z", ylabel="share of batches", title="FEMNIST-like")
        some = [r for r in rows if r["set"] == "FEMNIST"]
        right.plot(*columns(some, "alpha", "distinct"), "o-", label="simulated")
        reported(right, (1, 16), (475, 310))
        ticks(right, ALPHAS, base=2)
        right.set(xlabel="skew a", ylabel="distinct subjects in a batch of 512")
