"""The algorithms of Lowy and Razaviyayn (2023), and a function that runs them over a schedule.

Noisy minibatch SGD is Algorithm 2 (for unbalanced silos Algorithm 7, with equal K_i / n_i).
Accelerated SGD is Algorithm 1 (AC-SA of Ghadimi and Lan 2012). Multi-stage accelerated SGD is
Appendix E.1, for strongly convex losses (Ghadimi and Lan 2013).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from dpfl_jax.accounting import NoiseLaw
from dpfl_jax.config.execution import Positive
from dpfl_jax.config.kinds import ISRL, Named
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.schedule import rows_for_use
from dpfl_jax.run.terms import traced_parts

Oracle = Callable[[jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Method:
    """An algorithm of the paper, as pure functions.

    Attributes:
      start: ``w_0 -> state``.
      step: ``(oracle, schedule row, state, values of the round) -> state``, where the oracle is
        ``(w, row) -> mean noisy gradient``.
      output: ``(state, rounds taken) -> w``.
      values: values of all rounds, such as step sizes: a pytree of arrays [R, ...].

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import isrl
      >>> steps, weights = jnp.full(20, 0.5), jnp.zeros(21)
      >>> method: isrl.Method = isrl.minibatch_sgd(steps, weights, project=lambda w: w)
      >>> method.rounds
      20
    """

    start: Callable[[jax.Array], Any]
    step: Callable[[Oracle, Any, Any, Any], Any]
    output: Callable[[Any, int], jax.Array]
    values: Any

    @property
    def rounds(self) -> int:
        """The number of rounds R, which is the leading axis of ``values``."""
        return jax.tree.leaves(self.values)[0].shape[0]

    def scan(self, oracle: Oracle, state: Any, rows: Any, values: Any) -> Any:
        """Returns the state after the rounds of ``rows`` and ``values``, by ``jax.lax.scan``."""

        def one(state: Any, x: Any) -> tuple[Any, None]:
            return self.step(oracle, x[0], state, x[1]), None

        return jax.lax.scan(one, state, (rows, values))[0]


def iterate(method: Method, oracle: Oracle, rows: Any, start: jax.Array) -> jax.Array:
    """Runs all rounds of an algorithm, and returns its output, an array like w_0.

    Args:
      method: algorithm with R rounds.
      oracle: ``(w, row) -> mean noisy gradient``.
      rows: R rounds of a schedule, from whose keys keys for this use are derived.
      start: starting point w_0.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import isrl
      >>> def oracle(w, row):  # the gradient of (w - 3)^2 / 2, without noise
      ...     return w - 3.0
      >>> steps = jnp.full(20, 0.5)
      >>> method = isrl.minibatch_sgd(steps, jnp.zeros(21), project=lambda w: w)
      >>> print(isrl.iterate(method, oracle, {"r": jnp.arange(20)}, jnp.zeros(1)).round(2))
      [2.71]
    """
    state = method.start(start)
    row, values = jax.tree.map(lambda x: x[0], (rows, method.values))
    use = traced_parts(lambda *given: method.step(oracle, *given), row, state, values)
    rows = rows_for_use(rows, start, method.values, *use)
    return method.output(method.scan(oracle, state, rows, method.values), method.rounds)


Project = Callable[[jax.Array], jax.Array]


def ball(radius: float | None) -> Project:
    """Returns the projection on the ball with this radius about 0; None: no constraint."""

    def project(w: jax.Array) -> jax.Array:
        if radius is None:
            return w
        norm = jnp.linalg.norm(w.ravel())
        return w * jnp.minimum(1.0, radius / jnp.maximum(norm, 1e-30))

    return project


class MinibatchState(NamedTuple):
    """The iterate w_r, the weighted mean of those before it, and the log of their weights' sum."""

    w: jax.Array
    mean: jax.Array
    log_total: jax.Array


def minibatch_sgd(step_sizes: jax.Array, log_weights: jax.Array, project: Project) -> Method:
    """Returns noisy minibatch SGD: w_{r+1} = project(w_r - eta_r g_r).

    Its output is the weighted mean of the iterates.

    Args:
      step_sizes: float [R], step sizes eta_r.
      log_weights: float [R+1], logarithms of the weights gamma_r of w_0 .. w_R. The paper does not
        count w_R (-inf). Logarithms, as gamma_r grows exponentially for strongly convex losses.
      project: projection on W.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import isrl
      >>> method = isrl.minibatch_sgd(jnp.full(20, 0.5), jnp.zeros(21), project=lambda w: w)
      >>> method.rounds
      20
    """

    def start(w: jax.Array) -> MinibatchState:
        return MinibatchState(w, w, jnp.asarray(-jnp.inf))

    def step(oracle: Oracle, row: Any, state: MinibatchState, x: Any) -> MinibatchState:
        eta, log_weight = x
        mean, log_total = _averaged(state, log_weight)
        return MinibatchState(project(state.w - eta * oracle(state.w, row)), mean, log_total)

    def output(state: MinibatchState, rounds: int) -> jax.Array:
        mean, log_total = _averaged(state, log_weights[rounds])
        # If only the last iterates count, the mean is empty before: then return the current one.
        return jnp.where(jnp.isneginf(log_total), state.w, mean)

    return Method(start, step, output, (step_sizes, log_weights[:-1]))


def _averaged(state: MinibatchState, log_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    grown = jnp.logaddexp(state.log_total, log_weight)
    share = jnp.where(jnp.isneginf(grown), 0.0, jnp.exp(log_weight - grown))
    return state.mean + share * (state.w - state.mean), grown


def uniform_weights(rounds: int) -> jax.Array:
    """Returns log weights [R+1] for gamma_r = 1/R, for convex losses."""
    return jnp.concatenate([jnp.zeros(rounds), jnp.full(1, -jnp.inf)])


def strongly_convex_weights(rounds: int, strong_convexity: float, step_size: float) -> jax.Array:
    """Returns log weights [R+1] for gamma_r = (1 - mu eta)^-(r+1) (Lemma D.5)."""
    rate = -jnp.log1p(-jnp.asarray(strong_convexity * step_size))
    return jnp.concatenate([rate * jnp.arange(1, rounds + 1), jnp.full(1, -jnp.inf)])


def last_weights(rounds: int, count: int = 1) -> jax.Array:
    """Returns log weights [R+1] for the mean of the last ``count`` iterates, w_R included."""
    return jnp.where(jnp.arange(rounds + 1) > rounds - count, 0.0, -jnp.inf)


def accelerated(
    alphas: jax.Array,
    prox_weights: jax.Array,
    strong_convexity: jax.Array | float,
    project: Project,
    begins: jax.Array | None = None,
) -> Method:
    """Returns accelerated SGD, whose state is (w, w^ag), and whose output is w_R^ag.

    Args:
      alphas: float [R], alpha_r.
      prox_weights: float [R], the paper's eta_r, which is an *inverse* step size.
      strong_convexity: mu of the loss; 0 if it is only convex.
      project: projection on W.
      begins: bool [R], whether a round begins a stage, from w^ag; None: there is only one stage.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> alphas, prox = isrl.step_weights(35, smoothness=1.0, variance=0.01, distance=2.0)
      >>> isrl.accelerated(alphas, prox, 0.0, project=lambda w: w).rounds
      35
    """
    mu = strong_convexity
    if begins is None:
        begins = jnp.zeros(len(alphas), bool)

    def step(oracle: Oracle, row: Any, state: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        (w, w_ag), (alpha, prox, begin) = state, x
        w = jnp.where(begin, w_ag, w)
        w_md = middle_point(w, w_ag, alpha, prox, mu)
        w = project(closed_form(oracle(w_md, row), w_md, w, alpha, prox, mu))
        return w, alpha * w + (1 - alpha) * w_ag

    return Method(
        lambda w: (w, w), step, lambda state, rounds: state[1], (alphas, prox_weights, begins)
    )


def middle_point(w: jax.Array, w_ag: jax.Array, alpha: Any, prox: Any, mu: Any) -> jax.Array:
    """Returns w^md, where the gradient is taken: a convex combination of w and w^ag."""
    whole = prox + (1 - alpha**2) * mu
    return ((1 - alpha) * (mu + prox) * w_ag + alpha * ((1 - alpha) * mu + prox) * w) / whole


def closed_form(
    gradient: jax.Array, w_md: jax.Array, w: jax.Array, alpha: Any, prox: Any, mu: Any
) -> jax.Array:
    """Returns argmin_v alpha (<g, v> + mu/2 |w_md - v|^2) + ((1-alpha) mu + prox)/2 |w - v|^2."""
    return (alpha * mu * w_md + ((1 - alpha) * mu + prox) * w - alpha * gradient) / (mu + prox)


def step_weights(
    rounds: int, smoothness: float, variance: float, distance: float
) -> tuple[jax.Array, jax.Array]:
    """Returns alpha_r = 2/(r+1) and prox weights 4 u / (r (r+1)), both float32 [R].

    The paper does not print the prox weights. u = max(2 beta, sqrt(2 V^2 R (R+1) (R+2) / (3
    D_0^2))) gives a risk of at most 2 u D_0^2 / (R (R+1)) + 4 V^2 (R+2) / (3 u), which is of order
    beta D^2/R^2 + V D / sqrt(R).

    Args:
      rounds: number of rounds R.
      smoothness: beta.
      variance: variance V^2 of the mean noisy gradient.
      distance: D_0 >= |w_0 - w*|.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> alphas, prox = isrl.step_weights(3, smoothness=1.0, variance=0.0, distance=1.0)
      >>> alphas.shape, float(alphas[0])
      ((3,), 1.0)
    """
    r = np.arange(1, rounds + 1, dtype=float)
    grown = 2 * variance * rounds * (rounds + 1) * (rounds + 2) / (3 * distance**2)
    scale = max(2 * smoothness, math.sqrt(grown))
    alphas, prox = 2 / (r + 1), 4 * scale / (r * (r + 1))
    return jnp.asarray(alphas, jnp.float32), jnp.asarray(prox, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of multi-stage SGD: a run of Algorithm 1 from where the stage before it ended.

    Attributes:
      rounds: number of rounds R_k.
      scale: u_k, for prox weights 4 u_k / (r (r+1)).

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> isrl.Stage(rounds=10, scale=2.0).rounds
      10
    """

    rounds: int
    scale: float


def stages(
    rounds: int,
    smoothness: float,
    strong_convexity: float,
    variance: float,
    gap: float,
    *,
    stage_constant: float = 1.0,
) -> list[Stage]:
    """Returns the stages that fit into R rounds.

    The last stage is lengthened to use all R rounds, because silos pay for them, and a longer stage
    has a better bound. If not even the first stage fits, it is cut to R rounds.

    The paper prints u_k with R_k (R_k+1) (R_k+2) in the denominator, so that u_k is always 2 beta.
    The paper's stage bound (D_0^2 <= 2 gap 2^-(k-1) / mu) puts it into the numerator, as here.

    Args:
      rounds: number of rounds R.
      smoothness: beta.
      strong_convexity: mu > 0.
      variance: variance V^2 of the mean noisy gradient.
      gap: Delta >= F(w_0) - F*.
      stage_constant: factor on the paper's constant 128/3, which is very conservative.

    Raises:
      BadInputError: mu is not positive.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> plan = isrl.stages(100, smoothness=2.0, strong_convexity=1.0, variance=0.1, gap=1.0)
      >>> sum(stage.rounds for stage in plan)
      100
    """
    if strong_convexity <= 0:
        raise BadInputError(
            "multi-stage needs a strongly convex loss (mu > 0): use the accelerated algorithm"
        )
    lengths: list[int] = []
    for k in range(1, 61):
        target = gap * 2.0**-k
        least = 4 * math.sqrt(2 * smoothness / strong_convexity)
        noise = stage_constant * 128 * variance / (3 * strong_convexity * target / 2)
        length = math.ceil(max(least, noise, 1.0))
        if sum(lengths) + length > rounds:
            break
        lengths.append(length)
    if lengths:
        lengths[-1] += rounds - sum(lengths)
    made = []
    for k, length in enumerate(lengths or [rounds]):
        cube = float(length) * (length + 1) * (length + 2)
        inner = strong_convexity * variance / (3 * gap * 2.0**-k) * cube
        made.append(Stage(length, max(2 * smoothness, math.sqrt(inner))))
    return made


def multi_stage(plan: Sequence[Stage], strong_convexity: float, project: Project) -> Method:
    """Returns multi-stage accelerated SGD, with stages over consecutive rounds of a schedule.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> plan = isrl.stages(100, smoothness=2.0, strong_convexity=1.0, variance=0.1, gap=1.0)
      >>> isrl.multi_stage(plan, strong_convexity=1.0, project=lambda w: w).rounds
      100
    """
    rounds = [np.arange(1, stage.rounds + 1, dtype=float) for stage in plan]
    alphas = np.concatenate([2 / (r + 1) for r in rounds])
    prox = np.concatenate([4 * s.scale / (r * (r + 1)) for s, r in zip(plan, rounds, strict=True)])
    return accelerated(
        jnp.asarray(alphas, jnp.float32),
        jnp.asarray(prox, jnp.float32),
        strong_convexity,
        project,
        jnp.asarray(np.concatenate([r == 1 for r in rounds])),
    )


# ---- as mechanisms of a configuration ------------------------------------------------------------
# Numbers that a theorem gives (rounds, steps, batches, smoothing, noise) may be left out. Numbers
# that could only be learned from private data are inputs with a default. The report lists where
# every number came from.

_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(gt=0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsrlMechanism(Named, abc.ABC, kinds=ISRL):
    """Options of all algorithms. An option that is left out follows from a theorem or a default.

    Attributes:
      sampling: poisson, full, or disjoint (one pass).
      arithmetic: how noise is drawn and added: exact (in integers) or float (float32).
      batch_fraction: K_i / n_i, the same in all silos.
      clip_norm: clip norm of a record's gradient; default: the loss's own bound.
      most_rounds: number of answers after which a silo stays silent; its noise is made for so many.
      distance: D_0 >= |w_0 - w*|; default: the radius.
      phi: standard deviation of a record's gradient in its silo; default: the clip norm.
      upsilon: heterogeneity of the silos' gradients; default: the clip norm if some silos are
        absent, else 0.
      gap: Delta >= F(w_0) - F*, for strongly convex losses; default: clip norm times D.
    """

    sampling: Literal["poisson", "full", "disjoint"] = "poisson"
    arithmetic: NoiseLaw = "exact"
    batch_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    clip_norm: Positive | None = None
    most_rounds: _Count | None = None
    distance: _Positive | None = None
    phi: _Positive | None = None
    upsilon: Annotated[float, Field(ge=0)] | None = None
    gap: _Positive | None = None

    def __post_init__(self) -> None:
        """Checks the types, and that full batches have no ``batch_fraction``."""
        super().__post_init__()
        if self.sampling == "full" and self.batch_fraction not in (None, 1.0):
            raise BadInputError(
                "mechanism.sampling=full takes all records: leave out mechanism.batch_fraction"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinibatchSGD(IsrlMechanism):
    """Noisy minibatch SGD (``minibatch_sgd``).

    Attributes:
      step_size: step size; default: by a theorem.
      average_last: number of last iterates whose mean is returned; default: weights by a theorem.
    """

    kind: ClassVar[str] = "minibatch_sgd"

    step_size: _Positive | None = None
    average_last: _Count | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerated(IsrlMechanism):
    """Accelerated noisy minibatch SGD (``accelerated``), with all step sizes by a theorem."""

    kind: ClassVar[str] = "accelerated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiStage(IsrlMechanism):
    """Multi-stage accelerated SGD (``multi_stage``); needs ``model.regularization``.

    Attributes:
      stage_constant: factor on the constant 128/3 of stage lengths, which is very conservative.
    """

    kind: ClassVar[str] = "multi_stage"

    stage_constant: _Positive = 1.0
