"""Personal budgets of records (rPDP-FL, Liu et al. 2024): sampling rates, epsilons, guarantee.

A policy turns budgets into sampling rates:

    certified   the largest rate that the tight accountant certifies for each budget (default)
    curve_fit   Simulation-CurveFitting (Algorithm 2). Its rates overrun small budgets, so that
                these records leave before the last round, when the accountant says so
    bisection   IDP-SGD Sample (Boenisch et al. 2023): bisection for each budget, Renyi accounting
    minimum     all records have the rate of the smallest budget
    dropout     records below the mean budget are left out; the others have the rate of the mean
    uniform     all records have the rate of the mean budget, and leave when their budget is spent

``minimum``, ``dropout`` and ``uniform`` take the smallest and the mean budget above 0 from the
public distribution of budgets, not from the secret list. A record with a budget of 0 never takes
part, whatever the policy. The mechanism is ``federation.mechanisms.rpdp``.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting import Guarantee, NoiseLaw, closed_forms, events
from dpfl_jax.accounting.cells import cell_of
from dpfl_jax.accounting.guarantee import without_infinities
from dpfl_jax.accounting.rates import (
    TwoStage,
    Unreachable,
    UnreachableBudgetError,
    certified_rates,
    check_budgets,
    fitted_rates,
    solver,
)
from dpfl_jax.accounting.statement import Statement, whole_number
from dpfl_jax.config import RunConfig
from dpfl_jax.data.store import Store
from dpfl_jax.errors import BadInputError, one_of
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.federation import Federation
from dpfl_jax.federation.guarantee import ASSUMPTIONS, as_written, parse_known
from dpfl_jax.federation.mechanisms import SiloMechanism
from dpfl_jax.federation.participation import PersonalRecords
from dpfl_jax.federation.personal_budgets import public_quantiles, record_budgets
from dpfl_jax.files import csv_text, unquoted
from dpfl_jax.run.directory import RECORDS, RECORDS_SUMMARY, write_atomically
from dpfl_jax.run.public_inputs import of_the_mechanism

RatePolicy = Literal["certified", "curve_fit", "bisection", "minimum", "dropout", "uniform"]
RATE_POLICIES: tuple[RatePolicy, ...] = get_args(RatePolicy)
# Policies that need the public distribution of budgets.
_NEED_PUBLIC = ("minimum", "dropout", "uniform")
_IN_WORDS = {
    "certified": "the largest rate its own epsilon allows",
    "curve_fit": "the rate of a fitted curve, leaving when its own epsilon is used up",
    "bisection": "the rate its own epsilon allows by Renyi accounting",
    "minimum": "the rate of the least declared budget, whatever its own",
    "dropout": "the rate of the mean declared budget, or never if its own is less",
    "uniform": "the rate of the mean declared budget, leaving when its own epsilon is used up",
}
BUDGETS = "private/budgets.csv"
COLUMNS = ("record", "silo", "budget", "rate", "rounds", "epsilon_spent")
_MOST_GROUPS = 16  # declared budgets that are listed one by one
_MOST_BUDGET = 100.0  # larger budgets count as this in a mean
# (budget, rate, rounds to stay) of a declared budget.
Group = tuple[float, float, int]


# ---- rates of budgets ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class RateAssignment:
    """The sampling rates of records under a policy. No record exceeds its budget.

    Attributes:
      policy: name of the policy.
      rates: float64 [n], sampling rate of each record.
      stay: int64 [n], number of rounds after which each record leaves.
      violations: number of records that would overrun their budget if they stayed for all rounds.
      facts: further values for the report.
    """

    policy: str
    rates: np.ndarray
    stay: np.ndarray
    violations: int
    facts: dict[str, Any]


def assign(
    policy: RatePolicy,
    budgets: np.ndarray,
    public: np.ndarray,
    setting: TwoStage,
    unreachable: Unreachable = "error",
) -> RateAssignment:
    """Returns every record's sampling rate.

    Args:
      policy: see the module's docstring.
      budgets: float [n], epsilon of each record.
      public: float [m], quantiles of the public distribution of budgets.
      setting: what is accounted in the run.
      unreachable: what to do with budgets that no rate keeps (``certified`` only).

    Raises:
      BadInputError: the policy is unknown, or a budget is bad or unreachable.
    """
    one_of("privacy.policy", policy, RATE_POLICIES)
    budgets = check_budgets(budgets)
    facts: dict[str, Any] = {}
    public = public[public > 0]
    if not len(public) and policy in _NEED_PUBLIC:
        raise BadInputError(
            f"all declared budgets are 0, so that privacy.policy={policy} has no rate: declare the "
            "budgets of those who take part"
        )
    if policy == "certified":
        rates = certified_rates(budgets, setting, unreachable).rates
    elif policy == "curve_fit":
        fitted = fitted_rates(budgets, setting, exact_up_to=64)
        rates, facts = fitted.rates, fitted.to_json()
    elif policy == "bisection":
        distinct, inverse = np.unique(budgets, return_inverse=True)
        form = setting.closed_form()
        rates = np.array([closed_forms.binary_search_rate(float(b), *form) for b in distinct])[
            inverse
        ]
    else:
        least, mean = float(public.min()), float(np.minimum(public, _MOST_BUDGET).mean())
        threshold = least if policy == "minimum" else mean
        common = certified_rates(np.array([threshold]), setting, unreachable).rates[0]
        if policy == "minimum":
            rates, facts = np.full(len(budgets), common), {"least_budget": least}
        else:
            enough = budgets >= threshold
            rates = np.where(enough | (policy == "uniform"), common, 0.0)
            facts = {"mean_budget": threshold, "below_mean": int((~enough).sum())}
    rates = np.where(budgets > 0, rates, 0.0)
    stay = solver(setting).rounds_within(rates, budgets)
    return RateAssignment(policy, rates, stay, int((stay < setting.rounds).sum()), facts)


def public_batch(
    policy: RatePolicy, public: np.ndarray, setting: TwoStage, unreachable: Unreachable = "error"
) -> float:
    """Returns the mean rate over the public distribution: batch size per record, in (0, 1]."""
    if policy in ("curve_fit", "bisection"):  # has nearly the same mean, and is faster
        policy = "certified"
    mean = float(assign(policy, public, public, setting, unreachable).rates.mean())
    return max(mean, 1e-9)


# ---- what is public ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PublicBudgets:
    """What is public about a run with personal budgets.

    Attributes:
      setting: what is accounted.
      policy: how rates follow from budgets.
      records: number of records.
      groups: (budget, rate, rounds to stay) by increasing budget, for all budgets of the public
        distribution, or if they are many, for the least and the largest; () without a distribution.
      noise: how noise is drawn, ``"exact"`` or ``"float"``.
    """

    setting: TwoStage
    policy: str
    records: int
    groups: tuple[Group, ...]
    noise: NoiseLaw = "exact"


def public_setting(
    config: RunConfig, federation: Federation, delta: float, noise: float | None = None
) -> TwoStage:
    """Returns what is accounted, with its noise multiplier: public, and the same for all silos.

    Args:
      config: see ``personalise``.
      federation: federation whose mechanisms have personal rates.
      delta: delta of every record.
      noise: noise multiplier of a run that is resumed; None: calibrated, or the configured one.
    """
    tau, rounds, lam = config.federation.local_steps, federation.rounds, federation.participation
    sigma = noise if noise is not None else config.privacy.noise_multiplier
    if sigma is None:
        assert config.privacy.epsilon is not None
        sigma = accounting.calibrate_noise_multiplier(
            lambda s: events.two_stage(s, 1.0, lam, tau, rounds), config.privacy.epsilon, delta
        )
    return TwoStage(float(sigma), tau, rounds, lam, delta)


def public_part(
    config: RunConfig, federation: Federation, setting: TwoStage
) -> tuple[Federation, tuple[Group, ...]]:
    """Returns the federation with noise and public divisors, and ``PublicBudgets.groups``.

    Raises:
      BadInputError: the configuration says nothing public that a batch size follows from.
    """
    privacy, batch = config.privacy, config.mechanism.participation.expected_batch
    public, policy = public_quantiles(privacy.budgets), privacy.policy
    if batch is None and public is None:
        raise BadInputError(
            "budgets from a column are secret, so that the batch size must not follow from them: "
            "set mechanism.expected_batch, or list typical budgets in privacy.budgets.declared"
        )
    share = 0.0 if public is None else public_batch(policy, public, setting, privacy.unreachable)
    # From the plan's sizes, which are constants: adding or removing a record does not change them.
    expected = [
        max(1.0, share * plan.facts.num_records) if batch is None else batch
        for plan in federation.silos
    ]
    groups: tuple[Group, ...] = ()
    if public is not None:
        levels = np.unique(public)
        levels = levels if len(levels) <= _MOST_GROUPS else levels[[0, -1]]
        assigned = assign(policy, levels, public, setting, "exclude")
        groups = tuple(zip(levels.tolist(), assigned.rates.tolist(), assigned.stay.tolist()))
    return with_setting(federation, setting, expected), groups


def with_setting(
    federation: Federation, setting: TwoStage, expected: Sequence[float]
) -> Federation:
    """Returns a federation with personal rates, with its noise and public divisors.

    Args:
      federation: federation whose mechanisms have personal rates.
      setting: what is accounted.
      expected: divisor b of each silo, public: never computed from records or their budgets.
    """
    plans = []
    for plan, batch in zip(federation.silos, expected, strict=True):
        participation = plan.mechanism.participation
        assert isinstance(participation, PersonalRecords)
        mechanism = dataclasses.replace(
            plan.mechanism,
            participation=dataclasses.replace(
                participation, setting=setting, expected_batch=float(batch)
            ),
        )
        sigma = setting.noise_multiplier
        plans.append(dataclasses.replace(plan, mechanism=mechanism, noise_multiplier=sigma))
    return dataclasses.replace(federation, silos=tuple(plans))


# ---- what belongs to the silos -------------------------------------------------------------------


def personalise(
    config: RunConfig,
    federation: Federation,
    data: FederatedData,
    store: Store,
    keys: np.ndarray,
    delta: float,
    noise: float | None = None,
) -> tuple[Federation, FederatedData, BudgetTable]:
    """Returns the federation with noise, the data with personal rates, and the records' table.

    Args:
      config: configuration, whose ``privacy.epsilon`` is the public cap: a record with that budget
        is always sampled. ``privacy.noise_multiplier`` sets the noise instead.
      federation: federation whose mechanisms have personal rates, not yet calibrated.
      data: records of the silos.
      store: store that the records come from.
      keys: uint64 [users of the store], keyed hashes of record ids.
      delta: delta of every record.
      noise: noise multiplier of a run that is resumed; None: calibrated, or the configured one.

    Raises:
      BadInputError: budgets are missing, bad or out of reach, or there is no public batch size.
    """
    privacy, policy = config.privacy, config.privacy.policy
    setting = public_setting(config, federation, delta, noise)
    budgets = record_budgets(privacy.budgets, store, data, keys)
    public = public_quantiles(privacy.budgets)
    if public is None and policy in _NEED_PUBLIC:
        raise BadInputError(
            f"privacy.policy={policy} needs a public distribution of budgets: list typical budgets "
            "in privacy.budgets.declared"
        )
    names = store.user_ids(range(store.num_users))
    owned = tuple(names[s] for s in data.subjects.tolist())
    try:
        assignment = assign(
            policy, budgets, budgets if public is None else public, setting, privacy.unreachable
        )
    except UnreachableBudgetError as error:
        which = "declared" if policy in _NEED_PUBLIC else owned[error.row]
        raise BadInputError(
            f"record {which!r}: {error} (privacy.unreachable=exclude leaves such records out)"
        ) from None
    made, groups = public_part(config, federation, setting)
    silos = np.repeat(np.arange(data.num_silos), np.diff(data.silo_offsets))
    noise_law = made.mechanism.noise.arithmetic
    table = BudgetTable(setting, budgets, assignment, silos, owned, groups, noise_law)
    return made, data.with_rates(assignment.rates, assignment.stay), table


@dataclasses.dataclass(frozen=True, eq=False)
class BudgetTable:
    """Budget, rate and rounds to stay of all records, in the order of the federation's data.

    It is private, and belongs to the silos.

    Attributes:
      setting: what is accounted.
      budgets: float64 [n], epsilon that each record allows.
      assignment: rates and rounds to stay.
      silos: int64 [n], silo of each record.
      names: id of each record.
      groups, noise: see ``PublicBudgets``.
    """

    setting: TwoStage
    budgets: np.ndarray
    assignment: RateAssignment
    silos: np.ndarray
    names: tuple[str, ...]
    groups: tuple[Group, ...] = ()
    noise: NoiseLaw = "exact"

    @property
    def public(self) -> PublicBudgets:
        """The public part, without what belongs to the silos."""
        policy, count = self.assignment.policy, len(self.budgets)
        return PublicBudgets(self.setting, policy, count, self.groups, self.noise)

    def spent(self, rounds: int) -> np.ndarray:
        """Returns upper bounds on every record's epsilon after ``rounds`` rounds, float64 [n]."""
        rates, stay = self.assignment.rates, self.assignment.stay
        return solver(self.setting).spent_after(rates, stay, rounds)

    def check(self, rounds: int) -> np.ndarray:
        """Returns ``spent``; raises RuntimeError if a record exceeds its budget, which is a bug."""
        spent = self.spent(rounds)
        over = np.flatnonzero(spent > self.budgets)
        if len(over):
            row = int(over[0])
            raise RuntimeError(
                f"record {self.names[row]} has spent {spent[row]:.6g} of {self.budgets[row]:.6g}"
            )
        return spent

    def check_rates(self, data: FederatedData) -> None:
        """Checks the rates that silos will sample with against each record's budget.

        Args:
          data: data that the run draws from.

        Raises:
          BadInputError: a record would spend more than it allows; the message names the first.
        """
        for index, silo in enumerate(data.silos):
            mine = np.flatnonzero(self.silos == index)
            rates = np.zeros(0) if silo.rates is None else silo.rates
            if len(rates) != len(mine):
                raise BadInputError(
                    f"silo {index} holds {len(mine)} records with budgets, but {len(rates)} "
                    "sampling rates: make the rates for these records (personalise)"
                )
            rounds = self.setting.rounds
            stay = np.full(len(rates), rounds) if silo.stay is None else silo.stay
            spent = solver(self.setting).spent_after(rates, stay, rounds)
            over = np.flatnonzero(~(spent <= self.budgets[mine]))
            if len(over):
                row, first = mine[over[0]], over[0]
                raise BadInputError(
                    f"record {self.names[row]!r} allows epsilon {self.budgets[row]:g}, but silo "
                    f"{index} would draw it at the rate {rates[first]:.4g} and spend "
                    f"{spent[first]:.4g} (it would overspend {len(over)} of its {len(mine)} "
                    "records): make the rates for these records, in their order (personalise)"
                )

    def save_budgets(self, directory: pathlib.Path) -> None:
        """Writes every record's budget under ``private/`` (readable by its owner), once a run."""
        if not (directory / BUDGETS).exists():
            text = csv_text(zip(self.names, self.budgets.tolist()))
            write_atomically(directory / BUDGETS, text, mode=0o600)

    def check_unchanged(self, directory: pathlib.Path, source: str) -> None:
        """Raises BadInputError, naming a record, if the run began with other budgets.

        Args:
          directory: run directory; nothing is compared if it holds no budgets.
          source: where budgets come from now, in words.
        """
        if not (directory / BUDGETS).exists():
            return
        with (directory / BUDGETS).open(newline="") as file:
            rows = list(csv.reader(file))
        if [unquoted(name) for name, _ in rows] != list(self.names):
            return  # the data changed, which the run directory's own check reports
        for name, (_, before), now in zip(self.names, rows, self.budgets.tolist(), strict=True):
            if float(before) != now:
                raise BadInputError(
                    f"record {name!r} has the budget {now:g} in {source}, but the run in "
                    f"{directory} began with {float(before):g}: bring that back, or start another "
                    "run in another --run-dir"
                )

    def summary(self, rounds: int) -> dict[str, Any]:
        """Returns counts and extremes. Private: computed from the list of budgets."""
        spent = self.check(rounds)
        rates, stay = self.assignment.rates, np.minimum(self.assignment.stay, rounds)
        with np.errstate(divide="ignore", invalid="ignore"):
            used = np.nan_to_num(spent / self.budgets, posinf=np.inf)
        return {
            "policy": self.assignment.policy,
            "records": len(rates),
            "rounds": rounds,
            "over_budget": int((spent > self.budgets).sum()),
            "never_sampled": int(((rates == 0) | (stay == 0)).sum()),
            "left_early": int(((stay < rounds) & (rates > 0)).sum()),
            "budget": _spread(self.budgets),
            "rate": _spread(rates),
            "epsilon_spent": _spread(spent),
            "largest_share_of_budget": float(used.max(initial=0.0)),
            **self.assignment.facts,
        }

    def write(self, directory: pathlib.Path, rounds: int) -> dict[str, Any]:
        """Writes the table and its summary under ``private/``, and returns the summary."""
        summary = self.summary(rounds)
        spent, stay = self.spent(rounds), np.minimum(self.assignment.stay, rounds)
        columns = (self.silos, self.budgets, self.assignment.rates, stay, spent)
        text = csv_text([COLUMNS, *zip(self.names, *(c.tolist() for c in columns))])
        (directory / "private").mkdir(mode=0o700, exist_ok=True)
        write_atomically(directory / RECORDS, text, mode=0o600)
        text = json.dumps(without_infinities(summary), indent=2, allow_nan=False) + "\n"
        write_atomically(directory / RECORDS_SUMMARY, text, mode=0o600)
        return summary


def _spread(values: np.ndarray) -> dict[str, float]:
    names = ("least", "median", "mean", "most")
    numbers = (values.min(), np.median(values), values.mean(), values.max())
    return {name: float(value) for name, value in zip(names, numbers)}


def read_records(directory: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Returns the summary and the rows of a finished run's table of records.

    Raises:
      BadInputError: the run has no such table.
    """
    if not (directory / RECORDS).exists():
        raise BadInputError(
            f"{directory} holds no table of records: give the directory of a finished run with "
            "personal budgets (mechanism.kind=rpdp)"
        )
    summary = json.loads((directory / RECORDS_SUMMARY).read_text())
    with (directory / RECORDS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return summary, [row | {COLUMNS[0]: unquoted(row[COLUMNS[0]])} for row in rows]


# ---- what is guaranteed --------------------------------------------------------------------------


def personal_guarantee(
    public: PublicBudgets, rounds: int, caveats: tuple[str, ...] = ()
) -> Guarantee:
    """Returns the guarantee of ``rounds`` rounds, which keeps each record's own epsilon.

    The stated epsilon is public: that of a record that is always sampled, a bound for all records.
    The records' own epsilons are in the table of records, which belongs to the silos.
    """
    setting = public.setting
    cell = cell_of(setting.scheme(1.0))
    cap = accounting.epsilon(setting.event(1.0, rounds), setting.delta)
    steps = rounds * setting.local_steps
    # Stated for every run, because whether a person has several records is private.
    extra = [
        "it is of records: a person who owns several spends up to the sum of their epsilons, at "
        "the sum of their deltas, and a record that joins or leaves such a person may change the "
        "drawn budgets of that person's others, and which of them the cap per person keeps"
    ]
    extra += accounting.delta_caveats(setting.delta, public.records, "records")
    if setting.participation_prob < 1:
        extra.append(
            "participation of silos is random and observed: epsilon counts its randomness, drawn "
            "honestly, and holds for the law of all rounds together"
        )
    declared = "budgets come from a column, which is not published"
    if public.groups:
        low, high = public.groups[0][0], public.groups[-1][0]
        declared = f"budgets are declared to be spread between {low:.4g} and {high:.4g}"
    return Guarantee(
        unit="record",
        adjacency="add-or-remove one record of one silo",
        trust="silo-local",
        epsilon=cap,
        delta=setting.delta,
        noise_multiplier=setting.noise_multiplier,
        steps=steps,
        status="upper bound",
        accountant=cell.accountant,
        sampling=f"rpdp ({public.policy}): each record by its own Poisson coin, with "
        f"{_IN_WORDS[public.policy]}; {setting.local_steps} local steps in each of {rounds} "
        f"rounds, each silo in a round with probability {setting.participation_prob:.4g}; the "
        "epsilon above is that of a record that is always sampled, every record keeps its own "
        f"({declared}; the silos' table of records has what each spent); noise added inside the "
        "silo at every step",
        assumptions=(
            *cell.assumptions,
            *ASSUMPTIONS,
            *accounting.noise_assumptions(public.noise, cap, setting.delta, steps),
        ),
        caveats=(*extra, *caveats),
        released="every update that a silo sends, which silos took part, and every global model",
    )


def personal_statement(
    mechanism: SiloMechanism, public: PublicBudgets, rounds: int, guarantee: Guarantee
) -> Statement:
    """Returns the statement of ``rounds`` rounds, for all records and for each declared budget.

    Args:
      mechanism: mechanism of any silo.
      public: what is public about the run.
      rounds: number of rounds that are accounted.
      guarantee: the guarantee of these rounds.
    """
    setting, participation = public.setting, mechanism.participation
    assert isinstance(participation, PersonalRecords)
    common = dataclasses.replace(participation, expected_batch=None)  # silos differ in it
    rows, groups = [], []
    for budget, rate, stay in public.groups:
        stay = min(stay, rounds)
        rows.append([without_infinities(budget), rate, stay])
        event = setting.event(rate, stay) if rate > 0 else events.repeated(setting.event(1.0), 0)
        groups.append((f"records of budget {budget:g}", event))
    basis = {
        "system": "personal",
        "mechanism": {
            **dataclasses.replace(mechanism, participation=common).to_section(),
            "noise_multiplier": setting.noise_multiplier,
        },
        "setting": dataclasses.asdict(setting),
        "policy": public.policy,
        "num_records": public.records,
        "rounds": rounds,
        "groups_budget_rate_rounds": rows,
    }
    return Statement.of(guarantee, basis, [[setting.event(1.0, rounds)]], groups)


def restate(basis: dict[str, Any]) -> Statement:
    """Returns the statement of a run with personal budgets and this basis, for ``dpfl verify``.

    Raises:
      BadInputError: the basis does not describe such a run.
    """
    mechanism, sigma = parse_known(basis["mechanism"])
    setting = TwoStage(**{**basis["setting"], "noise_multiplier": sigma})
    public = PublicBudgets(
        setting,
        basis["policy"],
        whole_number(basis, "num_records", 1),
        tuple((float(b), rate, stay) for b, rate, stay in basis["groups_budget_rate_rounds"]),
        mechanism.noise.arithmetic,
    )
    rounds = whole_number(basis, "rounds", most=setting.rounds)
    if not all(0 <= rate <= 1 and 0 <= stay <= rounds for _, rate, stay in public.groups):
        raise BadInputError(
            "groups_budget_rate_rounds has a rate that is no probability, or more rounds than the "
            "run: bring the file back as the run wrote it"
        )
    guarantee = dataclasses.replace(
        personal_guarantee(public, rounds), public_inputs=of_the_mechanism(mechanism.bounds)
    )
    made = personal_statement(mechanism, public, rounds, guarantee)
    for (budget, _, _), group in zip(public.groups, made.groups):
        if group.epsilon > budget * 1.001:  # two discretisations of a long run differ by less
            raise BadInputError(
                f"{group.of} would spend {group.epsilon:.6g}, more than that: bring the file back "
                "as the run wrote it"
            )
    return as_written(made, basis)
