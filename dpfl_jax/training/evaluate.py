"""Held-out loss and accuracy, by example and by user; samples of text; personalisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import stats

from dpfl_jax.clipping import Trainable, join, split
from dpfl_jax.data.packing import example_lengths, lengths_warning
from dpfl_jax.data.pipeline import local_columns, ship_columns
from dpfl_jax.data.store import Readable
from dpfl_jax.data.tokenizers import Tokenizer, prompt_ids
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.participation import mean_of_examples
from dpfl_jax.mesh import SEQUENCE_AXIS, make_mesh, replicated, unit_axes, unit_parts
from dpfl_jax.models import LanguageModel
from dpfl_jax.models.generate import generate
from dpfl_jax.randomness import key_argument
from dpfl_jax.task import Task

PyTree = Any
# Long enough to show the style, and a temperature at which small models stay coherent.
_TIMES, _LENGTH, _TEMPERATURE, _TOP_K = 4, 28, 0.5, 40
# Texts are cut to one of these parts of a row, if they fill that many batches: each is a program.
_PARTS, _WORTH = (8, 4, 2), 8


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Mean losses over held-out users.

    Attributes:
      loss: mean over examples.
      loss_by_user: mean over users of the mean over each user's examples.
      examples: examples evaluated.
      users: users evaluated.
      accuracy: share of examples whose label is predicted, or of pairs whose chosen answer has
        become likelier, against the rejected one, than it was for the reference (a tie counts
        1/2); None for other tasks.
      majority_accuracy: for classes: the accuracy of always predicting the most frequent label.
      base_rate: for two classes: the share of examples whose label is 1.
      auc: for two classes: how often an example of label 1 gets a higher score than one of label 0;
        None if all labels are equal.
    """

    loss: float
    loss_by_user: float
    examples: int
    users: int
    accuracy: float | None = None
    majority_accuracy: float | None = None
    base_rate: float | None = None
    auc: float | None = None


def summarize(losses: np.ndarray, user_offsets: np.ndarray) -> Evaluation:
    """Averages losses [n] of examples, grouped into users by ``user_offsets`` (cut off at n)."""
    offsets = np.minimum(user_offsets - user_offsets[0], len(losses))
    counts = np.diff(offsets)
    present = counts > 0
    user = np.repeat(np.arange(len(counts)), counts)
    sums = np.bincount(user, weights=losses, minlength=len(counts))
    return Evaluation(
        loss=float(losses.mean()),
        loss_by_user=float((sums[present] / counts[present]).mean()),
        examples=len(losses),
        users=int(present.sum()),
    )


def auc_of(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Area under the ROC curve, ties counted half; None if all labels (0 or 1) are the same."""
    ranks = stats.rankdata(scores.astype(np.float64))  # ranks have the dtype of the scores
    positive = labels == 1
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


class Evaluator:
    """Evaluates one model on one store, compiled once."""

    def __init__(
        self,
        loss_fn: Callable[..., jax.Array],
        mesh: Mesh,
        batch_size: int = 64,
        predict: Callable[..., jax.Array] | None = None,
        right: Callable[[jax.Array], jax.Array] | None = None,
        classes: int = 0,
        cuts: bool = False,
    ) -> None:
        """Prepares the evaluation.

        Args:
          loss_fn: ``(params, example) -> scalar`` for one example.
          mesh: examples are split over its unit axes.
          batch_size: examples per device and batch.
          predict: ``(params, x) -> label``, compared with the ``label`` of an example that has one.
          right: ``loss -> hit``, if the loss says whether a prediction is right.
          classes: number of classes of the labels; 0 if they are not classes.
          cuts: whether short texts are evaluated together, without most of their padding; the loss
            must not depend on it.
        """
        key_argument(loss_fn, needed_without="evaluation")
        self._batch = batch_size * unit_parts(mesh)
        self._sharding = NamedSharding(mesh, PartitionSpec(unit_axes(mesh)))

        self._classes = classes
        self._cuts = cuts and mesh.shape.get(SEQUENCE_AXIS, 1) == 1

        def one(params: PyTree, example: Any) -> tuple[jax.Array, ...]:
            hit = score = jnp.float32(jnp.nan)
            if predict is not None and "label" in example:
                hit = (predict(params, example["x"]) == example["label"]).astype(jnp.float32)
            loss = loss_fn(params, example)
            if classes == 2:  # the log-odds of a cross-entropy
                zero, one = (
                    loss_fn(params, {**example, "label": jnp.full_like(example["label"], label)})
                    for label in (0, 1)
                )
                score = zero - one
            label = example["label"] if classes else 0
            return loss, hit if right is None else right(loss), score, jnp.float32(label)

        # Whole on every device: each process then has all losses.
        whole = None if self._sharding.is_fully_addressable else replicated(mesh)
        self._measure = jax.jit(jax.vmap(one, in_axes=(None, 0)), out_shardings=whole)

    def measure(self, params: PyTree, store: Readable) -> tuple[np.ndarray, np.ndarray]:
        """Returns losses and hits (NaN without labels), float32 [n], in store order."""
        losses, hits, *_ = self._columns(params, store)
        return losses, hits

    def _columns(self, params: PyTree, store: Readable) -> list[np.ndarray]:
        first, stop = int(store.user_offsets[0]), int(store.user_offsets[-1])
        mine = local_columns(self._sharding, self._batch, axis=0)
        columns = np.empty((4, stop - first), np.float32)
        pending: list[tuple[np.ndarray, Any]] = []
        for positions, length in self._batches(store):
            # The last batch repeats its last example instead of compiling for another shape.
            padded = np.pad(positions, (0, self._batch - len(positions)), mode="edge")
            examples = jax.tree.map(
                lambda x, n=length: x[:, :n] if n else x, store.read(padded[mine])
            )
            examples = ship_columns(examples, mine, self._batch, 0, self._sharding)
            pending.append((positions - first, self._measure(params, examples)))
        for places, measured in pending:
            columns[:, places] = [np.asarray(x, np.float32)[: len(places)] for x in measured]
        return list(columns)

    def _batches(self, store: Readable) -> Iterator[tuple[np.ndarray, int | None]]:
        """Positions of each batch, and the tokens to which its texts are cut; None: as they are."""
        left = np.arange(int(store.user_offsets[0]), int(store.user_offsets[-1]))
        if self._cuts and lengths_warning(store) is None:
            lengths = example_lengths(store, left)
            order = np.argsort(lengths, kind="stable")
            left, lengths = left[order], lengths[order]
            seq_len = store.read(left[:1])["tokens"].shape[-1]
            for size in (-(-seq_len // part) for part in _PARTS):
                short = np.searchsorted(lengths, size, "right") // self._batch * self._batch
                if short >= _WORTH * self._batch:
                    yield from ((part, size) for part in self._cut(left[:short]))
                    left, lengths = left[short:], lengths[short:]
        yield from ((part, None) for part in self._cut(left))

    def _cut(self, positions: np.ndarray) -> list[np.ndarray]:
        return [positions[i : i + self._batch] for i in range(0, len(positions), self._batch)]

    @classmethod
    def of_model(
        cls, model: Any, task: Task, mesh: Mesh, batch_size: int, cuts: bool = False
    ) -> Evaluator:
        """Makes the evaluator of a model of the library, or of one that ``model.module`` built."""
        return cls(
            model.loss,
            mesh,
            batch_size,
            model.predict if task.kind == "classes" else None,
            getattr(model, "right", None),
            task.classes,
            cuts,
        )

    def of(self, store: Readable) -> Callable[[PyTree], dict[str, Any]]:
        """Returns ``params -> dict``, the evaluation on ``store`` that a run logs."""
        return lambda params: dataclasses.asdict(self(params, store))

    def __call__(self, params: PyTree, store: Readable) -> Evaluation:
        losses, hits, scores, labels = self._columns(params, store)
        result = summarize(losses.astype(np.float64), store.user_offsets)
        accuracy = float(hits.mean())
        result = dataclasses.replace(result, accuracy=None if np.isnan(accuracy) else accuracy)
        if not self._classes:
            return result
        shares = np.bincount(labels.astype(int), minlength=self._classes) / len(labels)
        result = dataclasses.replace(result, majority_accuracy=float(shares.max()))
        if self._classes != 2:
            return result
        return dataclasses.replace(result, base_rate=float(shares[1]), auc=auc_of(scores, labels))


def check_prompt(prompt: str, model: Any, tokenizer: Tokenizer | None) -> None:
    """Raises BadInputError if a model cannot continue ``prompt``."""
    if tokenizer is None or not isinstance(model, LanguageModel):
        raise BadInputError("eval.prompt is for language models, and this is not one: remove it")
    length, most = len(prompt_ids(tokenizer, prompt)), model.config.max_seq_len
    if length > most:
        raise BadInputError(
            f"eval.prompt is {length} tokens long, but the model takes at most {most} with what it "
            "adds: shorten it"
        )


def samples(
    model: LanguageModel, tokenizer: Any, prompt: str, params: Mapping[str, PyTree]
) -> dict[str, str]:
    """Continues ``prompt`` a few times with each of ``params``, with public seeds."""
    ids = prompt_ids(tokenizer, prompt)
    room = model.config.max_seq_len + 1 - len(ids)

    def text(trained: PyTree, seed: int) -> str:
        tokens = generate(
            model,
            trained,
            ids,
            max_tokens=min(_LENGTH, room),
            key=jax.random.key(seed),
            temperature=_TEMPERATURE,
            top_k=_TOP_K,
            stop_ids=tokenizer.stop_ids,
        )
        return " ".join((prompt + tokenizer.decode(list(tokens))).split())

    return {
        name: "\n".join(text(trained, seed) for seed in range(_TIMES))
        for name, trained in params.items()
    }


# ---- personalisation -----------------------------------------------------------------------------
# Charles et al. 2024, Appendix G.2: for each test user a few local epochs of SGD on half of their
# examples, then the loss on the other half. Evaluation only: no guarantee protects a user from
# whoever sees that user's copy of the model, and no copy is kept.


@dataclasses.dataclass(frozen=True)
class Personalization:
    """Mean losses over users, on the half of their examples that no copy was tuned on.

    Attributes:
      before: mean loss of the model itself.
      after: mean loss of each user's tuned copy.
      learning_rate: learning rate of the local epochs.
      users: number of scored users.
    """

    before: float
    after: float
    learning_rate: float
    users: int


def check_users(store: Readable) -> None:
    """Checks, before a run begins, that there are users to tune on and to score.

    Raises:
      BadInputError: fewer than two users with two examples.
    """
    if np.count_nonzero(np.diff(np.asarray(store.user_offsets)) >= 2) < 2:
        raise BadInputError(
            "personalisation needs at least two held-out users with two examples each: hold out "
            "more users, or set eval.personalize to false"
        )


def personalize(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    store: Readable,
    learning_rates: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3),
    *,
    epochs: int = 4,
    batch_size: int = 4,
    most_examples: int = 32,
    users_at_once: int = 16,
    trainable: Trainable = None,
    mesh: Mesh | None = None,
) -> Personalization:
    """Tunes one copy of the model for each user.

    The learning rate is the one that is best for half of the users; the others are scored. Only the
    mean losses leave this function: a user's copy stays on the devices until the next users' copies
    replace it. All processes must call it, and all get the same result.

    Args:
      loss_fn: ``(params, example) -> scalar``.
      params: the model.
      store: held-out users; those with fewer than two examples are left out.
      learning_rates: learning rates of SGD to try.
      epochs: local epochs (the paper: 4).
      batch_size: examples of a local step (the paper does not say).
      most_examples: most examples of a user; later ones are ignored.
      users_at_once: copies of the trained parameters in the memory of all devices together,
        rounded up to a multiple of the devices.
      trainable: which parameters a user tunes, as in ``fit``.
      mesh: users are split over its unit axes; default the mesh of the parameters.

    Raises:
      BadInputError: fewer than two users with two examples.
    """
    check_users(store)
    mesh = _mesh_of(params) if mesh is None else mesh
    parts = unit_parts(mesh)
    users_at_once = -(-users_at_once // parts) * parts
    sharding = NamedSharding(mesh, PartitionSpec(unit_axes(mesh)))
    mine = local_columns(sharding, users_at_once, axis=0)
    offsets = np.asarray(store.user_offsets)
    counts = np.minimum(np.diff(offsets), most_examples)
    chosen = np.flatnonzero(counts >= 2)
    half = most_examples // 2
    half += -half % batch_size
    # Whole on every device: each process then has all losses.
    whole = None if sharding.is_fully_addressable else replicated(mesh)
    scores = _scorer(mean_of_examples(loss_fn), epochs, batch_size, half, whole)
    trained, frozen = split(params, trainable)

    def losses(users: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
        result = []
        for start in range(0, len(users), users_at_once):
            part = users[start : start + users_at_once]
            padded = np.concatenate([part, np.repeat(part[-1:], users_at_once - len(part))])
            halves = _halves(store, offsets, counts, padded[mine], half)
            halves = ship_columns(halves, mine, users_at_once, 0, sharding)
            out = scores(trained, frozen, *halves, np.float32(rate))
            result.append([np.asarray(x)[: len(part)] for x in out])
        before, after = zip(*result)
        return np.concatenate(before), np.concatenate(after)

    tuning, scored = chosen[::2], chosen[1::2]

    def loss_of(rate: float) -> float:
        result = float(losses(tuning, rate)[1].mean())
        return result if np.isfinite(result) else np.inf  # NaN compares with nothing

    best = min(learning_rates, key=loss_of)
    before, after = losses(scored, best)
    return Personalization(float(before.mean()), float(after.mean()), best, len(scored))


def _mesh_of(params: PyTree) -> Mesh:
    for leaf in jax.tree.leaves(params):
        place = getattr(leaf, "sharding", None)
        if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
            return place.mesh
    return make_mesh(devices=jax.devices()[:1])


def _halves(
    store: Readable, offsets: np.ndarray, counts: np.ndarray, users: np.ndarray, half: int
) -> tuple[PyTree, PyTree]:
    """Every other example of each user to tune on, the rest to score; padded to ``half``."""
    out = []
    for first in (0, 1):
        positions = [np.arange(offsets[u] + first, offsets[u] + counts[u], 2) for u in users]
        mask = np.zeros((len(users), half), bool)
        for row, places in enumerate(positions):
            mask[row, : len(places)] = True
        examples = store.read(np.concatenate(positions))

        def scatter(leaf: np.ndarray, mask: np.ndarray = mask) -> np.ndarray:
            full = np.zeros((*mask.shape, *leaf.shape[1:]), leaf.dtype)
            full[mask] = leaf
            return full

        out.append({"examples": jax.tree.map(scatter, examples), "mask": mask})
    return out[0], out[1]


def _scorer(user_loss: Any, epochs: int, batch_size: int, half: int, whole: Any) -> Any:
    def one(
        params: PyTree, frozen: PyTree, tune: PyTree, score: PyTree, rate: Any
    ) -> tuple[jax.Array, jax.Array]:
        def loss(params: PyTree, user: PyTree) -> jax.Array:
            return user_loss(join(params, frozen), user)

        batches = jax.tree.map(
            lambda x: x.reshape(half // batch_size, batch_size, *x.shape[1:]), tune
        )

        def step(p: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            # A batch of padding has loss zero and gradient zero.
            gradient = jax.grad(loss)(p, batch)
            return optax.apply_updates(p, jax.tree.map(lambda g: -rate * g, gradient)), None

        tuned = params
        for _ in range(epochs):
            tuned, _ = jax.lax.scan(step, tuned, batches)
        return loss(params, score), loss(tuned, score)

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0, None)), out_shardings=whole)
