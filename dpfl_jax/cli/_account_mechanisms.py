"""The mechanisms that ``dpfl account`` knows: their parameters, their event, who is protected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dp_accounting import DpEvent, NeighboringRelation

from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE, events
from dpfl_jax.accounting.closed_forms import group, isrl, rpdp

Values = dict[str, Any]
# Parameter -> (type, help). "steps" is what a run repeats: steps or rounds.
PARAMETERS: dict[str, tuple[type, str]] = {
    "steps": (int, "steps (or rounds) of the whole run"),
    "sampling_prob": (float, "probability of each example, record or user in each step"),
    "once_in": (int, "steps of which each user takes part in exactly one"),
    "buffers": (int, "buffers of the noise, the best for these steps (default 2)"),
    "bands": (int, "bands of the inverse of the noise's matrix, likewise (default 3)"),
    "group_size": (int, "most examples of a user (ELS, whole run) or records of a subject"),
    "dataset_size": (int, "units in the data set (public)"),
    "batch_size": (int, "units in every batch"),
    "batch_cap": (int, "most units (truncated Poisson) or records of a subject kept in a batch"),
    "participation_prob": (float, "probability that the silo takes part in a round"),
    "local_steps": (int, "local steps in a round"),
    "silos": (int, "silos that may hold records of one subject (horizontal composition)"),
}


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """One sub-command.

    Attributes:
      help: one line.
      unit, adjacency, trust, relation: as in ``Guarantee``.
      needs: parameters, in order; optional: parameters that may be left out.
      event: (noise multiplier, values) -> event.
      sampling: how units are drawn, in words.
      assumptions: what must hold.
      others: (noise multiplier, values, delta) -> {alternative: (epsilon, is it a valid bound?)}.
    """

    help: str
    unit: str
    trust: str
    needs: tuple[str, ...]
    event: Callable[[float, Values], DpEvent]
    sampling: str
    adjacency: str = "add-or-remove"
    relation: NeighboringRelation = ADD_OR_REMOVE
    optional: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    others: Callable[[float, Values, float], dict[str, tuple[float, bool]]] | None = None

    @property
    def neighbours(self) -> str:
        """Adjacency in words, e.g. "add-or-remove one user"."""
        return f"{self.adjacency} one {self.unit}"


def _black_box(noise: float, v: Values, delta: float) -> dict[str, tuple[float, bool]]:
    example = events.poisson(noise, v["sampling_prob"], v["steps"])
    size = v["group_size"]
    return {
        "black-box group privacy (geometric, RDP in log space)": (
            group.black_box_epsilon(example, size, delta),
            True,
        ),
        "black-box group privacy (Vadhan 2017, RDP in log space)": (
            group.black_box_epsilon(example, size, delta, form="vadhan"),
            True,
        ),
        "example-level epsilon (protects no user)": (events_epsilon(example, delta), False),
    }


def events_epsilon(event: DpEvent, delta: float) -> float:
    """Epsilon by PLD, add-or-remove."""
    from dpfl_jax import accounting

    return accounting.epsilon(event, delta)


def _subject_others(noise: float, v: Values, delta: float) -> dict[str, tuple[float, bool]]:
    steps = v["steps"] * (v["silos"] or 1)
    item = events.poisson(noise, v["sampling_prob"], v["steps"])
    return {
        "HiGradAvgDP text B (fraction q): not a bound": (events_epsilon(item, delta), False),
        "black-box group privacy with K records, all silos": (
            group.black_box_epsilon(
                events.poisson(noise, v["sampling_prob"], steps), v["group_size"], delta
            ),
            True,
        ),
    }


def _two_stage_others(noise: float, v: Values, delta: float) -> dict[str, tuple[float, bool]]:
    args = (
        v["sampling_prob"],
        noise,
        v["local_steps"],
        v["steps"],
        v["participation_prob"],
        delta,
    )
    return {
        "Theorem 3 (clients), conversion of the paper": (
            rpdp.epsilon_two_stage(*args, conversion="mironov")[0],
            True,
        ),
        "Theorem 3 (clients), conversion of the authors' code": (
            rpdp.epsilon_two_stage(*args)[0],
            True,
        ),
        "Theorem 3 (server): not a bound": (
            rpdp.epsilon_two_stage(*args, adversary="server")[0],
            False,
        ),
    }


def _isrl_others(noise: float, v: Values, delta: float) -> dict[str, tuple[float, bool]]:
    """The epsilon for which the paper's formulas ask for this noise (both fall as 1 / epsilon)."""
    per_unit = noise / v["sampling_prob"]  # sigma n / L
    valid = isrl.minibatch_noise(v["steps"], 1, 1e-9, delta) * 1e-9 / per_unit
    shown = isrl.experiment_noise(v["steps"], 1, 1.0, delta) / per_unit
    return {
        "Theorem D.1 (sampling with replacement)": (valid, True),
        "Appendix I (experiments): not a bound": (shown, False),
    }


def _in_turns(noise: float, v: Values, kind: str, name: str) -> DpEvent:
    from dpfl_jax import mechanisms  # which starts JAX

    steps, number = v["steps"], v.get(name)
    for what in ("once_in", "steps"):
        events.check_count(v[what], what, 1)
    preset: Any = {"blt": mechanisms.blt, "banded_inverse": mechanisms.banded_inverse}[kind]
    own = {} if number is None else {name: number}
    made = preset(group_size=1, cohort_size=1, noise_multiplier=noise, **own)
    population = mechanisms.Population(v["once_in"], v["once_in"], v["once_in"])
    return made.for_steps(population, steps).event(population, steps)


def _horizontal(event: DpEvent, v: Values) -> DpEvent:
    return events.horizontal([event] * (v.get("silos") or 1))


_POISSON = "Poisson: each {0} independently in each step"
_PUBLIC = "sampling probability, steps, clip norm and divisor are public constants"
_SILO = "a subject has records in at most the given number of silos, which silos cannot check"

MECHANISMS: dict[str, Mechanism] = {
    "els": Mechanism(
        "example-level sampling, user-level guarantee (mixture of Gaussians)",
        "user",
        "central",
        ("sampling_prob", "group_size", "steps"),
        lambda s, v: events.els(s, v["sampling_prob"], v["group_size"], v["steps"]),
        _POISSON.format("example"),
        assumptions=(_PUBLIC, "each example belongs to one user, who has at most group_size"),
        others=_black_box,
    ),
    "uls": Mechanism(
        "user-level sampling, user-level guarantee",
        "user",
        "central",
        ("sampling_prob", "steps"),
        lambda s, v: events.uls(s, v["sampling_prob"], v["steps"]),
        _POISSON.format("user"),
        assumptions=(_PUBLIC, "each example belongs to one user"),
    ),
    "allocation": Mechanism(
        "each user in one of every t steps, user-level guarantee",
        "user",
        "central",
        ("once_in", "steps"),
        lambda s, v: events.allocated(s, v["once_in"], v["steps"]),
        "one of every once_in steps, drawn uniformly for each user and each such stretch",
        assumptions=(
            "once_in, steps, clip norm and divisor are public constants",
            "each example belongs to one user",
        ),
    ),
    "blt": Mechanism(
        "users in turns without sampling, buffered Toeplitz noise, user-level guarantee",
        "user",
        "central",
        ("once_in", "steps"),
        lambda s, v: _in_turns(s, v, "blt", "buffers"),
        "each user at every once_in-th step (not counted on: whose turn it is may be known)",
        optional=("buffers",),
        assumptions=(
            "once_in, steps, buffers, clip norm and divisor are public constants",
            "each example belongs to one user",
        ),
    ),
    "banded-inverse": Mechanism(
        "users in turns without sampling, noise of few bands, user-level guarantee",
        "user",
        "central",
        ("once_in", "steps"),
        lambda s, v: _in_turns(s, v, "banded_inverse", "bands"),
        "each user at every once_in-th step (not counted on: whose turn it is may be known)",
        optional=("bands",),
        assumptions=(
            "once_in, steps, bands, clip norm and divisor are public constants",
            "each example belongs to one user",
        ),
    ),
    "poisson": Mechanism(
        "plain DP-SGD, record-level guarantee",
        "record",
        "central",
        ("sampling_prob", "steps"),
        lambda s, v: events.poisson(s, v["sampling_prob"], v["steps"]),
        _POISSON.format("record"),
        assumptions=(_PUBLIC,),
    ),
    "gaussian": Mechanism(
        "every unit in every step",
        "record",
        "central",
        ("steps",),
        lambda s, v: events.gaussian(s, v["steps"]),
        "none: every unit takes part in every step",
        assumptions=(_PUBLIC,),
    ),
    "fixed-size": Mechanism(
        "batches of fixed size without replacement",
        "record",
        "central",
        ("dataset_size", "batch_size", "steps"),
        lambda s, v: events.fixed_size(s, v["dataset_size"], v["batch_size"], v["steps"]),
        "uniform without replacement, fixed size, fresh in each step",
        adjacency="replace",
        relation=REPLACE,
        assumptions=("the size of the data set is public",),
    ),
    "truncated-poisson": Mechanism(
        "Poisson sampling cut to a batch cap",
        "record",
        "central",
        ("sampling_prob", "dataset_size", "batch_cap", "steps"),
        lambda s, v: events.truncated_poisson(
            s, v["sampling_prob"], v["dataset_size"], v["batch_cap"], v["steps"]
        ),
        "Poisson, cut at random to the batch cap",
        assumptions=(_PUBLIC, "dataset_size is that of the larger of any two neighbouring sets"),
    ),
    "two-stage": Mechanism(
        "silo first, then records (rPDP-FL); sampling_prob is the record's own rate",
        "record",
        "silo-local",
        ("sampling_prob", "participation_prob", "local_steps", "steps"),
        lambda s, v: events.two_stage(
            s, v["sampling_prob"], v["participation_prob"], v["local_steps"], v["steps"]
        ),
        "each silo with the participation probability in each round, then Poisson over its records",
        assumptions=(_PUBLIC, "who took part in a round is drawn at random and visible to all"),
        others=_two_stage_others,
    ),
    "local-group-dp": Mechanism(
        "LocalGroupDP per silo, soundly (mixture of Gaussians), and over silos",
        "subject",
        "silo-local",
        ("sampling_prob", "group_size", "steps"),
        lambda s, v: _horizontal(
            events.local_group_dp(
                s, v["sampling_prob"], v["group_size"], v["steps"], v.get("batch_cap")
            ),
            v,
        ),
        _POISSON.format("record of a silo"),
        optional=("batch_cap", "silos"),
        assumptions=(_PUBLIC, _SILO),
        others=_subject_others,
    ),
    "hi-grad-avg-dp": Mechanism(
        "HiGradAvgDP per silo, and over silos",
        "subject",
        "silo-local",
        ("sampling_prob", "group_size", "steps"),
        lambda s, v: _horizontal(
            events.hi_grad_avg_dp(s, v["sampling_prob"], v["group_size"], v["steps"]), v
        ),
        _POISSON.format("record of a silo"),
        optional=("silos",),
        assumptions=(_PUBLIC, _SILO, "the divisor is a public constant"),
        others=_subject_others,
    ),
    "user-ldp": Mechanism(
        "UserLDP: one clipped gradient of the whole batch per step (sensitivity 2C)",
        "subject",
        "silo-local",
        ("steps",),
        lambda s, v: _horizontal(events.user_ldp(s, v["steps"]), v),
        "none is counted on",
        optional=("silos",),
        assumptions=(_SILO,),
    ),
    "isrl-dp": Mechanism(
        "ISRL-DP: a silo's own noisy minibatches, record-level, replace-one",
        "record",
        "silo-local",
        ("sampling_prob", "steps"),
        lambda s, v: events.isrl_dp(s, v["sampling_prob"], v["steps"]),
        _POISSON.format("record of the silo"),
        adjacency="replace",
        relation=REPLACE,
        assumptions=("the silo's size and who took part are public",),
        others=_isrl_others,
    ),
    "shuffled": Mechanism(
        "batches cut from shuffled passes: no amplification; steps are passes",
        "user",
        "central",
        ("group_size", "steps"),
        lambda s, v: events.shuffled_epochs(s, v["group_size"], v["steps"]),
        "shuffled passes (not counted on)",
        adjacency="zero-out",
        assumptions=("a user's slots stay in place, with zero gradients",),
    ),
}
