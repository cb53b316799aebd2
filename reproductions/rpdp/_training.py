"""One compiled program for many short runs: policies, budgets and seeds on one federation."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting.rdp import rdp_privacy_accountant

from dpfl_jax import accounting
from dpfl_jax.accounting import closed_forms
from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.config.execution import Execution
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.engine import OptimizerServer, make_release
from dpfl_jax.federation.federated import FederatedAlgorithm, FederatedSteps
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import SiloMechanism, fed_avg, local_item, rpdp
from dpfl_jax.federation.participation import SiloDraw, SiloFacts
from dpfl_jax.federation.personal import (
    BudgetTable,
    RateAssignment,
    RatePolicy,
    assign,
    public_batch,
    with_setting,
)
from dpfl_jax.federation.personal_budgets import BudgetDistribution, mean_over
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Poisson

READ_OFF = (
    "the noised sum is divided by the number of records in the private batch, which can be read "
    "off the size of the noise"
)


class _Buffers(RoundBuilder):
    """Buffers rounded up to two leading bits, so that runs share programs; nothing is cut off."""

    @functools.cached_property
    def row(self) -> int:
        return self.microbatch_size

    @functools.cached_property
    def capacity(self) -> int:
        plans = self.federation.silos
        bounds = [
            plans[i].mechanism.participation.size_bound(self.data.silos[i])
            for i in self.federation.participants
        ]
        rows = math.ceil(max(1, max(bounds, default=1)) / self.row)
        unit = 1 << max(0, rows.bit_length() - 2)
        return unit * math.ceil(rows / unit)


class _RealizedBatch(_Buffers):
    """The paper's denominator: the number of records in the private batch, at least 1."""

    def scale(self, silo: int, draw: SiloDraw) -> tuple[float, float]:
        stddev, _ = super().scale(silo, draw)
        return stddev, float(max(draw.size, 1))


@dataclasses.dataclass(frozen=True, eq=False)
class NotKept(BudgetTable):
    """Budgets that the run does not keep: what is accounted is not what is released.

    Attributes:
      unsound: why.
    """

    unsound: tuple[str, ...] = ()

    def spent(self, rounds: int) -> np.ndarray:
        """Whoever is sampled spends everything."""
        sampled = (self.assignment.rates > 0) & (np.minimum(self.assignment.stay, rounds) > 0)
        return np.where(sampled, np.inf, 0.0)

    def check(self, rounds: int) -> np.ndarray:
        """``spent``: nobody is promised less."""
        return self.spent(rounds)


@dataclasses.dataclass(frozen=True)
class Made:
    """A federation of one seed under one policy.

    Attributes:
      federation: with noise.
      assignment: rates and stays; of such as promise nothing only ``personal`` knows so. None: all
        records have one rate, which is the federation's.
      personal: what every record asked for and spends; None without personal budgets.
      realized_batch: whether sums are divided by the size of the private batch, as in the paper.
    """

    federation: Federation
    assignment: RateAssignment | None = None
    personal: BudgetTable | None = None
    realized_batch: bool = False


@dataclasses.dataclass(eq=False)
class Bench:
    """What all runs share.

    Attributes:
      model: with ``loss`` and ``predict``.
      data: what the silos hold.
      test: arrays ``x`` and ``label`` of all silos' test records.
      optimizer: of the silos: its name in Optax and its rate; its state is kept between rounds.
      local_steps: tau.
      rounds: T.
      participation: lambda.
      weights: of the silos in the server's average, public.
      microbatch_size: records processed at once.
    """

    model: Any
    data: FederatedData
    test: dict[str, np.ndarray]
    optimizer: tuple[str, float]
    local_steps: int
    rounds: int
    participation: float
    weights: Sequence[float]
    microbatch_size: int = 32

    def __post_init__(self) -> None:
        """Compiles nothing yet."""
        name, rate = self.optimizer
        self._optimizer: optax.GradientTransformation = getattr(optax, name)(rate)
        self._mesh = data_parallel_mesh(jax.devices()[:1])
        self._release: dict[tuple[Any, ...], Any] = {}
        self._held = jax.tree.map(jnp.asarray, self.test)

        def accuracy(params: Any, test: Any) -> jax.Array:  # as constants XLA would fold them
            guess = jax.lax.map(lambda x: self.model.predict(params, x), test["x"], batch_size=1024)
            return (guess == test["label"]).mean()

        self._accuracy = jax.jit(accuracy)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of model, optimiser and data."""
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        digest = hashlib.sha256(type(self.model).__name__.encode())
        digest.update(json.dumps([self.optimizer, str(shapes)]).encode())
        digest.update(np.asarray(self.data.silo_offsets, np.int64).tobytes())
        for arrays in (self.data.read(np.arange(self.data.num_records)), self.test):
            for name, leaf in sorted(arrays.items()):
                digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
                digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()

    def _federation(self, mechanism: SiloMechanism) -> Federation:
        plans = tuple(
            SiloPlan(mechanism, SiloFacts.of(silo), self.local_steps, weight)
            for silo, weight in zip(self.data.silos, self.weights, strict=True)
        )
        cohort = None
        if self.participation < 1:
            cohort = Poisson(self.participation)
        return Federation(plans, self.rounds, 1, cohort)

    def personal(
        self,
        setting: TwoStage,
        law: BudgetDistribution,
        policy: RatePolicy,
        seed: int,
        realized_batch: bool = False,
    ) -> Made:
        """The federation of a policy; budgets are drawn by the seed."""
        budgets = law.quantiles(np.random.default_rng(seed).random(self.data.num_records))
        return self.with_budgets(setting, budgets, mean_over(law), policy, realized_batch)

    def with_budgets(
        self,
        setting: TwoStage,
        budgets: np.ndarray,
        public: np.ndarray,
        policy: RatePolicy,
        realized_batch: bool = False,
    ) -> Made:
        """The federation of a policy, for given budgets and their public quantiles."""
        assignment = assign(policy, budgets, public, setting)
        if policy == "curve_fit":
            assignment = with_papers_stops(assignment, budgets, setting)
        share = public_batch(policy, public, setting)
        return self.assigned(setting, budgets, assignment, share, realized_batch)

    def assigned(
        self,
        setting: TwoStage,
        budgets: np.ndarray,
        assignment: RateAssignment,
        share: float,
        realized_batch: bool = False,
        unsound: tuple[str, ...] = (),
    ) -> Made:
        """The federation of given rates.

        Args:
          setting: what the rates are for; where that is not what runs, nobody is promised anything.
          budgets: float64 [n].
          assignment: rates and stays.
          share: mean rate in the population, public: what sums are divided by.
          realized_batch: see ``Made``.
          unsound: why the rates keep no budget, if they do not.
        """
        federation = self._federation(rpdp())
        expected = [max(1.0, share * plan.facts.num_records) for plan in federation.silos]
        silos = np.repeat(np.arange(self.data.num_silos), np.diff(self.data.silo_offsets))
        names = tuple(str(i) for i in range(self.data.num_records))
        made = with_setting(federation, setting, expected)
        accounted = (setting.local_steps, setting.rounds, setting.participation_prob)
        runs = (self.local_steps, self.rounds, self.participation)
        if accounted != runs:
            unsound = (*unsound, f"steps, rounds and participation are {runs}, not {accounted}")
        if realized_batch:
            unsound = (READ_OFF, *unsound)
        personal = BudgetTable(setting, budgets, assignment, silos, names)
        if unsound:
            personal = NotKept(setting, budgets, assignment, silos, names, unsound=unsound)
        return Made(made, assignment, personal, realized_batch)

    def without_noise(self, batch_size: int) -> Made:
        """Clipped like private sums, at C = 1, but without noise."""
        federation = self._federation(local_item(batch_size=batch_size, clip_norm=1.0))
        return Made(federation.with_noise([0.0] * len(federation.silos)))

    def one_rate(
        self, batch_size: int, epsilon: float, delta: float, realized_batch: bool = False
    ) -> Made:
        """Minimum as in the authors' code: q = B / (smallest silo), noise for the least budget."""
        least = min(silo.num_records for silo in self.data.silos)
        rate = min(1.0, batch_size / least)
        sigma = accounting.calibrate_noise_multiplier(
            lambda s: accounting.events.two_stage(
                s, rate, self.participation, self.local_steps, self.rounds
            ),
            epsilon,
            delta,
        )
        setting = TwoStage(float(sigma), self.local_steps, self.rounds, self.participation, delta)
        n = self.data.num_records
        same = RateAssignment("minimum", np.full(n, rate), np.full(n, self.rounds), 0, {})
        federation = self._federation(rpdp())
        expected = [max(1.0, rate * silo.num_records) for silo in self.data.silos]
        made = with_setting(federation, setting, expected)
        return Made(made, same, realized_batch=realized_batch)

    def non_private(self, batch_size: int) -> Made:
        """FedAvg without clipping and noise."""
        return Made(self._federation(fed_avg(batch_size=batch_size)))

    def run(self, made: Made, params: Any, seed: int) -> np.ndarray:
        """Trains; returns test accuracy after every round, float64 [rounds]."""
        federation, data = made.federation, self.data
        if made.assignment is not None:
            data = data.with_rates(made.assignment.rates, made.assignment.stay)
        layout = federation.mechanism.layout  # of one compiled program
        if layout not in self._release:
            self._release[layout] = make_release(
                federation.mechanism,
                self.model.loss,
                self._optimizer,
                self._mesh,
                keep_state=True,
            )
        run = FederatedAlgorithm(
            loss_fn=lambda p, record: self.model.loss(p, record),  # no keys: nothing drops out
            params=params,
            data=data,
            federation=federation,
            local_optimizer=self._optimizer,
            delta=1.0 / self.data.num_records,
            mesh=self._mesh,
            server=OptimizerServer(),
            keep_local_state=True,
            execution=Execution(microbatch_size=self.microbatch_size),
        )
        key, found, state = RootKey.from_seed(seed), [], run.init()
        builder = _RealizedBatch if made.realized_batch else _Buffers
        work = FederatedSteps(run, key, 0, builder=builder, release=self._release[layout])
        for _, pieces in work.inputs():
            state, _ = work.step(state, pieces)
            found.append(float(self._accuracy(state.params, self._held)))
        if made.personal is not None:
            made.personal.check(self.rounds)
        return np.array(found)


def with_papers_stops(
    assignment: RateAssignment, budgets: np.ndarray, setting: TwoStage
) -> RateAssignment:
    """Rates whose records leave where the paper's budget accountant stops them (section 6.2).

    That is by the Renyi epsilon that the rates were fitted to, which is above the tight one; of
    rates in three digits, of which there are few.
    """
    rounded = [float(f"{rate:.3g}") for rate in assignment.rates.tolist()]
    curves = (_renyi_epsilons(rate, setting) for rate in rounded)
    rounds = [bisect.bisect_right(c, b) for c, b in zip(curves, budgets.tolist(), strict=True)]
    stay = np.minimum(assignment.stay, rounds)
    early = int((stay < setting.rounds).sum())
    return dataclasses.replace(assignment, stay=stay, violations=early)


@functools.lru_cache(maxsize=1 << 14)
def _renyi_epsilons(rate: float, setting: TwoStage) -> tuple[float, ...]:
    """After 1, 2, ... rounds."""
    sigma, tau, rounds, lam, delta = setting.closed_form()
    orders = closed_forms.AUTHORS_ORDERS
    a_round = closed_forms.two_stage(orders, rate, sigma, tau, lam)
    return tuple(
        rdp_privacy_accountant.compute_epsilon(orders, t * a_round, delta)[0]
        for t in range(1, rounds + 1)
    )


def torch_init(params: Any, seed: int) -> Any:
    """Dense layers as PyTorch starts them: uniform within 1 / sqrt(inputs), biases too."""
    rng = np.random.default_rng([seed, 1])

    def layer(tree: Any) -> Any:
        if "kernel" not in tree:
            return {name: layer(part) for name, part in tree.items()}
        bound = 1 / math.sqrt(np.prod(tree["kernel"].shape[:-1]))
        return {
            name: jnp.asarray(rng.uniform(-bound, bound, leaf.shape), jnp.float32)
            for name, leaf in tree.items()
        }

    return layer(params)
