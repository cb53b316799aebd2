"""A scaling law of private training: held-out loss by steps, noise, learning rate and model size.

Privacy, batch and group size affect a run through one number, the effective noise-to-batch ratio
rho, which adds up the noise of the mechanism and that of sampling:

    rho^2 = L(G)^(2 gamma) (ratio^2 + kappa / size)

``ratio`` is the noise on the averaged gradient over the clip norm. L(G) is the typical gradient
norm of a unit, which matters because clipping to one norm scales the signal. The log loss is
modelled as a function of log T and log rho, and of log learning rate and log model size where these
vary: a plane plus a Gaussian process. kappa, gamma and the process's scales are fitted; the band is
the process's posterior. (McKenna et al. 2025, arXiv 2501.18914, also interpolate a table of runs
without accounting over noise-to-batch ratio and steps, for each model.)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize

from dpfl_jax.errors import BadInputError
from dpfl_jax.files import on_disk
from dpfl_jax.planning.estimates import Sensitivities

VERSION = 1
FEWEST = 8
_PLANE = 100.0  # prior variance of the plane's coefficients: so large that the prior hardly counts
# Normal priors of the fitted parameters, in this order: logs of the variances of process and noise,
# log of kappa over its guess, gamma, and logs of length scales.
_MEAN, _SD = (math.log(0.3), math.log(2e-4), 0.0, 1.0), (1.5, 1.0, 2.0, 0.3)
_LENGTH = {False: (math.log(2.0), 0.7), True: (math.log(8.0), 0.7)}  # True: of model size
_RATE, _SIZE = 4, 5  # columns, see _columns
Cell = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """A fitted scaling law, from ``fit_scaling_law`` or ``load``.

    Attributes:
      rows: the runs: ``kind``, ``group_size``, ``size``, ``steps``, ``ratio``, ``rate``, ``loss``.
      sensitivities: typical gradient norms of the data that the runs used.
      fitted: fitted parameters, in the order of ``_MEAN``.
      about: model and configuration of the runs, as plain JSON.
      parameters: number of parameters of the model to predict for, if the runs have models of
        several sizes (``join_scaling_laws``).
    """

    rows: Sequence[Cell]
    sensitivities: Sensitivities
    fitted: tuple[float, ...]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parameters: float | None = None

    @property
    def rates(self) -> list[float]:
        """The factors on the configuration's learning rate that were tried."""
        return sorted({row["rate"] for row in self.rows})

    def predict(self, cells: Sequence[Cell]) -> list[dict[str, float]]:
        """Predicts the loss of a run of each cell.

        Args:
          cells: ``kind``, ``group_size``, ``size``, ``steps`` and ``ratio``; optionally ``rate``
            (default: the best of those tried) and ``parameters`` (default: the law's).

        Returns:
          For each cell ``loss``, its band from ``low`` to ``high`` (90 % of runs), ``rate``, and
          ``outside``: the factor by which steps or noise lie beyond what was tried (1: within).
        """
        asked = [
            [{**cell, "rate": rate} for rate in ([cell["rate"]] if "rate" in cell else self.rates)]
            for cell in cells
        ]
        size = {} if self.parameters is None else {"parameters": self.parameters}
        cells = [size | cell for some in asked for cell in some]
        flat = self._features(_columns(cells, self.sensitivities))
        mean, sd = self._posterior(flat)
        # Student's t, because the scales were fitted to the same runs.
        wide = stats.t.ppf(0.95, max(2, len(self.rows) - len(self.fitted)))
        known = self._known[0][:, :2]
        beyond = np.maximum(known.min(axis=0) - flat[:, :2], flat[:, :2] - known.max(axis=0))
        outside = np.exp(np.maximum(beyond, 0.0).max(axis=1))
        predictions, first = [], 0
        for some in asked:
            i = first + int(np.argmin(mean[first : first + len(some)]))
            losses = np.exp(mean[i] + sd[i] * np.array([0.0, -wide, wide]))
            named = dict(zip(("loss", "low", "high"), losses.tolist()))
            rate = some[i - first]["rate"]
            predictions.append({**named, "rate": rate, "outside": round(float(outside[i]), 3)})
            first += len(some)
        return predictions

    def ratio_for(self, loss: float, cell: Cell) -> float:
        """Returns the largest noise-to-batch ratio at which a cell reaches a loss, or 0."""
        low, high = 1e-7, 1e3
        if self.predict([{**cell, "ratio": low}])[0]["loss"] > loss:
            return 0.0
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            reached = self.predict([{**cell, "ratio": middle}])[0]["loss"] <= loss
            low, high = (middle, high) if reached else (low, middle)
        return low

    @functools.cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray, float, Any]:
        features = self._features(_columns(self.rows, self.sensitivities))
        target = np.log([row["loss"] for row in self.rows])
        factor = _factor(features, self.fitted)
        return features, target - target.mean(), float(target.mean()), factor

    @functools.cached_property
    def _guess(self) -> float:
        return _guess(_columns(self.rows, self.sensitivities))

    def _features(self, columns: np.ndarray) -> np.ndarray:
        return _features(columns, self._guess, self.fitted, _varied(self.rows))

    def _posterior(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the log loss of one run, including its own scatter."""
        known, target, centre, factor = self._known
        cross = _kernel(features, known, self.fitted)
        prior = _PLANE * (1 + (features**2).sum(axis=1)) + math.exp(self.fitted[0])
        variance = prior - (cross * cho_solve(factor, cross.T).T).sum(axis=1)
        noise = math.exp(self.fitted[1])
        return (
            centre + cross @ cho_solve(factor, target),
            np.sqrt(np.maximum(variance, 0.0) + noise),
        )

    # ---- files ---------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the law to a JSON file."""
        content = {"version": VERSION, **dataclasses.asdict(self)}
        file = on_disk(file)
        try:
            file.write_text(json.dumps(content, indent=1))
        except OSError as error:
            raise BadInputError(f"cannot write {file}: {error.strerror}") from error

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> ScalingLaw:
        """Reads a file that ``save`` wrote.

        Raises:
          BadInputError: the file cannot be read, or is not such a file.
        """
        file = on_disk(file)
        try:
            content = json.loads(file.read_text())
            version = content.pop("version")
            norms = content.pop("sensitivities")
            for name in ("user", "intervals"):
                norms[name] = {int(group): value for group, value in norms[name].items()}
            fitted = tuple(content.pop("fitted"))
            law = cls(sensitivities=Sensitivities(**norms), fitted=fitted, **content)
        except OSError as error:
            raise BadInputError(f"cannot read the fit {file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInputError(
                f"{file} is not a fit: make one with dpfl plan CONFIG --fit FILE"
            ) from error
        if version != VERSION:
            raise BadInputError(
                f"{file} was written by another version: make it again with dpfl plan CONFIG --fit "
                "FILE"
            )
        return law


def fit_scaling_law(
    rows: Sequence[Cell], sensitivities: Sensitivities, about: Mapping[str, Any] | None = None
) -> ScalingLaw:
    """Fits a scaling law to proxy runs, by maximum a posteriori.

    Args:
      rows: rows of ``proxy.run_trials``; those without a finite loss are ignored.
      sensitivities: typical gradient norms of the proxy's data.
      about: stored with the fit, as plain JSON.

    Raises:
      BadInputError: there are too few runs, or all have one number of steps or one size of noise.
    """
    finite = [row for row in rows if row["loss"] is not None]
    if len(finite) < FEWEST or any(len({r[k] for r in finite}) < 2 for k in ("steps", "ratio")):
        raise BadInputError(
            f"{len(finite)} runs with a finite loss are too few to fit from: at least {FEWEST}, of "
            "several numbers of steps and sizes of noise"
        )
    varied = _varied(finite)
    lengths = [_LENGTH[False]] * 2 + [_LENGTH[column == _SIZE] for column in varied]
    mean = np.array([*_MEAN, *[length for length, _ in lengths]])
    deviation = np.array([*_SD, *[width for _, width in lengths]])
    target = np.log([row["loss"] for row in finite])
    target = target - target.mean()
    columns = _columns(finite, sensitivities)
    guess = _guess(columns)

    def cost(parameters: np.ndarray) -> float:
        given = tuple(parameters)
        factor = _factor(_features(columns, guess, given, varied), given)
        white = solve_triangular(factor[0], target, lower=True)
        prior = (((parameters - mean) / deviation) ** 2).sum()
        return float(0.5 * (white @ white + prior) + np.log(np.diag(factor[0])).sum())

    # Central differences: with one-sided ones, rounding errors stop the search too early.
    bounds = list(zip(mean - 3 * deviation, mean + 3 * deviation))
    best = minimize(cost, mean, method="L-BFGS-B", jac="3-point", bounds=bounds)
    return ScalingLaw(finite, sensitivities, tuple(map(float, best.x)), dict(about or {}))


def join_scaling_laws(laws: Sequence[ScalingLaw]) -> ScalingLaw:
    """Fits one law over model size to the runs of several laws, each for one size.

    Gradient norms depend on the model, so that they enter relative to an example's norm. ``about``
    of the result lists ``sizes``: (parameters, FLOPs of a gradient evaluation), smallest first.

    Raises:
      BadInputError: there are fewer than two sizes, or a law does not state its size.
    """
    sizes = {law.about.get("parameters"): law.about.get("flops_per_gradient") for law in laws}
    if len(sizes) < 2 or any(not both for pair in sizes.items() for both in pair):
        raise BadInputError(
            "a law over model size needs fits of two transformers of different sizes or more: make "
            "each with dpfl plan CONFIG --fit and overrides such as model.size=small"
        )
    groups = set.intersection(*(set(law.sensitivities.user) for law in laws))
    user = {
        g: math.exp(np.mean([math.log(law.sensitivities.at(g) / law.sensitivities.example)
                             for law in laws]))
        for g in sorted(groups)
    }  # fmt: skip
    rows = [{**row, "parameters": law.about["parameters"]} for law in laws for row in law.rows]
    norms = Sensitivities(1.0, user, {}, "of several model sizes, relative to an example's")
    about = {"initial": min(law.about["initial"] for law in laws), "sizes": sorted(sizes.items())}
    return fit_scaling_law(rows, norms, about)


def _columns(cells: Sequence[Cell], norms: Sensitivities) -> np.ndarray:
    """float [n, 6]: log gradient norm, ratio^2, 1 / size, logs of steps, rate and parameters."""
    return np.array(
        [
            (
                math.log(norms.norm(cell["kind"], cell["group_size"])),
                cell["ratio"] ** 2,
                1.0 / cell["size"],
                math.log(cell["steps"]),
                math.log(cell["rate"]),
                math.log(cell.get("parameters", 1.0)),
            )
            for cell in cells
        ]
    )


def _varied(rows: Sequence[Cell]) -> list[int]:
    """The columns among rate and parameters in which the runs differ."""
    names = {_RATE: "rate", _SIZE: "parameters"}
    return [i for i, name in names.items() if len({row.get(name, 1.0) for row in rows}) > 1]


def _features(
    columns: np.ndarray, guess: float, fitted: Sequence[float], varied: list[int]
) -> np.ndarray:
    """float [n, 2 to 4]: logs of steps, of effective noise-to-batch ratio, and of ``varied``."""
    norm, squared, inverse, steps = columns.T[:4]
    kappa, gamma = guess * math.exp(fitted[2]), fitted[3]
    rho = gamma * norm + 0.5 * np.log(squared + kappa * inverse)
    return np.stack([steps, rho, *columns.T[varied]], axis=1)


def _guess(columns: np.ndarray) -> float:
    """The kappa with which noise and sampling count the same in the median run."""
    return float(np.median(columns[:, 1] / columns[:, 2])) + 1e-12


def _kernel(a: np.ndarray, b: np.ndarray, fitted: Sequence[float]) -> np.ndarray:
    scaled = (a[:, None, :] - b[None, :, :]) / np.exp(fitted[len(_MEAN) :])
    process = math.exp(fitted[0]) * np.exp(-0.5 * (scaled**2).sum(axis=-1))
    return _PLANE * (1 + a @ b.T) + process


def _factor(features: np.ndarray, fitted: Sequence[float]) -> Any:
    noise = (math.exp(fitted[1]) + 1e-9) * np.eye(len(features))
    return cho_factor(_kernel(features, features, fitted) + noise, lower=True)
