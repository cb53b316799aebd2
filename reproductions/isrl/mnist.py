"""MNIST odd/even over 25 heterogeneous silos (figures 4 and 7)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.data.sets import read_idx
from dpfl_jax.federation.isrl import Budget, MessageSpec, SiloData
from reproductions._plots import band, columns, panel, ticks
from reproductions._seeds import of
from reproductions.isrl._bundled import NOTE, bundled
from reproductions.isrl._local_sgd import local_sgd_noise
from reproductions.isrl._published import Published, silo_noise
from reproductions.isrl._train import Task, best_over_steps, summary, tried_of
from reproductions.registry import Claim, Outcome, Settings, Source, less

TITLE = "MNIST odd/even, logistic regression: error against epsilon"
SOURCE = "Lowy and Razaviyayn 2023, section 6 and appendix I, figures 4 and 7"

EPSILONS = (0.75, 1.5, 3.0, 6.0, 12.0, 18.0)
ROUNDS, DIM = 35, 50
DRAWS = 5  # of silos, for upsilon


def logistic(w: jax.Array, example: Any) -> jax.Array:
    """Labels 0 and 1; scores clipped to [-15, 15] as the authors do."""
    score = jnp.clip(example["x"] @ w, -15.0, 15.0)
    return jnp.logaddexp(0.0, score) - example["y"] * score


def error_rate(w: jax.Array, train: SiloData, test: SiloData) -> jax.Array:
    """Share of test records on the wrong side."""
    del train
    guess = (test.examples["x"] @ w) > 0
    wrong = guess != (test.examples["y"] > 0.5)
    real = jnp.arange(test.capacity)[None, :] < test.sizes[:, None]
    return jnp.where(real, wrong, False).sum() / test.sizes.sum()


@dataclasses.dataclass(frozen=True)
class Images:
    """What silos are drawn from.

    Attributes:
      x: float32 [m, 50], on their principal components.
      digits: int [m].
      per_digit: images of each digit that are used.
      batch: K.
    """

    x: np.ndarray
    digits: np.ndarray
    per_digit: int
    batch: int

    @property
    def silo_size(self) -> int:
        """n, of the training part."""
        return int(0.8 * 2 * self.per_digit)


def load(folder: pathlib.Path | None) -> Images:
    """MNIST's training images; without a folder the small digits that scikit-learn bundles."""
    if folder is None:
        raw, digits = bundled("digits", "MNIST's idx files (in a folder `mnist`)")
        return Images(_projected(raw / 16.0), digits, 170, 97)
    images = read_idx(folder / "train-images-idx3-ubyte.gz").reshape(-1, 784) / np.float32(255)
    # A seventh of the 5,421 images of the rarest digit.
    return Images(_projected(images), read_idx(folder / "train-labels-idx1-ubyte.gz"), 774, 443)


def _projected(images: np.ndarray) -> np.ndarray:
    centred = images - images.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    top = vectors[:, np.argsort(values)[::-1][:DIM]]
    return (centred @ top).astype(np.float32)


def draw(images: Images, rng: np.random.Generator) -> tuple[SiloData, SiloData, float]:
    """One draw as published: a silo for each pair of an even and an odd digit, with replacement."""
    x, digits, most = images.x, images.digits, images.per_digit
    pools = [rng.permutation(np.flatnonzero(digits == d))[:most] for d in range(10)]
    parts: dict[str, list[np.ndarray]] = {"x": [], "y": [], "tx": [], "ty": []}
    for even, odd in itertools.product(range(0, 10, 2), range(1, 10, 2)):
        chosen = rng.choice(np.concatenate([pools[even], pools[odd]]), 2 * most)
        label = (digits[chosen] % 2 == 0).astype(np.float32)
        cut = int(0.8 * len(chosen))
        for key, part in (("x", slice(None, cut)), ("tx", slice(cut, None))):
            parts[key].append(x[chosen[part]])
            parts["y" if key == "x" else "ty"].append(label[part])
    made = {k: jnp.asarray(np.stack(v)) for k, v in parts.items()}
    train = SiloData({"x": made["x"], "y": made["y"]}, jnp.full(25, made["x"].shape[1]))
    test = SiloData({"x": made["tx"], "y": made["ty"]}, jnp.full(25, made["tx"].shape[1]))
    return train, test, float(np.linalg.norm(np.stack(parts["x"]), axis=-1).max())


def heterogeneity(train: SiloData) -> float:
    """upsilon_*^2: mean square of the silos' gradients at the minimiser (damped Newton)."""
    x, y = np.asarray(train.examples["x"], np.float64), np.asarray(train.examples["y"])
    flat, w = x.reshape(-1, DIM), np.zeros(DIM)
    for _ in range(60):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -15, 15)))
        gradients = ((p - y)[..., None] * x).mean(1)
        curvature = (p * (1 - p)).reshape(-1, 1)
        hessian = flat.T @ (flat * curvature) / len(flat)
        step = np.linalg.solve(hessian + 1e-9 * np.eye(DIM), gradients.mean(0))
        w -= 0.5 * step
        if np.abs(step).max() < 1e-6:
            break
    return float(np.square(gradients).sum(1).mean())


def run(settings: Settings) -> Outcome:
    """Trains every arm at every epsilon."""
    folder = None if settings.data_dir is None else settings.data_dir / "mnist"
    real = folder is not None and folder.is_dir()
    images = load(folder if real else None)
    trials, repeats = (3, 1) if settings.quick else (20, 3)
    cohorts = (25, 18) if settings.quick else (25, 18, 12)
    epsilons = (0.75, 3.0, 12.0) if settings.quick else EPSILONS
    rows: list[dict[str, Any]] = []
    for cohort in cohorts:
        some = epsilons[1:2] if settings.quick and cohort != 25 else epsilons
        rows += _arms(settings, images, cohort, some, trials, repeats)
    claims = _claims(rows, epsilons)
    squares = [heterogeneity(draw(images, np.random.default_rng(of(k)))[0]) for k in range(DRAWS)]
    if real:
        claims.append(_upsilon(squares))
    figure = settings.out / "isrl-mnist.png"
    _draw(rows, figure)
    return Outcome(
        claims,
        [figure],
        rows,
        [
            "silos are built as published: with replacement, so that an image may be in train and "
            "test of a silo and in several silos; no privacy of a person follows for that build",
            "as in the script, not in the paper: one K for all epsilons, that of the largest; the "
            "mean of the last eight iterates, for w_R; the mean of the errors of the runs at a "
            "step size, not the error of their mean w_R",
            "MB-SGD's step sizes act on the sum over silos, as in the script: they are M times the "
            "paper's on its mean",
            "PCA, bounds and step sizes are chosen on the data: outside every guarantee, as the "
            "paper says of its own (appendices I.1 and J.1)",
            f"{trials} trials, {repeats} run(s) at each step size; {len(images.x)} images, silos "
            f"of {images.silo_size}, upsilon_*^2 {np.mean(squares):.3f}",
            *([] if real else [NOTE.format(what="MNIST", instead="1,797 small digits")]),
        ],
        tried_of(
            f"25 silos of {images.silo_size} images, {ROUNDS} rounds, {trials} trials (paper: 20), "
            f"K = {images.batch}, the paper's at epsilon 18 only",
            False,
            {
                name: (steps, np.ones(1))
                for name, steps in step_sizes(25, _coarse(settings)).items()
            },
        ),
    )


Work = tuple[str, str, float, float, float]


def work(epsilons: tuple[float, ...], n: int = 1238, batch: int = 443) -> list[Work]:
    """What a trial trains: arm, algorithm, epsilon, noise multiplier, clip norm over max |x|."""
    noise: list[Work] = []
    for epsilon in epsilons:
        budget = Budget(epsilon, 1.0 / n**2)
        # The authors' L is twice the bound of a logistic gradient.
        for arm, scale in (("as_published", 2.0), ("paper_closed_form", 1.0), ("sound", 1.0)):
            z = silo_noise(budget, n, batch, ROUNDS, arm=arm).noise_multiplier  # type: ignore[arg-type]
            noise.append((arm, "minibatch", epsilon, z, scale))
        for arm, scale in (("as_published", 2.0), ("sound", 1.0)):
            z, _ = local_sgd_noise(budget, n, batch, ROUNDS, arm=arm)  # type: ignore[arg-type]
            noise.append((arm, "local", epsilon, z, scale))
    noise.append(("as_published", "minibatch", math.inf, 0.0, 2.0))
    noise.append(("as_published", "local", math.inf, 0.0, 2.0))
    return noise


def step_sizes(cohort: int, coarse: int) -> dict[str, np.ndarray]:
    """The paper's grids. MB-SGD of the authors' code sums over silos: its steps act M times larger.

    Args:
      cohort: M.
      coarse: every so many are tried.
    """
    return {
        "minibatch": np.exp(np.linspace(-6, 0, 10))[::coarse] * cohort,
        "local": np.exp(np.linspace(-8, -1, 10))[::coarse],
    }


def one_trial(
    images: Images, cohort: int, noise: list[Work], trial: int, repeats: int, coarse: int = 1
) -> Iterator[tuple[tuple[str, str, float], float]]:
    """Draws silos anew and yields the test error of each piece of work.

    Args:
      images: what silos are drawn from.
      cohort: M.
      noise: what is trained.
      trial: number of the draw.
      repeats: runs at each step size.
      coarse: of the step sizes every so many are tried.
    """
    steps = step_sizes(cohort, coarse)
    train, test, largest = draw(images, np.random.default_rng(of(trial)))
    task = Task(logistic, error_rate, train, test, (DIM,), ROUNDS, images.batch, cohort)
    for arm, algorithm, epsilon, multiplier, scale in noise:
        spec = Published() if arm == "as_published" else MessageSpec()
        error = best_over_steps(
            task,
            algorithm,
            spec,
            steps[algorithm],
            clips=np.array([scale * largest]),
            multiplier=multiplier,
            repeats=repeats,
            seed=trial,
        )
        yield (arm, algorithm, epsilon), error


def _coarse(settings: Settings) -> int:
    return 2 if settings.quick else 1  # every other step size


def _arms(
    settings: Settings,
    images: Images,
    cohort: int,
    epsilons: tuple[float, ...],
    trials: int,
    repeats: int,
) -> list[dict[str, Any]]:
    noise = work(epsilons, images.silo_size, images.batch)
    if settings.quick:  # what claims compare: the theorem's noise is in none
        noise = [w for w in noise if w[0] != "paper_closed_form"]
    if settings.quick and cohort != 25:
        noise = [w for w in noise if w[0] == "as_published" and math.isfinite(w[2])]
    coarse = _coarse(settings)
    found: dict[tuple[str, str, float], list[float]] = {}
    from rich.progress import Progress

    with Progress(console=settings.console) as progress:
        bar = progress.add_task(f"odd or even, M = {cohort}", total=trials * len(noise))
        for trial in range(trials):
            for key, value in one_trial(images, cohort, noise, trial, repeats, coarse):
                found.setdefault(key, []).append(value)
                progress.advance(bar)
    rows = []
    for (arm, algorithm, epsilon), values in found.items():
        mean, error = summary(values)
        rows.append(
            {
                "arm": arm,
                "algorithm": algorithm,
                "cohort": cohort,
                "epsilon": epsilon,
                "test_error": mean,
                "standard_error": error,
                "by_trial": values,
            }
        )
    return rows


def _claims(rows: list[dict[str, Any]], epsilons: tuple[float, ...]) -> list[Claim]:
    at = {(r["arm"], r["algorithm"], r["epsilon"], r["cohort"]): r["by_trial"] for r in rows}

    def errors(arm: str, algorithm: str, epsilon: float, cohort: int = 25) -> list[float]:
        return list(at[arm, algorithm, epsilon, cohort])

    top, least = max(epsilons), min(epsilons)
    claims = [
        less(
            f"ISRL-DP MB-SGD at epsilon {top:g} beats non-private local SGD",
            errors("as_published", "minibatch", top),
            errors("as_published", "local", math.inf),
            "test errors of the same draws",
            source="paper",
        )
    ]
    arms: tuple[tuple[str, Source], ...] = (("as_published", "paper"), ("sound", "ours"))
    for epsilon in epsilons:
        for arm, source in arms:
            claims.append(
                less(
                    f"{arm}, epsilon {epsilon:g}: MB-SGD is ahead of local SGD",
                    errors(arm, "minibatch", epsilon),
                    errors(arm, "local", epsilon),
                    source=source,
                )
            )
        claims.append(
            less(
                f"MB-SGD, epsilon {epsilon:g}: sound is more accurate than as published",
                errors("sound", "minibatch", epsilon),
                errors("as_published", "minibatch", epsilon),
                source="ours",
            )
        )
    claims += [
        less(
            f"figure 7, M = 18, epsilon {epsilon:g}: MB-SGD is ahead of local SGD, as published",
            errors("as_published", "minibatch", epsilon, 18),
            errors("as_published", "local", epsilon, 18),
            source="paper",
        )
        for epsilon in epsilons
        if ("as_published", "local", epsilon, 18) in at
    ]
    claims += [
        less(
            f"MB-SGD as published: the error at epsilon {high:g} is below that at {low:g}",
            errors("as_published", "minibatch", high),
            errors("as_published", "minibatch", low),
            source="ours",
        )
        for low, high in itertools.pairwise(sorted(epsilons))
    ]
    if any(r["cohort"] == 12 for r in rows):
        claims.append(
            less(
                f"as published, epsilon {least:g}: 25 silos in a round are better than 12",
                errors("as_published", "minibatch", least),
                errors("as_published", "minibatch", least, 12),
                source="ours",
            )
        )
    return claims


def _upsilon(squares: list[float]) -> Claim:
    """The claim about upsilon_*^2, which holds if 0.17 lies within the range of the draws."""
    low, high = min(squares), max(squares)
    return Claim(
        "heterogeneity at the minimiser, upsilon_*^2, is about 0.17 at most",
        f"{low:.3f} to {high:.3f}, {len(squares)} draws",
        "0.17, as the paper rounds it",
        low < 0.175 and high >= 0.165,
        "the smallest and the largest of draws of the silos, each from a seventh of the images",
        source="paper",
    )


def _draw(rows: list[dict[str, Any]], file: pathlib.Path) -> None:
    cohorts = sorted({r["cohort"] for r in rows}, reverse=True)
    with panel(file, 1, len(cohorts), size=(6 * len(cohorts), 4), squeeze=False) as axes:
        for ax, cohort in zip(axes[0], cohorts, strict=True):
            kinds = sorted({(r["arm"], r["algorithm"]) for r in rows})
            for arm, algorithm in kinds:
                part = [
                    r
                    for r in rows
                    if (r["arm"], r["algorithm"], r["cohort"]) == (arm, algorithm, cohort)
                    and math.isfinite(r["epsilon"])
                ]
                band(
                    ax,
                    *columns(part, "epsilon", "by_trial"),
                    marker="o" if algorithm == "minibatch" else "s",
                    linestyle={"sound": "-", "as_published": "--"}.get(arm, ":"),
                    label=f"{algorithm}, {arm}".replace("_", " "),
                )
            for r in rows:
                if r["cohort"] == cohort and math.isinf(r["epsilon"]):
                    style = "-" if r["algorithm"] == "minibatch" else "--"
                    name = f"{r['algorithm']}, not private"
                    ax.axhline(
                        r["test_error"], color="grey", linestyle=style, linewidth=0.8, label=name
                    )
            ticks(ax, sorted({r["epsilon"] for r in rows if math.isfinite(r["epsilon"])}))
            ax.set(xlabel="epsilon", ylabel="test error", title=f"M = {cohort} of 25")
