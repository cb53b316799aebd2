"""Canaries in a run: artificial users, included or not by coin flips, for an audit to detect.

The guarantee for people does not depend on which canaries are in. Coins, designs and draws of
canaries come from separate keys, so that for people they are constants; each person is drawn with
the same key as without canaries; and divisor, clip norm and noise stay. A person's gradient is zero
in the coordinates that canaries are seen in, so it is no longer than before, and those coordinates
get noise like all others (docs/theory/README.md).

A designed gradient lies in one coordinate, which is not a parameter of the model, and is as long as
clipping allows. It moves nothing else: with such canaries only, the model is what it would be
without. Each made-up user with texts repeats one random word, and the model learns from it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.accounting import cells
from dpfl_jax.audit.proof import RunAudit
from dpfl_jax.audit.trials import LONG
from dpfl_jax.clipping import join
from dpfl_jax.clipping.rules import WholeGradientRule
from dpfl_jax.config.schema import AuditConfig
from dpfl_jax.data.owners import shared_store
from dpfl_jax.data.pipeline import is_token_store
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Calibrated
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import splits_parameters
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.algorithm import RunResult, StepOutput
from dpfl_jax.run.state import TrainState
from dpfl_jax.run.terms import Terms, value_digest
from dpfl_jax.sampling import Draw, Sampler
from dpfl_jax.training.central import Central, CentralSteps
from dpfl_jax.training.evaluate import Evaluator

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """People's rows, followed by those of canaries.

    Attributes:
      people: the store of people's rows.
      more: arrays [rows, ...] of canaries' rows, by the names of the store.
      number: int32 [rows], number of the canary whose designed gradient a row has; -1 for texts.
      user_offsets: int64 [users + 1], canaries last.
    """

    people: Readable
    more: dict[str, np.ndarray]
    number: np.ndarray
    user_offsets: np.ndarray

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at these positions; ``canary`` is -1 except for designed gradients."""
        offsets = np.asarray(self.people.user_offsets)
        behind = positions - offsets[-1]
        person = behind < 0
        rows = self.people.read(np.where(person, positions, offsets[0]))
        number = np.full(len(positions), -1, np.int32)
        if not person.all():
            number[~person] = self.number[behind[~person]]
            for name, array in rows.items():
                rows[name] = array = np.array(array)
                array[~person] = self.more[name][behind[~person]]
        return rows | {"canary": number}


@dataclasses.dataclass(frozen=True, eq=False)
class JointSampler:
    """Draws people as without canaries, and then canaries in the same way.

    Attributes:
      people: the sampler of the run without canaries.
      canaries: the sampler of the canaries that are in.
      first: position of the first canary's first row.
    """

    people: Sampler
    canaries: Sampler
    first: int

    @property
    def expected_size(self) -> float:
        """Expected number of users and canaries in a draw."""
        return self.people.expected_size + self.canaries.expected_size

    @property
    def group_size(self) -> int | None:
        """Rows of each user and canary; None: each unit is one row."""
        return self.people.group_size

    def size_bound(self, tail: float = 1e-15) -> int:
        """A number of users and canaries that a draw exceeds with probability at most ``tail``."""
        return self.people.size_bound(tail / 2) + self.canaries.size_bound(tail / 2)

    def bucket_bounds(self, sizes: tuple[int, ...], tail: float = 1e-15) -> tuple[int, ...]:
        """Bounds on the users and canaries of each bucket (``UserSampler.bucket_bounds``)."""
        parts = (self.people, self.canaries)
        bounds = [part.bucket_bounds(sizes, tail / 2) for part in parts]  # type: ignore[attr-defined]
        return tuple(map(sum, zip(*bounds, strict=True)))

    def draw(self, step: int) -> Draw:
        """Users first, then canaries."""
        people, more = self.people.draw(step), self.canaries.draw(step)
        positions = np.where(more.positions < 0, -1, more.positions + self.first)
        return Draw(
            # proof: canaries-sampling-1
            np.concatenate([people.units, more.units + self.first]),
            np.concatenate([people.positions, positions]),
        )


@dataclasses.dataclass(frozen=True)
class CanaryPlan(Plan):
    """A plan that draws canaries, too; what is stated and accounted covers people only.

    Attributes:
      people: the plan without canaries.
    """

    people: Plan

    def _check_population(self) -> None:
        """The plan ``people`` checks its data; canaries are not accounted."""

    @property
    def data_digest(self) -> str:
        return self.people.data_digest

    def sampler(self, key: RootKey) -> JointSampler:
        """Joins people's sampler with one over canaries, of the same mechanism and rate."""
        first = int(self.people.data.user_offsets[-1])
        offsets = np.asarray(self.data.user_offsets)
        mine = offsets[len(self.people.data.user_offsets) - 1 :] - first
        same = self.calibrated.at_own_rates()
        # proof: canaries-sampling-2
        return JointSampler(
            self.people.sampler(key), same.sampler(mine, key.child("canaries")), first
        )


class WithCanaries(Central):
    """A run with canaries in it."""

    def __init__(self, run: Central, audit: AuditConfig, key: RootKey) -> None:
        """Draws canaries.

        Args:
          run: the run without canaries.
          audit: how many canaries.
          key: key of coins and texts, used for nothing else; a resumed run must have the same. All
            runs with one root key have the same coins, and a published audit reveals them.

        Raises:
          BadInputError: the run cannot have canaries (``check_fit``).
        """
        check_fit(run.plan.calibrated, run.data, audit)
        if splits_parameters(run.mesh):
            raise BadInputError(
                "audit.canaries does not go with parameters that are split over devices: use "
                "execution.mesh with data alone, or remove the section audit"
            )
        self.people, self.audit, data = run, audit, run.plan.data
        group: Any = run.mechanism.group_size
        coins = key.numpy("coins")
        self.inside = coins.random(audit.canaries) < 0.5
        self.texts_inside = coins.random(audit.texts) < 0.5
        self.texts = _texts(data, audit.texts, group, key.numpy("texts"))
        numbers = np.repeat(np.flatnonzero(self.inside), group)
        offsets = np.asarray(data.user_offsets)
        like = data.read(offsets[:1])
        blank = {  # of ones, so that most losses of them are finite
            name: np.ones((len(numbers), *x.shape[1:]), x.dtype) for name, x in like.items()
        }
        texts = {name: x[np.repeat(self.texts_inside, group)] for name, x in self.texts.items()}
        more = {
            name: np.concatenate([blank[name], *([texts[name]] if texts else [])]) for name in like
        }
        number = np.concatenate([numbers, np.full(self.texts_inside.sum() * group, -1)])
        ends = offsets[-1] + group * np.arange(1, len(number) // group + 1)
        rows = Rows(data, more, number.astype(np.int32), np.concatenate([offsets, ends]))
        plan = CanaryPlan(
            **{f.name: getattr(run.plan, f.name) for f in dataclasses.fields(Plan)}
            | {"data": rows},
            people=run.plan,
        )
        params, optimizer = with_canary_coordinates(run.given, run.optimizer, audit, run.steps)
        trainable = _trainable(run.trainable)
        length = LONG * run.mechanism.clip_norm
        super().__init__(_loss(run.loss_fn, length), params, plan, optimizer, trainable)

    def terms(self) -> Terms:
        """The terms of the run without canaries, and a digest of the made-up users' texts."""
        terms = self.people.terms()
        if not len(self.texts_inside):  # designed gradients are in no sum of the model's
            return terms
        texts = value_digest([self.texts, self.texts_inside])
        return dataclasses.replace(terms, secret={**terms.secret, "texts": texts})

    def params(self, state: TrainState) -> PyTree:
        return super().params(state)["model"]

    def private_state(self, state: TrainState) -> np.ndarray:
        """Float32 [canaries, steps]: what was released along each direction, over the noise."""
        seen = np.asarray(state.opt_state["seen"]).T[: len(self.inside)]
        divisor = self.mechanism.participation.divisor
        return seen * np.float32(divisor / self.plan.calibrated.noise_stddev)

    def begin(self, key: RootKey, start: int) -> CanarySteps:
        steps = CanarySteps(self, key, start)
        drawn: Any = steps.sampler
        self._drawn = drawn.canaries
        return steps

    def audited(self, result: RunResult) -> RunAudit | None:
        if result.interrupted is not None:
            return None
        seen = result.private_state.astype(np.float32)
        seen[:, result.steps :] = np.nan  # nothing was released
        seen = cells.audit_statistic(self.plan.calibrated.matrix, seen, self.inside, self._drawn)
        return RunAudit(
            self.inside,
            seen,
            self.texts_inside,
            self._gains(result.params),
            self.audit.confidence,
            self.cost,
        )

    def without_privacy(self) -> Central:
        return self.people.without_privacy()

    @property
    def cost(self) -> dict[str, Any]:
        """What canaries cost, as JSON."""
        drawn, learnt = int(self.inside.sum()), int(self.texts_inside.sum())
        users = self.plan.population.num_users
        sentences = [
            f"{drawn} of {len(self.inside)} canaries with designed gradients were in: "
            f"{drawn / (users + drawn + learnt):.1%} of the users of a step, in computing; the "
            "model is the same without them"
        ] * bool(len(self.inside))
        sentences += [
            f"{learnt} of {len(self.texts_inside)} made-up users with texts were in, with "
            f"{users} people: {learnt / (users + learnt):.1%} of what the model learns is theirs"
        ] * bool(len(self.texts_inside))
        return {
            "canaries": len(self.inside),
            "inside": drawn,
            "texts": len(self.texts_inside),
            "texts_inside": learnt,
            "users": users,
            "share_of_computing": (drawn + learnt) / (users + drawn + learnt),
            "share_of_what_is_learnt": learnt / (users + learnt),
            "sentences": sentences,
        }

    def _gains(self, params: PyTree) -> np.ndarray:
        """By how much training lowered the loss on each made-up user's texts, float32.

        Texts with a higher loss improve more, whether or not they were in the run: so the value of
        a parabola fitted to all texts is subtracted.
        """
        if not len(self.texts_inside):
            return np.zeros(0, np.float32)
        count = len(next(iter(self.texts.values())))
        store = _Texts(self.texts, np.array([0, count]))
        evaluator = Evaluator(self.people.loss_fn, self.mesh)
        before, after = (evaluator.measure(p, store)[0] for p in (self.people.given, params))
        before, after = (
            x.reshape(len(self.texts_inside), -1).mean(axis=1) for x in (before, after)
        )
        degree = 2 if np.ptp(before) > 1e-3 else 0
        usual = np.polyval(np.polyfit(before, before - after, degree), before)
        return (before - after - usual).astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class _Texts:
    """A store of the texts of all made-up users, in or out."""

    arrays: dict[str, np.ndarray]
    user_offsets: np.ndarray

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[positions] for name, array in self.arrays.items()}


class CanarySteps(CentralSteps):
    """The steps of a run with canaries; metrics leave out designed gradients."""

    def check(self, state: TrainState, say: Callable[[str], object] = str) -> None:
        """Also checks that designed gradients reach the sum.

        Raises:
          BadInputError: the model's gradient of a blank row is not finite, so that its product with
            zero is not zero: canaries would be left out, and the audit would prove nothing.
        """
        run: Any = self.run
        if len(run.inside):
            row = run.people.plan.data.read(np.asarray(run.data.user_offsets)[:1])
            blank = {name: np.ones_like(x[0]) for name, x in row.items()}
            people = run.people
            slope = jax.jit(jax.grad(lambda p: people.loss_fn(join(p, people.frozen), blank)))(
                people.trained
            )
            if not all(np.isfinite(x).all() for x in jax.tree.leaves(slope)):
                raise BadInputError(
                    "the model's gradient of a row of ones is not finite, so that canaries would "
                    "be left out: set audit.canaries=0 audit.texts=400, or remove the section audit"
                )
        super().check(state, say)

    def step(self, state: TrainState, inputs: Any) -> tuple[TrainState, StepOutput]:
        """Takes a step, and leaves designed gradients out of its metrics."""
        state, output = super().step(state, inputs)
        run: Any = self.run
        positions = self.sampler.canaries.draw(inputs.step).positions  # type: ignore[attr-defined]
        numbers = run.data.number[positions[:, 0] if positions.ndim > 1 else positions]
        count = np.float32((numbers >= 0).sum())
        stats = dataclasses.replace(
            output.stats,
            units=output.stats.units - count,
            clipped=output.stats.clipped - count,
            norm=output.stats.norm - count * np.float32(LONG * run.mechanism.clip_norm),
        )
        return state, dataclasses.replace(output, stats=stats)


def check_fit(calibrated: Calibrated, data: Readable, audit: AuditConfig) -> None:
    """Raises BadInputError unless a run of this mechanism, on these data, can have canaries."""
    mechanism = calibrated.mechanism
    if not mechanism.private or not hasattr(mechanism.participation, "scheme"):
        raise BadInputError(
            f"canaries are sampled like users, which mechanism.kind={mechanism.kind} cannot: it "
            "has no sampling scheme; remove the section audit, or use els or uls"
        )
    if mechanism.clips_user_updates:
        raise BadInputError(
            "canaries have designed gradients, but user updates "
            "(mechanism.user_learning_rate) have none: remove the section audit; dpfl audit "
            "--simulate attacks the mechanism"
        )
    if mechanism.budget is not None:
        raise BadInputError(
            "canaries are sampled like users, but users leave once their budgets are spent "
            f"(mechanism.kind={mechanism.kind}): remove the section audit, or use uls or els"
        )
    if shared_store(data) is not None:
        raise BadInputError(
            "canaries are users whose records have one owner, but records of the data have several "
            "owners: remove the section audit; dpfl audit --simulate attacks the mechanism"
        )
    if not isinstance(mechanism.clip, WholeGradientRule):
        raise BadInputError(
            f"mechanism.clip is {mechanism.clip.kind}, and what a canary adds is read off releases "
            "of gradients that are clipped as a whole, to one norm: remove the section audit, or "
            "use flat or normalized; dpfl audit --simulate attacks the mechanism"
        )
    if calibrated.noise_multiplier == 0:
        raise BadInputError(
            "privacy.noise_multiplier is 0, which guarantees nothing: there is nothing to audit; "
            "remove the section audit"
        )
    if "canary" in data.read(np.asarray(data.user_offsets)[:1]):
        raise BadInputError(
            "the data have a column 'canary', which is the name of what an audit adds: rename it"
        )
    if audit.texts and not is_token_store(data):
        raise BadInputError("audit.texts is for language models of plain texts: set audit.texts=0")


def with_canary_coordinates(
    params: PyTree, optimizer: Any, audit: AuditConfig, steps: int
) -> tuple[PyTree, optax.GradientTransformation]:
    """Adds the coordinates of canaries to parameters and optimiser.

    The optimiser's state, which checkpoints keep, records what is released about canaries. Their
    coordinates are never updated.

    Args:
      params: the model's parameters.
      optimizer: the model's optimiser.
      audit: how many canaries.
      steps: number of steps of the run.
    """
    each = max(audit.canaries, 1)  # checkpoints keep no empty arrays

    def init(params: PyTree) -> PyTree:
        seen = jnp.zeros((steps, each))
        return {"model": optimizer.init(params["model"]), "seen": seen, "step": jnp.int32(0)}

    update_model = optax.with_extra_args_support(optimizer).update

    def update(
        gradient: PyTree, state: PyTree, params: PyTree = None, **more: Any
    ) -> tuple[PyTree, PyTree]:
        model_params = None if params is None else params["model"]
        updates, model = update_model(gradient["model"], state["model"], model_params, **more)
        seen = state["seen"].at[state["step"]].set(gradient["of_canaries"])
        still = jnp.zeros_like(gradient["of_canaries"])
        now = {"model": model, "seen": seen, "step": state["step"] + 1}
        return {"model": updates, "of_canaries": still}, now

    both = {"model": params, "of_canaries": jnp.zeros(each)}
    return both, optax.GradientTransformationExtraArgs(init, update)


def _loss(model_loss: Callable[..., jax.Array], length: float) -> Callable[..., jax.Array]:
    """The model's loss for data; for a canary a loss that is linear in its coordinate."""

    @functools.wraps(model_loss)  # it may take a key
    def loss(params: PyTree, example: PyTree, **keys: Any) -> jax.Array:
        number, coordinates = example["canary"], params["of_canaries"]
        data = {name: x for name, x in example.items() if name != "canary"}
        # proof: canaries-sensitivity-1
        return jnp.where(
            number < 0,
            model_loss(params["model"], data, **keys),
            length * (coordinates @ jax.nn.one_hot(number, coordinates.shape[0])),
        )

    return loss


def _trainable(choice: Any) -> Any:
    if choice is None:
        return None
    if callable(choice):
        return lambda name: name == "of_canaries" or choice(name.removeprefix("model/"))
    return {"model": choice, "of_canaries": True}


def _texts(
    data: Readable, users: int, each: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """``each`` texts of every made-up user, which repeat the user's word: [rows, ...].

    Words are drawn from the vocabulary, which is public.
    """
    if not users:
        return {}
    schema: Any = data.schema  # type: ignore[attr-defined]
    words = rng.choice(schema.vocab_size, size=users, replace=users > schema.vocab_size)
    tokens = np.repeat(words, each)[:, None] * np.ones(schema.seq_len, np.int32)
    return {"tokens": tokens.astype(np.int32), "mask": np.ones(tokens.shape, bool)}
