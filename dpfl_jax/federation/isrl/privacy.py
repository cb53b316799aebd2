"""The noise of a silo for its budget, its guarantee, and guarantees under other notions of privacy.

Departures. Batches are Poisson, disjoint or full, each record's gradient is clipped, and noise is
calibrated by privacy-loss distributions under replace-one. The paper's theorems have closed forms
that are valid, but Theorem D.1's spends only a thirtieth of its budget. Its experiments sample with
replacement, with noise from an asymptotic statement. ``reproductions/isrl/_published.py`` has both,
and bounds what they spend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, Guarantee, NoiseLaw, closed_forms, events
from dpfl_jax.accounting.calibrate import noise_ahead
from dpfl_jax.accounting.cells import Everyone, NoisedSums, OnePass
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.accounting.statement import Statement, whole_number
from dpfl_jax.errors import BadInputError, positive, probability
from dpfl_jax.federation.isrl.message import Sampling
from dpfl_jax.mechanisms.calibrated import check_noise_multiplier
from dpfl_jax.sampling import Poisson

# Batches are drawn with random numbers of 23 bits, so that sampling rates are rounded up to these.
_BITS = 2**23
# Former options in guarantee files, with the values that had a guarantee.
_EARLIER_OPTIONS = {"arm": ("sound", "paper_closed_form")}


@dataclasses.dataclass(frozen=True)
class Budget:
    """The privacy budget that a silo grants each of its records.

    Attributes:
      epsilon: epsilon, > 0.
      delta: delta, in (0, 1); the paper takes 1 / n^2.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> isrl.Budget(epsilon=3.0, delta=1e-6).epsilon
      3.0
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        positive("epsilon", self.epsilon)
        probability("delta", self.delta, zero=False, one=False)


@dataclasses.dataclass(frozen=True)
class SiloNoise:
    """One silo's noise and sampling, from which its event follows.

    Attributes:
      noise_multiplier: standard deviation of the noise on the sum of gradients, over the clip norm.
      batch: expected batch size K, the constant divisor.
      silo_size: number of records n, public.
      rounds: the largest number of rounds in which the silo answers.
      sampling: how records are sampled.
      budget: the budget that the noise was calibrated for.
      noise: how noise is drawn, ``"exact"`` or ``"float"``.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> budget = isrl.Budget(epsilon=3.0, delta=1e-6)
      >>> noise = isrl.silo_noise(budget, silo_size=1238, batch=443, rounds=35)
      >>> noise.rounds, noise.sampling
      (35, 'poisson')
    """

    noise_multiplier: float
    batch: float
    silo_size: int
    rounds: int
    sampling: Sampling
    budget: Budget
    noise: accounting.NoiseLaw = "exact"

    @property
    def sums(self) -> NoisedSums:
        """The noised sums that are accounted for a record, under replace-one."""
        scheme: Any = Poisson(self.rate)
        if self.sampling != "poisson":
            scheme = Everyone() if self.sampling == "full" else OnePass()
        size, sigma = self.silo_size, self.noise_multiplier
        return NoisedSums(scheme, sigma, self.rounds, size, relation=REPLACE)

    @property
    def event(self) -> Any:
        """The event of ``sums``."""
        return self.sums.event()

    @property
    def rate(self) -> float:
        """Upper bound on the probability that a record is in a batch."""
        # Plus one, for the float32 rounding of K and of K / n.
        # proof: isrl-rate-1
        return min(1.0, (math.ceil(self.batch / self.silo_size * _BITS) + 1) / _BITS)

    @property
    def epsilon(self) -> float:
        """Epsilon of ``event`` at the budget's delta."""
        # proof: isrl-event-2
        return accounting.epsilon(self.event, self.budget.delta, relation=REPLACE)


def silo_noise(
    budget: Budget,
    silo_size: int,
    batch: float,
    rounds: int,
    *,
    sampling: Sampling = "poisson",
    near: float | None = None,
) -> SiloNoise:
    """Returns the least noise of a silo that meets its budget.

    Args:
      budget: budget of each record of the silo, against everyone outside the silo.
      silo_size: number of records n.
      batch: expected batch size K; ignored for ``"full"``, which takes all n.
      rounds: the largest number of rounds in which the silo answers.
      sampling: how records are sampled.
      near: a guess of the noise multiplier, which makes the search faster.

    Raises:
      BadInputError: the batch is larger than the silo, or the budget is out of reach.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> budget = isrl.Budget(epsilon=3.0, delta=1e-6)
      >>> noise = isrl.silo_noise(budget, silo_size=1238, batch=443, rounds=35)
      >>> round(noise.noise_multiplier, 2)
      6.52
    """
    if sampling == "full":
        batch = float(silo_size)
    if not 0 < batch <= silo_size:
        raise BadInputError(
            f"the local batch is {batch}, but it must be above 0 and at most {silo_size}, the "
            "silo's number of records"
        )
    start = SiloNoise(1.0, batch, silo_size, rounds, sampling, budget)
    noise = accounting.calibrate_noise_multiplier(
        lambda z: dataclasses.replace(start, noise_multiplier=z).event,
        budget.epsilon,
        budget.delta,
        relation=REPLACE,
        near=near,
    )
    check_noise_multiplier(noise)
    return dataclasses.replace(start, noise_multiplier=noise)


def silo_guarantee(noise: SiloNoise) -> Guarantee:
    """Returns a silo's guarantee for each of its records, against everyone outside the silo.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> budget = isrl.Budget(epsilon=3.0, delta=1e-6)
      >>> noise = isrl.silo_noise(budget, silo_size=1238, batch=443, rounds=35)
      >>> guarantee = isrl.silo_guarantee(noise)
      >>> guarantee.unit, guarantee.epsilon <= 3.0
      ('record', True)
    """
    epsilon, cell = noise.epsilon, noise.sums.cell
    words = {
        "poisson": f"Poisson inside the silo, probability {noise.batch / noise.silo_size:.6g}",
        "full": "all records of the silo in every round",
        "disjoint": "disjoint batches in a random order: each record in one round at most",
    }[noise.sampling]
    return Guarantee(
        unit="record",
        adjacency="replace one record",
        trust="silo-local",
        epsilon=epsilon,
        delta=noise.budget.delta,
        noise_multiplier=noise.noise_multiplier,
        steps=noise.rounds,
        accountant=cell.accountant,
        sampling=f"{words}, at most {noise.rounds} rounds",
        assumptions=(
            "ISRL-DP: the adversary sees all messages of the silo, and may be the server together "
            "with all other silos",
            "the silo's size and the rounds in which it answers are public; no amplification by "
            "the choice of silos is counted",
            "the divisor of a message is a public constant",
            "the root key is secret",
            *cell.assumptions,
            *accounting.noise_assumptions(noise.noise, epsilon, noise.budget.delta, noise.rounds),
        ),
        caveats=(
            "the clip norm, step sizes, preprocessing and the choice of rounds must be public or "
            "paid for apart; metrics of silo data are not private",
            *accounting.delta_caveats(noise.budget.delta, noise.silo_size, "records of the silo"),
        ),
        released="every message of the silo, hence every model",
    )


def worst_guarantee(noise: Sequence[SiloNoise], caveats: tuple[str, ...] = ()) -> Guarantee:
    """Returns one guarantee for the records of all silos, at their largest delta.

    Args:
      noise: noise of every silo.
      caveats: caveats to add.
    """
    silos = at_one_delta(noise)
    guarantees = {(z.event, z.budget): silo_guarantee(z) for z in silos}
    worst = max(guarantees.values(), key=lambda g: g.epsilon)
    # A delta that is small enough for this silo may be too large for a silo with more records.
    largest = max(z.silo_size for z in silos)
    too_much = accounting.delta_caveats(worst.delta, largest, "records of the largest silo")
    if not set(too_much) <= set(worst.caveats):
        caveats = (*too_much, *caveats)
    if len(guarantees) > 1:
        caveats = (
            "silos differ: this holds for all, at the largest of their deltas; the table has what "
            "each promises",
            *caveats,
        )
    return dataclasses.replace(
        worst,
        caveats=(*worst.caveats, *caveats),
        released="every message of every silo, hence every model",
    )


def federation_noise(
    budgets: Sequence[Budget],
    sizes: Sequence[int],
    batches: Sequence[float],
    rounds: int,
    *,
    sampling: Sampling = "poisson",
) -> list[SiloNoise]:
    """Returns ``silo_noise`` of every silo; equal silos are calibrated once."""
    asked = list(zip(budgets, map(int, sizes), map(float, batches), strict=True))
    known: dict[tuple[Budget, int, float], SiloNoise] = {}
    solved: dict[float, list[tuple[float, float]]] = {}
    for facts in sorted(set(asked), key=lambda f: (f[1:], dataclasses.astuple(f[0]))):
        budget, size, batch = facts
        before = solved.setdefault(budget.epsilon, [])
        near = noise_ahead(before, size)
        known[facts] = silo_noise(budget, size, batch, rounds, sampling=sampling, near=near)
        before.append((size, known[facts].noise_multiplier))
    return [known[facts] for facts in asked]


def at_one_delta(noise: Sequence[SiloNoise]) -> list[SiloNoise]:
    """Returns the silos' noise with the largest delta in all budgets, for one common statement."""
    delta = max(z.budget.delta for z in noise)
    return [
        dataclasses.replace(z, budget=dataclasses.replace(z.budget, delta=delta)) for z in noise
    ]


# ---- what guarantee.json states ------------------------------------------------------------------


def isrl_statement(noise: Sequence[SiloNoise], guarantee: Guarantee) -> Statement:
    """Returns the statement of the silos' messages, for guarantee.json.

    Args:
      noise: noise of every silo, for the rounds that are accounted; empty without privacy.
      guarantee: the guarantee of these rounds.
    """
    kinds = [dataclasses.asdict(z) for z in dict.fromkeys(noise)]
    basis = {"system": "isrl", "kinds_of_silos": kinds}
    every = list(dict.fromkeys(z.event for z in at_one_delta(noise))) if guarantee.private else []
    return Statement.of(guarantee, basis, [every])


def restate(basis: dict[str, Any]) -> Statement:
    """Returns the statement of an ISRL run with this basis, for ``dpfl verify``.

    Raises:
      BadInputError: the basis does not describe an ISRL run.
    """
    noise, earlier = [], []
    for given in basis["kinds_of_silos"]:
        earlier.append({k: v for k, v in given.items() if v in _EARLIER_OPTIONS.get(k, ())})
        kind = {k: v for k, v in given.items() if k not in earlier[-1]}
        size, _ = whole_number(kind, "silo_size", 1), whole_number(kind, "rounds", 1)
        if not 0 < kind["batch"] <= size or kind["noise_multiplier"] <= 0:
            raise BadInputError(f"no silo has this batch and noise: {kind}")
        if unknown := kind.keys() - {field.name for field in dataclasses.fields(SiloNoise)}:
            raise BadInputError(f"no silo has {', '.join(sorted(unknown))}: {kind}")
        if kind["sampling"] not in get_args(Sampling):
            raise BadInputError(f"no silo has this sampling: {kind}")
        if kind.get("noise", "exact") not in get_args(NoiseLaw):
            raise BadInputError(f"no silo has this noise: {kind}")
        one = SiloNoise(**{**kind, "budget": Budget(**kind["budget"])})
        if one.epsilon > one.budget.epsilon * (1 + 1e-6):
            raise BadInputError(
                f"silos of {size} records would spend {one.epsilon:.7g} at delta "
                f"{one.budget.delta:g}, but kinds_of_silos says a budget of {one.budget.epsilon:g}"
            )
        noise.append(one)
    if not noise:
        raise BadInputError("kinds_of_silos is empty")
    made = isrl_statement(noise, worst_guarantee(noise))
    for each, old in zip(made.basis["kinds_of_silos"], earlier):
        each |= old
    return made


# ---- other notions of privacy --------------------------------------------------------------------


def relations(noise: SiloNoise, silos: int, shuffled: bool = True) -> list[dict[str, Any]]:
    """Returns what a run guarantees under other notions of privacy.

    Args:
      noise: noise of every silo; all silos are equal.
      silos: number of silos N.
      shuffled: whether all silos are equal and answer in every round, as the shuffling theorem
        needs.

    Returns:
      Rows with ``notion, trusted, protects, epsilon, delta, note``.
    """
    epsilon, delta, is_local = noise.epsilon, noise.budget.delta, noise.silo_size == 1
    user_epsilon, user_delta = closed_forms.user_level_guarantee(noise.silo_size, epsilon, delta)
    user_delta = min(user_delta, 1.0) if math.isfinite(user_delta) else 1.0
    hidden = shuffled_view(noise, silos) if shuffled else math.inf
    if hidden < epsilon:
        why = "each round shuffled, all silos alike and answering (Theorem D.5)"
    else:
        why = (
            "implied; the shuffling theorem adds nothing here (it needs hundreds of silos, "
            "messages of epsilon below 1/n, and silos that are alike and all answer)"
        )
    by_group = "by group privacy; meaningful only for epsilon <= 1/n"
    once = "implied; a server that adds noise once needs 1/sqrt(N) of it"
    local = "the same notion if n = 1" if is_local else "none: the silo sees its records"
    local_epsilon, local_delta = (epsilon, delta) if is_local else (math.inf, 1.0)
    least, whole = min(hidden, epsilon), "a silo's whole data"
    rows = (
        ("ISRL-DP", "the record's own silo", "a record", epsilon, delta, "what is guaranteed"),
        ("central DP", "silos and server", "a record", epsilon, delta, once),
        ("user-level DP", "the server", whole, user_epsilon, user_delta, by_group),
        ("shuffle DP", "own silo and a shuffler", "a record", least, delta, why),
        ("local DP", "nobody", "a record", local_epsilon, local_delta, local),
    )
    columns = ("notion", "trusted", "protects", "epsilon", "delta", "note")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def shuffled_view(noise: SiloNoise, silos: int) -> float:
    """Returns the shuffle-DP epsilon of a run whose rounds are shuffled, at the budget's delta.

    It applies Theorem D.5 to each round: the silo's randomiser is (e, e')-DP, with e' so small that
    2 N n exp((n-1) e) e' is a quarter of the round's delta. Then it composes R rounds optimally
    (only one round for disjoint batches, as a record is in one). The factor exp(n e) is there
    because a silo's n records go through the shuffler together. All N silos must be equal, and
    answer in every round. Infinite if the theorem gives no bound.

    Args:
      noise: noise of every silo.
      silos: number of silos N.
    """
    delta, n = noise.budget.delta, noise.silo_size
    rounds = 1 if noise.sampling == "disjoint" else noise.rounds
    one = dataclasses.replace(noise, rounds=1).event
    shuffle_delta = delta / (4 * rounds)
    limit = silos / (16 * math.log(2 / shuffle_delta))
    if limit <= 1:
        return math.inf
    # The theorem limits exp(n e), and so exp((n-1) e).
    silo_delta = shuffle_delta / (2 * silos * n * limit)
    try:
        per_silo = accounting.epsilon(one, silo_delta, relation=REPLACE)
        hidden = closed_forms.shuffled_epsilon(per_silo, silos, n, shuffle_delta)
    except BadInputError:
        return math.inf
    per_round = closed_forms.shuffled_delta(per_silo, silos, n, shuffle_delta, silo_delta)
    if rounds == 1:
        return hidden
    step = ApproximateDpEvent(hidden, per_round)
    return accounting.epsilon(events.repeated(step, rounds), delta, relation=REPLACE)
