"""Every number of a run: from the configuration, from a theorem, or a stated default."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from dpfl_jax.accounting.closed_forms import isrl as closed
from dpfl_jax.config.isrl import IsrlConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl import theory
from dpfl_jax.federation.isrl.arms import Budget, SiloNoise, federation_noise
from dpfl_jax.federation.isrl.multi_stage import Stage, stages
from dpfl_jax.federation.isrl.runs.tasks import Task
from dpfl_jax.federation.isrl.schedule import participation_law

MOST_ROUNDS = 200_000


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What runs.

    Attributes:
      rounds: R.
      batches: float64 [N], K_i.
      clip_norms: float64 [N] (with weights p_i the message is scaled by N p_i after its noise).
      noise: of every silo; None without privacy.
      step_size: of minibatch SGD.
      variance: V^2 of the mean noisy gradient, a bound.
      smoothness: beta of the objective, regulariser included.
      distance: D_0.
      stages: of multi-stage.
      sources: name -> (value, where it came from), for the report.
    """

    rounds: int
    batches: np.ndarray
    clip_norms: np.ndarray
    noise: list[SiloNoise] | None
    step_size: float
    variance: float
    smoothness: float
    distance: float
    stages: list[Stage]
    sources: dict[str, tuple[Any, str]]

    @property
    def stddevs(self) -> np.ndarray:
        """float64 [N], of each silo's noise on its sum."""
        if self.noise is None:
            return np.zeros(len(self.clip_norms))
        return np.array([z.noise_multiplier for z in self.noise]) * self.clip_norms


def effective_silos(available: int | dict[int, float] | None, silos: int) -> float:
    """M of the theorems: 1/M = E[1/M_r]."""
    return 1.0 / sum(p / m for m, p in participation_law(available, silos).items())


def budgets(config: IsrlConfig, sizes: np.ndarray) -> list[Budget] | None:
    """What each silo grants; None for a baseline."""
    privacy = config.privacy
    if privacy.epsilon is None:
        return None
    epsilons = np.broadcast_to(np.asarray(privacy.epsilon, float), sizes.shape)
    deltas = (
        1.0 / sizes.astype(float) ** 2
        if privacy.delta is None
        else np.broadcast_to(np.asarray(privacy.delta, float), sizes.shape)
    )
    return [Budget(float(e), float(d)) for e, d in zip(epsilons, deltas, strict=True)]


def smoothing(config: IsrlConfig, sizes: np.ndarray, dim: int, lipschitz: float) -> float:
    """Smoothness of the Moreau envelope by section 2 (SCO for one pass) and Theorem F.2 (ERM)."""
    facts = _Facts.of(config, sizes, dim)
    mu, diameter = config.model.regularization, 2 * config.model.radius
    short: dict[str, Any] = facts.common(dim)
    if config.isrl.sampling == "disjoint":
        if mu:
            return theory.smoothing_strongly_convex_sco(mu, delta=facts.delta, **short)
        return theory.smoothing_convex_sco(lipschitz, diameter, delta=facts.delta, **short)
    if mu:
        return theory.smoothing_strongly_convex_erm(mu, **short)
    return theory.smoothing_convex_erm(lipschitz, diameter, **short)


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The smallest silo and the tightest budget, for which the theorems are asked."""

    n: float
    cohort: float
    epsilon: float
    delta: float

    @classmethod
    def of(cls, config: IsrlConfig, sizes: np.ndarray, dim: int) -> _Facts:
        granted = budgets(config, sizes)
        n, cohort = float(sizes.min()), effective_silos(config.isrl.available, len(sizes))
        if granted is None:  # so much that privacy costs nothing
            return cls(n, cohort, 1e3 * math.sqrt(dim), 1.0 / n**2 if n > 1 else 0.5)
        return cls(n, cohort, min(b.epsilon for b in granted), min(b.delta for b in granted))

    def common(self, dim: int) -> dict[str, Any]:
        """Arguments that most theorems take."""
        return {"n": self.n, "silos": self.cohort, "dim": dim, "epsilon": self.epsilon}


def choose(config: IsrlConfig, task: Task, sizes: np.ndarray) -> Parameters:
    """Fills in what the configuration leaves out, and calibrates.

    Raises:
      BadInputError: numbers outside a theorem's or a mechanism's range.
    """
    section, model = config.isrl, config.model
    silos, dim, mu = len(sizes), task.dim, model.regularization
    facts = _Facts.of(config, sizes, dim)
    diameter = 2 * model.radius
    told: dict[str, tuple[Any, str]] = {}

    def pick(name: str, given: Any, default: Any, why: str) -> Any:
        told[name] = (given, "configuration") if given is not None else (default, why)
        return told[name][0]

    clip = pick("clip_norm", section.clip_norm, task.lipschitz, f"bound of the {task.kind} loss")
    # f_i is weighted by N p_i (Appendix H).
    shares = np.ones(silos)
    if section.silo_weights is not None:
        shares = silos * np.asarray(section.silo_weights)
    lipschitz = float(clip * shares.max()) + mu * model.radius
    beta = float(task.smoothness * shares.max()) + mu
    told["smoothness"] = (beta, f"of the {task.kind} loss, regulariser included")
    distance = pick("distance", section.distance, model.radius, "the radius of W")
    phi = pick("phi", section.phi, lipschitz, "its largest value, the Lipschitz bound")
    absent = facts.cohort < silos
    upsilon = pick(
        "upsilon",
        section.upsilon,
        lipschitz if absent else 0.0,
        "its largest value, the Lipschitz bound" if absent else "all silos answer",
    )
    gap = pick("gap", section.gap, lipschitz * diameter, "L D")
    common: dict[str, Any] = facts.common(dim)

    share, batches = _batches(config, task, sizes, facts, lipschitz, beta, gap, phi, told)
    if section.sampling == "disjoint":
        fits = int((sizes // batches).max())
        rounds = pick("rounds", section.rounds, fits, "one pass: floor(n / K)")
        if rounds > fits and not absent:
            raise BadInputError(
                f"isrl.rounds is {rounds}, but one pass over {int(sizes.max())} records in batches "
                f"of {int(batches.max())} has {fits}: lower isrl.rounds or isrl.batch_fraction"
            )
    elif section.rounds is not None:
        rounds = pick("rounds", section.rounds, None, "")
    else:
        rounds, why = _theory_rounds(
            config, facts, lipschitz, beta, gap, dim, silos, share * facts.n
        )
        rounds = pick("rounds", None, rounds, why)
    if rounds > MOST_ROUNDS:
        raise BadInputError(
            f"{told['rounds'][1]} asks for {rounds} rounds, more than {MOST_ROUNDS}: give "
            "isrl.rounds"
        )

    granted, noise = budgets(config, sizes), None
    cap = min(rounds, section.most_rounds or rounds)
    if granted is not None:
        if section.arm == "paper_closed_form" and section.sampling != "disjoint":
            _check_least_batch(granted, sizes, batches, cap)
        noise = federation_noise(
            granted,
            [int(n) for n in sizes],
            [float(k) for k in batches],
            cap,
            arm=section.arm,
            sampling=section.sampling,
        )
    multipliers = np.zeros(silos) if noise is None else [z.noise_multiplier for z in noise]
    # Root mean square over silos of the noise of a message, weights included.
    sigma = math.sqrt(float(np.mean((np.asarray(multipliers) * clip * shares / batches) ** 2)))
    if section.sampling == "disjoint":
        variance = theory.variance_sco(
            phi,
            upsilon,
            batch=float(batches.min()),
            silos=facts.cohort,
            num_silos=silos,
            dim=dim,
            sigma=sigma,
        )
        why = "Lemma E.3"
    else:
        variance = theory.variance_erm(
            lipschitz,
            batch=float(batches.min()),
            n=facts.n,
            silos=facts.cohort,
            num_silos=silos,
            dim=dim,
            sigma=sigma,
        )
        why = "Appendix F.1"
    told["variance"] = (variance, why)
    step, plan = 0.0, []
    if section.algorithm == "minibatch_sgd":
        theirs = (
            theory.minibatch_step_strongly_convex(
                rounds, beta, mu, lipschitz, diameter, silos=facts.cohort, dim=dim, sigma=sigma
            )
            if mu
            else theory.minibatch_step_convex(rounds, beta, lipschitz, diameter, **common)
        )
        step = pick(
            "step_size", section.step_size, theirs, "Lemma D.5" if mu else "Theorem 2.1 (D.1)"
        )
    elif section.algorithm == "multi_stage":
        plan = stages(rounds, beta, mu, variance, gap, stage_constant=section.stage_constant)
        told["stages"] = ([s.rounds for s in plan], "Appendix E.1, the last up to isrl.rounds")
    return Parameters(
        rounds,
        batches,
        np.full(silos, float(clip)),
        noise,
        step,
        variance,
        beta,
        distance,
        plan,
        told,
    )


def _batches(
    config: IsrlConfig,
    task: Task,
    sizes: np.ndarray,
    facts: _Facts,
    lipschitz: float,
    beta: float,
    gap: float,
    phi: float,
    told: dict[str, tuple[Any, str]],
) -> tuple[float, np.ndarray]:
    """The share K_i / n_i, alike in all silos, and K_i."""
    section, mu = config.isrl, config.model.regularization
    if section.sampling == "full":
        share, why = 1.0, "all records"
    elif section.batch_fraction is not None:
        share, why = section.batch_fraction, "configuration"
    elif section.sampling == "disjoint":
        facts_: dict[str, Any] = {
            "n": facts.n,
            "silos": facts.cohort,
            "dim": task.dim,
            "epsilon": facts.epsilon,
            "delta": facts.delta,
        }
        if mu:
            batch = theory.one_pass_batch_strongly_convex(beta, mu, lipschitz, gap, phi, **facts_)
        else:
            diameter = 2 * config.model.radius
            batch = theory.one_pass_batch_convex(beta, lipschitz, diameter, **facts_)
        share, why = batch / facts.n, "Theorem 3.1"
    else:
        share, why = 0.25, "default"
    # Draws are whole records, except for Poisson sampling, whose K is an expectation.
    batches = share * sizes if section.sampling == "poisson" else np.round(share * sizes)
    batches = np.clip(batches, 1.0, sizes).astype(float)
    told["batch_fraction"] = (share, why)
    least, most = float(batches.min()), float(batches.max())
    told["batch"] = (least if least == most else [least, most], "share of each silo's records")
    return share, batches


def _theory_rounds(
    config: IsrlConfig,
    facts: _Facts,
    lipschitz: float,
    beta: float,
    gap: float,
    dim: int,
    silos: int,
    batch: float,
) -> tuple[int, str]:
    mu, diameter = config.model.regularization, 2 * config.model.radius
    common: dict[str, Any] = facts.common(dim)
    if config.isrl.algorithm == "minibatch_sgd":
        if mu:
            rounds = theory.minibatch_rounds_strongly_convex(
                beta, mu, lipschitz, diameter, **common
            )
            return rounds, "Theorem 2.1, strongly convex"
        rounds = theory.minibatch_rounds_convex(beta, lipschitz, diameter, **common)
        return rounds, "Theorem 2.1, convex"
    more = common | {"delta": facts.delta, "batch": batch, "num_silos": silos}
    if mu:
        rounds = theory.accelerated_rounds_strongly_convex(beta, mu, lipschitz, gap, **more)
        if config.isrl.algorithm == "multi_stage":
            # Never so few that not even the first stage fits.
            rounds = max(rounds, math.ceil(4 * math.sqrt(2 * beta / mu)))
        return rounds, "Theorem 4.1, strongly convex"
    return theory.accelerated_rounds_convex(beta, lipschitz, diameter, **more), "Theorem 4.1"


def _check_least_batch(
    granted: list[Budget], sizes: np.ndarray, batches: np.ndarray, rounds: int
) -> None:
    for i, budget in enumerate(granted):
        least = closed.minibatch_least_batch(rounds, int(sizes[i]), budget.epsilon, budget.delta)
        if batches[i] < least:
            raise BadInputError(
                f"Theorem D.1 holds for local batches of at least {least:.1f} of the "
                f"{int(sizes[i])} records of silo {i}, but isrl.batch_fraction gives "
                f"{batches[i]:.1f}: raise it, or use isrl.arm=sound"
            )
