"""A federation of silos made personal: noise, budgets, rates, and the guarantee in words."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting.cells import cell_of
from dpfl_jax.accounting.rates import TwoStage, UnreachableBudgetError
from dpfl_jax.config.schema import BudgetConfig, RunConfig
from dpfl_jax.data.store import Store
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.federation import Federation
from dpfl_jax.federation.guarantee import ASSUMPTIONS
from dpfl_jax.federation.mechanisms import PersonalRecords
from dpfl_jax.federation.partition import record_numbers, uniforms
from dpfl_jax.federation.personal import budgets as laws
from dpfl_jax.federation.personal.policies import Policy, assign, public_batch
from dpfl_jax.federation.personal.records import Personal

# Declared budgets of which each is told apart.
_MOST_GROUPS = 16


def distribution(config: BudgetConfig) -> laws.BudgetDistribution | None:
    """The distribution of a config; None where budgets come from a column."""
    if config.kind == "three_levels":
        return laws.ThreeLevels(config.levels, config.shares)
    if config.kind == "mix_gauss":
        return laws.BoundedMixGauss(config.levels, config.stds, config.shares, config.bounds)
    if config.kind == "pareto":
        return laws.BoundedPareto(config.shape, config.pareto, config.bounds)
    if config.kind == "constant":
        return laws.Constant(config.levels[0])
    return None


def column_budgets(config: BudgetConfig, store: Store) -> np.ndarray:
    """Budgets of a store's records, from a field of the data or a CSV file by record id."""
    if config.path is None:
        records = store.read(np.arange(store.num_examples))
        if config.column not in records:
            raise BadInputError(
                f"the data have no field {config.column!r} (they have {', '.join(records)}): name "
                "one in privacy.budgets.column, or give privacy.budgets.path"
            )
        owners = np.repeat(np.arange(store.num_users), store.examples_per_user)
        return laws.budgets_of_column(
            records[config.column],
            config.column,
            lambda i: f"record {i} of the data, of {store.user_ids(owners[i : i + 1])[0]!r},",
        )
    path = pathlib.Path(config.path)
    if not path.is_file():
        raise BadInputError(f"{path} does not exist: put the CSV file of budgets there")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not {"record", config.column} <= set(reader.fieldnames or ()):
            raise BadInputError(f"{path} needs the columns 'record' and {config.column!r}")
        known: dict[str, str] = {}
        lines: dict[str, int] = {}
        for row in reader:
            if row["record"] in known:
                raise BadInputError(
                    f"{path} has two rows for the record {row['record']!r}: keep one"
                )
            known[row["record"]], lines[row["record"]] = row[config.column], reader.line_num
    names = store.user_ids(range(store.num_users))
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        raise BadInputError(f"{path} has no budget for the record {missing!r}: give it a row")
    values = laws.budgets_of_column(
        [known[name] for name in names],
        config.column,
        lambda i: f"{path}, line {lines[names[i]]} (record {names[i]!r}),",
    )
    return np.repeat(values, store.examples_per_user)


def record_budgets(
    config: BudgetConfig, store: Store, data: FederatedData, keys: np.ndarray
) -> np.ndarray:
    """Each record's epsilon, in the order of ``data``: float64 [num_records].

    A drawn budget is a function of the record's id and the public seed: it tells nothing of other
    persons; one of several records of a person is drawn by its place among them.
    """
    law = distribution(config)
    if law is None:
        return column_budgets(config, store)[data.order]
    subjects = np.repeat(np.arange(store.num_users), store.examples_per_user)
    # proof: rpdp-budget-1
    u = uniforms(np.asarray(keys, np.uint64)[subjects], record_numbers(subjects), config.seed, 7)
    return law.quantiles(u)[data.order]


def public_quantiles(config: BudgetConfig) -> np.ndarray | None:
    """The public distribution of budgets as quantiles; None if none is declared."""
    law = distribution(config)
    if law is not None:
        return laws.mean_over(law)
    if config.declared is None:
        return None
    return laws.check_budgets(np.asarray(config.declared, np.float64))


def public_setting(
    config: RunConfig, federation: Federation, delta: float, noise: float | None = None
) -> TwoStage:
    """What is accounted, with its noise: public, the same for all silos.

    Args:
      config: see ``personalise``.
      federation: of mechanisms whose records have rates of their own.
      delta: of every record.
      noise: noise multiplier of a run that is resumed.
    """
    tau, rounds, lam = config.federation.local_steps, federation.rounds, federation.participation
    sigma = noise if noise is not None else config.privacy.noise_multiplier
    if sigma is None:
        assert config.privacy.epsilon is not None
        sigma = accounting.calibrate_noise_multiplier(
            lambda s: accounting.events.two_stage(s, 1.0, lam, tau, rounds),
            config.privacy.epsilon,
            delta,
        )
    return TwoStage(float(sigma), tau, rounds, lam, delta)


def public_part(
    config: RunConfig, federation: Federation, setting: TwoStage
) -> tuple[Federation, tuple[tuple[float, float, int], ...]]:
    """The federation as it is published: noise and divisors, but nobody's rate.

    Returns:
      It, and (budget, rate, stay) of the declared budgets (``Personal.groups``).

    Raises:
      BadInputError: no public batch size follows.
    """
    privacy, batch = config.privacy, config.mechanism.participation.expected_batch
    public, policy = public_quantiles(privacy.budgets), privacy.policy
    if batch is None and public is None:
        raise BadInputError(
            "budgets from a column are secret, so the batch size cannot follow from them: set "
            "mechanism.expected_batch, or list typical budgets in privacy.budgets.declared"
        )
    share = 0.0 if public is None else public_batch(policy, public, setting, privacy.unreachable)
    # The plans' numbers, declared constants: they stay when a record is added or removed.
    expected = [
        max(1.0, share * plan.facts.num_records) if batch is None else batch
        for plan in federation.silos
    ]
    groups: tuple[tuple[float, float, int], ...] = ()
    if public is not None:
        levels = np.unique(public)
        levels = levels if len(levels) <= _MOST_GROUPS else levels[[0, -1]]
        theirs = assign(policy, levels, public, setting, "exclude")
        groups = tuple(zip(levels.tolist(), theirs.rates.tolist(), theirs.stay.tolist()))
    return with_setting(federation, setting, expected), groups


def with_setting(
    federation: Federation, setting: TwoStage, expected: Sequence[float]
) -> Federation:
    """A federation of personal rates with its noise, and public divisors.

    Args:
      federation: who takes part.
      setting: what is accounted.
      expected: b of each silo, public: never computed from records or their budgets.
    """
    plans = []
    for plan, batch in zip(federation.silos, expected, strict=True):
        drawn = plan.mechanism.participation
        assert isinstance(drawn, PersonalRecords)
        mechanism = dataclasses.replace(
            plan.mechanism,
            participation=dataclasses.replace(drawn, setting=setting, expected_batch=float(batch)),
        )
        sigma = setting.noise_multiplier
        plans.append(dataclasses.replace(plan, mechanism=mechanism, noise_multiplier=sigma))
    return dataclasses.replace(federation, silos=tuple(plans))


def personalise(
    config: RunConfig,
    federation: Federation,
    data: FederatedData,
    store: Store,
    keys: np.ndarray,
    delta: float,
    noise: float | None = None,
) -> tuple[Federation, FederatedData, Personal]:
    """The federation with its noise, the data with personal rates, and what every record spends.

    Args:
      config: its ``privacy.epsilon`` is the public cap: a record with that budget is always
        sampled. ``privacy.noise_multiplier`` replaces it.
      federation: of mechanisms whose records have rates of their own, not yet calibrated.
      data: what the silos hold.
      store: where the records come from.
      keys: uint64 [users of the store], keyed hashes of record ids.
      delta: of every record.
      noise: noise multiplier of a run that is resumed.

    Raises:
      BadInputError: budgets that are missing, bad or out of reach, or no public batch size.
    """
    privacy, budgets_config = config.privacy, config.privacy.budgets
    setting = public_setting(config, federation, delta, noise)
    budgets = record_budgets(budgets_config, store, data, keys)
    public = public_quantiles(budgets_config)
    policy: Policy = privacy.policy
    if public is None and policy in ("minimum", "dropout", "uniform"):
        raise BadInputError(
            f"privacy.policy={policy} compares with the distribution of budgets, which must be "
            "public: list typical budgets in privacy.budgets.declared"
        )
    known = budgets if public is None else public
    names = store.user_ids(range(store.num_users))
    owned = tuple(names[s] for s in data.subjects.tolist())
    try:
        assignment = assign(policy, budgets, known, setting, privacy.unreachable)
    except UnreachableBudgetError as error:
        which = owned[error.row] if policy not in ("minimum", "dropout", "uniform") else "declared"
        raise BadInputError(
            f"record {which!r}: {error} (privacy.unreachable=exclude leaves such records out)"
        ) from None
    made, groups = public_part(config, federation, setting)
    silos = np.repeat(np.arange(data.num_silos), np.diff(data.silo_offsets))
    law = made.mechanism.noise.arithmetic
    personal = Personal(setting, budgets, assignment, silos, owned, groups, law)
    return made, data.with_rates(assignment.rates, assignment.stay), personal


HOW = {
    "certified": "the largest rate its own epsilon allows",
    "curve_fit": "the rate of a fitted curve, leaving when its own epsilon is used up",
    "bisection": "the rate its own epsilon allows by Renyi accounting",
    "minimum": "the rate of the least declared budget, whatever its own",
    "dropout": "the rate of the mean declared budget, or never if its own is less",
    "uniform": "the rate of the mean declared budget, leaving when its own epsilon is used up",
}


def personal_guarantee(
    personal: Personal, rounds: int, caveats: tuple[str, ...] = ()
) -> accounting.Guarantee:
    """What ``rounds`` rounds guarantee: each record its own epsilon; the number is the cap's.

    The single epsilon is what a record that is always sampled spends: public, and a bound for all.
    Each record's own is in the table of records, which belongs to the silos.
    """
    personal.check(rounds)
    return published_guarantee(published(personal), rounds, caveats)


@dataclasses.dataclass(frozen=True)
class Published:
    """What is public of a run with personal budgets; of ``Personal``, where not said otherwise.

    Attributes:
      setting: what is accounted.
      policy: how rates follow from budgets.
      records: how many there are.
      groups: of the public distribution.
      noise: law of the noise that is drawn.
    """

    setting: TwoStage
    policy: str
    records: int
    groups: tuple[tuple[float, float, int], ...]
    noise: accounting.NoiseLaw = "exact"


def published(personal: Personal) -> Published:
    """Leaves out what belongs to the silos."""
    return Published(
        personal.setting,
        personal.assignment.policy,
        len(personal.budgets),
        personal.groups,
        personal.noise,
    )


def published_guarantee(
    public: Published, rounds: int, caveats: tuple[str, ...] = ()
) -> accounting.Guarantee:
    """``personal_guarantee``, from what is public."""
    setting = public.setting
    cell = cell_of(setting.scheme(1.0))
    cap = accounting.epsilon(setting.event(1.0, rounds), setting.delta)
    # Said of every run: whether a person has several records is itself computed from them.
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
    return accounting.Guarantee(
        unit="record",
        adjacency="add-or-remove one record of one silo",
        trust="silo-local",
        epsilon=cap,
        delta=setting.delta,
        noise_multiplier=setting.noise_multiplier,
        steps=rounds * setting.local_steps,
        status="upper bound",
        accountant=cell.accountant,
        sampling=f"rpdp ({public.policy}): each record by its own Poisson coin, with "
        f"{HOW[public.policy]}; {setting.local_steps} local steps in each of {rounds} rounds, each "
        f"silo in a round with probability {setting.participation_prob:.4g}; the epsilon above is "
        "that of a record that is always sampled, every record keeps its own "
        f"({_declared(public)}; the silos' table of records has what each spent); noise added "
        "inside the silo at every step",
        assumptions=(
            *cell.assumptions,
            *ASSUMPTIONS,
            *accounting.noise_assumptions(
                public.noise, cap, setting.delta, rounds * setting.local_steps
            ),
        ),
        caveats=(*extra, *caveats),
        released="every update that a silo sends, which silos took part, and every global model",
    )


def _declared(public: Published) -> str:
    if not public.groups:
        return "budgets come from a column, which is not published"
    low, high = public.groups[0][0], public.groups[-1][0]
    return f"budgets are declared to be spread between {low:.4g} and {high:.4g}"
