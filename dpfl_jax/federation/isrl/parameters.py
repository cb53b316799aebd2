"""The parameters of an ISRL run: from the configuration, from a theorem, or a default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpfl_jax.accounting import NoiseLaw
from dpfl_jax.config import RunConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl import theory
from dpfl_jax.federation.isrl.algorithms import Stage, stages
from dpfl_jax.federation.isrl.losses import LinearLoss
from dpfl_jax.federation.isrl.privacy import Budget, SiloNoise, federation_noise
from dpfl_jax.federation.isrl.schedule import participation_law
from dpfl_jax.federation.isrl.theory import Problem

MOST_ROUNDS = 200_000


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of an ISRL run.

    Attributes:
      problem: the problem that theorems are applied to, with the regulariser.
      rounds: number of rounds R.
      batches: float64 [N], expected batch sizes K_i.
      clip_norms: float64 [N], clip norms of silos. (With weights p_i, messages are scaled by N p_i
        after noise was added.)
      noise: noise of every silo; None without privacy.
      step_size: step size of minibatch SGD.
      variance: bound on the variance V^2 of the mean noisy gradient.
      distance: D_0 >= |w_0 - w*|.
      stages: stages of multi-stage SGD.
      sources: name -> (value, where it came from), for the report.
    """

    problem: Problem
    rounds: int
    batches: np.ndarray
    clip_norms: np.ndarray
    noise: list[SiloNoise] | None
    step_size: float
    variance: float
    distance: float
    stages: list[Stage]
    sources: dict[str, tuple[Any, str]]

    @property
    def stddevs(self) -> np.ndarray:
        """Standard deviation of the noise on each silo's sum, float64 [N]."""
        if self.noise is None:
            return np.zeros(len(self.clip_norms))
        return np.array([z.noise_multiplier for z in self.noise]) * self.clip_norms

    def with_noise(
        self, multipliers: Sequence[float] | None, law: NoiseLaw | None = None
    ) -> Parameters:
        """Returns a copy with these noise multipliers, one per silo.

        Args:
          multipliers: noise multipliers of a run that resumes, or of a plan; None: unchanged.
          law: how noise is drawn, ``"exact"`` or ``"float"``; None: unchanged.
        """
        if self.noise is None or multipliers is None:
            return self
        noise = [
            dataclasses.replace(z, noise_multiplier=float(m), noise=law or z.noise)
            for z, m in zip(self.noise, multipliers, strict=True)
        ]
        return dataclasses.replace(self, noise=noise)


def effective_silos(available: int | dict[int, float] | None, silos: int) -> float:
    """Returns M of the theorems, where 1/M = E[1/M_r] and M_r silos answer in round r."""
    return 1.0 / sum(p / m for m, p in participation_law(available, silos).items())


def budgets(config: RunConfig, sizes: np.ndarray) -> list[Budget] | None:
    """Returns the budget of each silo; None for a baseline."""
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


def check_noise(config: RunConfig, sizes: np.ndarray, parameters: Parameters) -> None:
    """Checks the noise that each silo adds against that silo's budget.

    Raises:
      BadInputError: it was made for another budget, silo or batch; the message names the silo.
    """
    granted, noise = budgets(config, sizes), parameters.noise
    if granted is None or noise is None:
        return
    facts = zip(granted, sizes.tolist(), parameters.batches.tolist(), strict=True)
    for i, (z, wanted) in enumerate(zip(noise, facts, strict=True)):
        if (z.budget, z.silo_size, z.batch) != wanted:
            raise BadInputError(
                f"silo {i} grants epsilon {wanted[0].epsilon:g} on {wanted[1]} records, with "
                f"{wanted[2]:g} in a batch, but its noise was made for a silo that grants "
                f"{z.budget.epsilon:g} on {z.silo_size} records, with {z.batch:g} in a batch: give "
                "each silo its own noise"
            )


def smoothing(config: RunConfig, sizes: np.ndarray, dim: int, lipschitz: float) -> float:
    """Returns beta of the Moreau envelope, by section 2 for one pass, else by Theorem F.2."""
    one_pass = config.mechanism.sampling == "disjoint"
    smooth = theory.smoothing_sco if one_pass else theory.smoothing_erm
    return smooth(_problem(config, sizes, dim, lipschitz))


def _problem(
    config: RunConfig, sizes: np.ndarray, dim: int, lipschitz: float, **known: float
) -> Problem:
    """The problem that theorems are applied to, with the smallest silo and the tightest budget."""
    granted, n = budgets(config, sizes), float(sizes.min())
    if granted is None:  # a budget so large that privacy costs nothing
        budget = Budget(1e3 * math.sqrt(dim), 1.0 / n**2 if n > 1 else 0.5)
    else:
        budget = Budget(min(b.epsilon for b in granted), min(b.delta for b in granted))
    return Problem(
        lipschitz=lipschitz,
        diameter=2 * config.model.radius,
        dim=dim,
        silos=len(sizes),
        silo_size=n,
        budget=budget,
        cohort=effective_silos(config.federation.answering, len(sizes)),
        strong_convexity=config.model.regularization,
        **known,
    )


def choose(config: RunConfig, loss: LinearLoss, sizes: np.ndarray) -> Parameters:
    """Returns all numbers of a run: fills in what the configuration leaves out, and calibrates.

    Args:
      config: the configuration.
      loss: its loss.
      sizes: int [N], number of records of each silo.

    Raises:
      BadInputError: a number is outside the range of a theorem or a mechanism.
    """
    section, federation, model = config.mechanism, config.federation, config.model
    silos, mu = len(sizes), model.regularization
    sources: dict[str, tuple[Any, str]] = {}

    def pick(name: str, given: Any, default: Any, why: str) -> Any:
        sources[name] = (given, "configuration") if given is not None else (default, why)
        return sources[name][0]

    clip = pick("clip_norm", section.clip_norm, loss.lipschitz, f"bound of the {loss.kind} loss")
    # f_i is weighted by N p_i (Appendix H).
    shares = np.ones(silos)
    if federation.weights is not None:
        shares = silos * np.asarray(federation.weights)
    lipschitz = float(clip * shares.max()) + mu * model.radius
    beta = float(loss.smoothness * shares.max()) + mu
    sources["smoothness"] = (beta, f"of the {loss.kind} loss, regulariser included")
    distance = pick("distance", section.distance, model.radius, "the radius of W")
    phi = pick("phi", section.phi, lipschitz, "its largest value, the Lipschitz bound")
    absent = effective_silos(federation.answering, silos) < silos
    upsilon = pick(
        "upsilon",
        section.upsilon,
        lipschitz if absent else 0.0,
        "its largest value, the Lipschitz bound" if absent else "all silos answer",
    )
    gap = pick("gap", section.gap, lipschitz * 2 * model.radius, "L D")
    problem = _problem(
        config, sizes, loss.dim, lipschitz, smoothness=beta, phi=phi, upsilon=upsilon, gap=gap
    )

    share, batches = _batches(config, problem, sizes, sources)
    if section.sampling == "disjoint":
        fits = int((sizes // batches).max())
        rounds = pick("rounds", federation.rounds, fits, "one pass: floor(n / K)")
        if rounds > fits and not absent:
            raise BadInputError(
                f"federation.rounds is {rounds}, but one pass over {int(sizes.max())} records in "
                f"batches of {int(batches.max())} has {fits}: lower federation.rounds or "
                "mechanism.batch_fraction"
            )
    elif federation.rounds is not None:
        rounds = pick("rounds", federation.rounds, None, "")
    else:
        batch = share * problem.silo_size
        rounds = pick("rounds", None, *_rounds_by_theorem(section.kind, problem, batch))
    if rounds > MOST_ROUNDS:
        raise BadInputError(
            f"{sources['rounds'][1]} asks for {rounds} rounds, more than {MOST_ROUNDS}: set "
            "federation.rounds"
        )

    granted, noise = budgets(config, sizes), None
    cap = min(rounds, section.most_rounds or rounds)
    if granted is not None:
        noise = federation_noise(
            granted, sizes.tolist(), batches.tolist(), cap, sampling=section.sampling
        )
    multipliers = np.zeros(silos) if noise is None else [z.noise_multiplier for z in noise]
    # The noise of a message: root mean square over silos, with weights.
    sigma = math.sqrt(float(np.mean((np.asarray(multipliers) * clip * shares / batches) ** 2)))
    if section.sampling == "disjoint":
        variance = theory.variance_sco(problem, float(batches.min()), sigma)
        sources["variance"] = (variance, "Lemma E.3")
    else:
        variance = theory.variance_erm(problem, float(batches.min()), sigma)
        sources["variance"] = (variance, "Appendix F.1")
    step, plan = 0.0, []
    if section.kind == "minibatch_sgd":
        step = pick(
            "step_size",
            section.step_size,
            theory.minibatch_step(problem, rounds, sigma),
            "Lemma D.5" if mu else "Theorem 2.1 (D.1)",
        )
    elif section.kind == "multi_stage":
        plan = stages(rounds, beta, mu, variance, gap, stage_constant=section.stage_constant)
        why = "Appendix E.1, the last up to federation.rounds"
        sources["stages"] = ([s.rounds for s in plan], why)
    clip_norms = np.full(silos, float(clip))
    return Parameters(
        problem, rounds, batches, clip_norms, noise, step, variance, distance, plan, sources
    )


def _batches(
    config: RunConfig, problem: Problem, sizes: np.ndarray, sources: dict[str, tuple[Any, str]]
) -> tuple[float, np.ndarray]:
    """The share K_i / n_i, which is the same in all silos, and all K_i."""
    section = config.mechanism
    if section.sampling == "full":
        share, why = 1.0, "all records"
    elif section.batch_fraction is not None:
        share, why = section.batch_fraction, "configuration"
    elif section.sampling == "disjoint":
        share, why = theory.one_pass_batch(problem) / problem.silo_size, "Theorem 3.1"
    else:
        share, why = 0.25, "default"
    # K is a number of records, except for Poisson sampling, where it is an expectation.
    batches = share * sizes if section.sampling == "poisson" else np.round(share * sizes)
    batches = np.clip(batches, 1.0, sizes).astype(float)
    sources["batch_fraction"] = (share, why)
    least, most = float(batches.min()), float(batches.max())
    sources["batch"] = (least if least == most else [least, most], "share of each silo's records")
    return share, batches


def _rounds_by_theorem(algorithm: str, problem: Problem, batch: float) -> tuple[int, str]:
    strongly = bool(problem.strong_convexity)
    if algorithm == "minibatch_sgd":
        kind = "strongly convex" if strongly else "convex"
        return theory.minibatch_rounds(problem), f"Theorem 2.1, {kind}"
    rounds = theory.accelerated_rounds(problem, batch)
    if algorithm == "multi_stage":
        # At least as many as the first stage needs.
        least = 4 * math.sqrt(2 * problem.smoothness / problem.strong_convexity)
        rounds = max(rounds, math.ceil(least))
    return rounds, "Theorem 4.1, strongly convex" if strongly else "Theorem 4.1"
