"""Membership and user inference: an attacker with the final model and some records ranks people.

The score is by how much training lowered the loss on a person's records. The runs serve only the
attack: no model that is trained here is saved or released.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from scipy import stats

from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE
from dpfl_jax.audit import Audit
from dpfl_jax.audit.attacks.simulate import refuse_filtered
from dpfl_jax.audit.proof import guessed
from dpfl_jax.clipping import NoClip
from dpfl_jax.config import RunConfig
from dpfl_jax.data.store import Store, UserView
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.federation import federated_run
from dpfl_jax.federation.accountant import dominating_event
from dpfl_jax.federation.isrl import isrl_run
from dpfl_jax.federation.isrl.message import SiloData
from dpfl_jax.federation.isrl.privacy import at_one_delta
from dpfl_jax.federation.mechanisms import SiloMechanism
from dpfl_jax.federation.participation import Records
from dpfl_jax.mechanisms import NoNoise, non_private
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import data_parallel_mesh, make_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.algorithm import RunResult
from dpfl_jax.run.driver import drive
from dpfl_jax.training.central import Central
from dpfl_jax.training.central_run import prepare
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.fitting import train
from dpfl_jax.training.start import starting_params, trained_by_name

PyTree = Any
_Result = TypeVar("_Result", bound=RunResult)
_FEWEST = 40


@dataclasses.dataclass(frozen=True)
class Claim:
    """The claim that an audit of the final model tests; ``relation`` is the adjacency."""

    event: Any
    delta: float
    epsilon: float
    relation: Any = ADD_OR_REMOVE


@dataclasses.dataclass(frozen=True)
class Attacked:
    """A configuration in which a fair coin for each person decides who takes part.

    Attributes:
      units: number of people who may take part.
      word: what they are called, such as "users".
      train: ``(inside, private, key) -> (gains, claim)``: trains on the people for whom ``inside``
        (bool [n]) is true, and returns by how much training lowered the loss on the attacker's
        records of each person (float [n]). Without privacy the claim is None, and silos add no
        noise but still clip, because their learning rates are made for clipped gradients.
    """

    units: int
    word: str
    train: Callable[[np.ndarray, bool, RootKey], tuple[np.ndarray, Claim | None]]


def participation(
    config: Any, key: RootKey, console: Console, *, membership: bool, confidence: float = 0.95
) -> tuple[dict[str, Any], list[Audit]]:
    """Trains with a random half of the people, with and without privacy, and ranks everyone.

    With ``membership`` the attacker holds the records that may have been trained on (membership
    inference): then the coins prove a lower bound on epsilon, with the bound for any mechanism.
    Otherwise the attacker holds other records of the same people (Kandpal et al. 2024, "User
    inference attacks on large language models"), and half of each person's records take part.

    Args:
      config: configuration of any kind of run.
      key: root key of coins, sampling and noise; not the key of a run.
      console: shows messages.
      membership: whether the attacker holds the records that are trained on, or others.
      confidence: confidence of what is proved.

    Returns:
      Areas under the ROC curve of the rankings (JSON values), and what was proved.

    Raises:
      BadInputError: there are too few people, or the configuration has no guarantee to attack.
    """
    attacked = _attacked(config, membership, console)
    if attacked.units < _FEWEST:
        raise BadInputError(
            f"only {attacked.units} {attacked.word} may take part, but a ranking needs {_FEWEST}: "
            "take more data" + ("" if membership else ", or attack with --membership")
        )
    inside = key.numpy("audit-coins").random(attacked.units) < 0.5
    aucs, audits = {}, []
    for name in ("with_privacy", "without_privacy"):
        console.print(f"training {name.replace('_', ' ')}", highlight=False)
        gain, claim = attacked.train(inside, name == "with_privacy", key.child(name))
        if not np.isfinite(gain).all():
            raise BadInputError(
                f"training {name.replace('_', ' ')} ended in losses that are not finite: lower the "
                "learning rate"
            )
        rank = stats.mannwhitneyu(gain[inside], gain[~inside])
        aucs[name] = float(rank.statistic / (inside.sum() * (~inside).sum()))
        if membership and claim is not None and math.isfinite(claim.epsilon):
            how = f"{len(inside)} {attacked.word}, {inside.sum()} of them in"
            given = (gain, inside, claim.event, claim.delta, confidence)
            audit = guessed(*given, relation=claim.relation, name="the final model", how=how)
            audits.append(dataclasses.replace(audit, claimed=claim.epsilon))
    sizes = (int(inside.sum()), int((~inside).sum()))
    # Standard deviation of the area under a useless attack (Mann and Whitney 1947).
    chance = float(np.sqrt((sum(sizes) + 1) / (12.0 * sizes[0] * sizes[1])))
    summary = {"auc": aucs, "users_in": sizes[0], "users_out": sizes[1], "chance_deviation": chance}
    return summary, audits


def _attacked(config: Any, membership: bool, console: Console) -> Attacked:
    attack = {"central": _central, "silos": _federated, "isrl": _silos}[config.variant]
    return attack(config, membership, console)


def _parts(store: Store, membership: bool) -> tuple[Store, Callable[[np.ndarray], Store]]:
    """The attacker's records of all people, and a function: who takes part -> records to train on.

    With ``membership`` both are all records; otherwise the attacker has every second one.
    """
    counts, step = np.diff(store.user_offsets), 1 if membership else 2
    people = np.flatnonzero(counts >= step)

    def trains(inside: np.ndarray) -> Store:
        return UserView(store, people[inside], every=step)

    others = np.full(len(people), step - 1)
    return UserView(store, people, first=others, every=step), trains


def _by_user(losses: np.ndarray, store: Store) -> np.ndarray:
    return np.add.reduceat(losses, store.user_offsets[:-1]) / np.diff(store.user_offsets)


def _finished(result: _Result) -> _Result:
    if result.interrupted is not None:
        raise StoppedError("the audit was stopped, and nothing of it is kept: run it again")
    return result


def _central(config: RunConfig, membership: bool, console: Console) -> Attacked:
    if not config.mechanism.private:
        raise BadInputError("mechanism.kind=none is not private: there is nothing to audit")
    ready, mesh = prepare(config, console), make_mesh(**config.execution.mesh.axes)
    refuse_filtered(ready.mechanism)
    if ready.calibrated.population.shared:
        raise BadInputError(
            "this attack decides for each person whether they take part, but records of these data "
            "have several owners: attack the mechanism instead (dpfl audit --simulate)"
        )
    held, trains = _parts(ready.train, membership)
    assert ready.data is not None
    params, _ = starting_params(config, ready.data, ready.model, mesh, console)
    trainable = trained_by_name(config.model, ready.model)
    evaluator = Evaluator(ready.model.loss, mesh, config.eval.batch_size)
    before = evaluator.measure(params, held)[0]
    execution = config.execution.model_copy(update={"examples_at_once": None, "split_users": False})

    def trained(inside: np.ndarray, private: bool, key: RootKey) -> Any:
        used = trains(inside)
        # Calibrated again, because fewer users take part.
        mechanism, privacy = config.mechanism, config.privacy
        if not private:
            budget = min(mechanism.compute_budget, float(used.num_examples))
            mechanism = non_private(batch_size=budget)
        calibrated = mechanism.calibrate(
            mechanism.participation.population(used.user_offsets),
            config.train.steps,
            epsilon=privacy.epsilon,
            noise_multiplier=privacy.noise_multiplier,
            delta=ready.calibrated.delta,
            optimizer=ready.optimizer,
        )
        plan = Plan(calibrated, used, execution, mesh)
        run = Central(ready.model.loss, params, plan, ready.optimizer, trainable)
        result = _finished(train(run, key=key, console=console))
        gain = before - evaluator.measure(result.params, held)[0]
        claim = None
        if private:
            claim = Claim(plan.event(), plan.delta, result.guarantee.epsilon)
        return _by_user(gain, held), claim

    return Attacked(held.num_users, "users", trained)


def _federated(config: RunConfig, membership: bool, console: Console) -> Attacked:
    if not config.mechanism.private:
        raise BadInputError(
            f"mechanism.kind={config.mechanism.kind} is not private: there is nothing to audit"
        )
    subjects = federated_run.read_subjects(config)
    held, trains = _parts(subjects.train, membership)

    def trained(inside: np.ndarray, private: bool, key: RootKey) -> Any:
        some = dataclasses.replace(subjects, train=trains(inside))
        mechanism: Any = config.mechanism
        if not private and mechanism.participation.personal:  # personal rates follow from noise
            drawn = Records(sampling_prob=1.0)
            mechanism = SiloMechanism(participation=drawn, clip=NoClip(), noise=NoNoise())
        now = config.model_copy(update={"mechanism": mechanism})
        ready = federated_run.prepare(now, console, some)
        algorithm = ready.algorithm() if private else ready.without_privacy()
        result = _finished(drive(algorithm, key=key, console=console))
        evaluator = Evaluator(ready.model.loss, data_parallel_mesh(), config.eval.batch_size)
        start = ready.model.init(jax.random.key(config.init_seed))
        before, after = (evaluator.measure(p, held)[0] for p in (start, result.params))
        claim = None
        if private:
            epsilon = ready.guarantee(ready.steps).epsilon
            claim = Claim(dominating_event(ready.federation, ready.delta), ready.delta, epsilon)
        return _by_user(before - after, held), claim

    return Attacked(held.num_users, "subjects", trained)


def _silos(config: RunConfig, membership: bool, console: Console) -> Attacked:
    """Attacks pairs of a training and a held-out record of one silo; a coin chooses one of them."""
    if not membership:
        raise BadInputError(
            "an ISRL-DP guarantee is for each record: attack it with --membership, which holds "
            "the records themselves"
        )
    ready = isrl_run.prepare(config, console)
    if ready.parameters.noise is None:
        raise BadInputError("privacy.epsilon=null is not private: there is nothing to audit")
    parameters = ready.parameters
    whole, spare = ready.records.train, ready.records.test
    pairs = np.minimum(whole.sizes, spare.sizes)
    owner = np.repeat(np.arange(len(pairs)), pairs)
    place = np.concatenate([np.arange(n) for n in pairs])
    first, second = (jax.tree.map(lambda x: x[owner, place], d.examples) for d in (whole, spare))

    def trained(inside: np.ndarray, private: bool, key: RootKey) -> Any:
        where = owner[inside], place[inside]
        examples = jax.tree.map(
            lambda x, y: x.at[where].set(y[where]), whole.examples, spare.examples
        )
        data = SiloData(examples, whole.sizes)
        ran = parameters if private else dataclasses.replace(parameters, noise=None)
        records = dataclasses.replace(ready.records, train=data)
        run = dataclasses.replace(ready, records=records, parameters=ran)
        w = _finished(drive(run.algorithm(), key=key, console=console)).params
        loss = jax.vmap(ready.loss.eval_loss, (None, 0))
        start = jnp.zeros_like(w)
        gains = [np.asarray(loss(start, x) - loss(w, x), np.float64) for x in (first, second)]
        claim = None
        if private:
            worst = max(at_one_delta(parameters.noise or []), key=lambda z: z.epsilon)
            claim = Claim(worst.event, worst.budget.delta, worst.epsilon, REPLACE)
        return gains[1] - gains[0], claim

    return Attacked(len(owner), "pairs of records", trained)
