"""Held-out loss and accuracy, by example and by user; and what a language model writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import stats

from dpfl_jax.data.example_keys import key_argument
from dpfl_jax.data.pipeline import local_columns, ship_columns
from dpfl_jax.data.store import Readable
from dpfl_jax.data.tokenizers import Tokenizer, prompt_ids
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import replicated, unit_axes, unit_parts
from dpfl_jax.models import LanguageModel
from dpfl_jax.models.generate import generate
from dpfl_jax.task import Task

PyTree = Any
# Long enough to tell the manner, cool enough that small models stay on their way.
_TIMES, _LENGTH, _TEMPERATURE, _TOP_K = 4, 28, 0.5, 40


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Mean losses over held-out users.

    Attributes:
      loss: mean over examples.
      loss_by_user: mean over users of the mean over each user's examples.
      examples: examples evaluated.
      users: users evaluated.
      accuracy: share of examples whose label is predicted, or of pairs whose chosen answer has
        become likelier, beside the rejected one, than it was for the reference (1/2 if neither
        has); None of other tasks.
      majority_accuracy: of classes: what the most frequent label alone would reach.
      base_rate: of two classes: the share of examples whose label is 1.
      auc: of two classes: how often an example of label 1 gets a higher score than one of label 0;
        None if all labels are one.
    """

    loss: float
    loss_by_user: float
    examples: int
    users: int
    accuracy: float | None = None
    majority_accuracy: float | None = None
    base_rate: float | None = None
    auc: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return dataclasses.asdict(self)


def summarize(losses: np.ndarray, user_offsets: np.ndarray) -> Evaluation:
    """Averages per-example losses [n] of the users given by ``user_offsets`` (cut off at n)."""
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
    ranks = stats.rankdata(scores.astype(np.float64))  # else ranks are float32, too
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
    ) -> None:
        """Prepares the evaluation.

        Args:
          loss_fn: ``(params, example) -> scalar`` for one example.
          mesh: examples are split over its unit axes.
          batch_size: examples per device and batch.
          predict: ``(params, x) -> label``, compared with the ``label`` of an example that has one.
          right: ``loss -> hit``, where the loss tells.
          classes: how many the labels have, where they are classes.
        """
        key_argument(loss_fn, needed_without="evaluation")
        self._batch = batch_size * unit_parts(mesh)
        self._sharding = NamedSharding(mesh, PartitionSpec(unit_axes(mesh)))

        self._classes = classes

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
        parts = []
        for start in range(first, stop, self._batch):
            # The last batch repeats its last example instead of compiling for another shape.
            positions = np.minimum(np.arange(start, start + self._batch), stop - 1)
            examples = ship_columns(
                store.read(positions[mine]), mine, self._batch, 0, self._sharding
            )
            parts.append(self._measure(params, examples))
        whole = (np.concatenate([np.asarray(p[i], np.float32) for p in parts]) for i in range(4))
        return [column[: stop - first] for column in whole]

    @classmethod
    def of_model(cls, model: Any, task: Task, mesh: Mesh, batch_size: int) -> Evaluator:
        """The evaluation of a model of the library, or of one that ``model.module`` built."""
        return cls(
            model.loss,
            mesh,
            batch_size,
            model.predict if task.kind == "classes" else None,
            getattr(model, "right", None),
            task.classes,
        )

    def of(self, store: Readable) -> Callable[[PyTree], dict[str, Any]]:
        """``params -> dict``: what a run logs of ``store``."""
        return lambda params: self(params, store).to_json()

    def __call__(self, params: PyTree, store: Readable) -> Evaluation:
        """Returns the means on ``store``."""
        losses, hits, scores, labels = self._columns(params, store)
        found = summarize(losses.astype(np.float64), store.user_offsets)
        accuracy = float(hits.mean())
        found = dataclasses.replace(found, accuracy=None if np.isnan(accuracy) else accuracy)
        if not self._classes:
            return found
        shares = np.bincount(labels.astype(int), minlength=self._classes) / len(labels)
        found = dataclasses.replace(found, majority_accuracy=float(shares.max()))
        if self._classes != 2:
            return found
        return dataclasses.replace(found, base_rate=float(shares[1]), auc=auc_of(scores, labels))


def check_prompt(prompt: str, model: Any, tokenizer: Tokenizer | None) -> None:
    """Raises BadInputError if a model cannot go on with ``prompt``."""
    if tokenizer is None or not isinstance(model, LanguageModel):
        raise BadInputError("eval.prompt is for language models, which this is none: remove it")
    length, most = len(prompt_ids(tokenizer, prompt)), model.config.max_seq_len
    if length > most:
        raise BadInputError(
            f"eval.prompt is {length} tokens long, but the model takes at most {most} with what it "
            "adds: shorten it"
        )


def samples(
    model: LanguageModel, tokenizer: Any, prompt: str, params: Mapping[str, PyTree]
) -> dict[str, str]:
    """What a model writes after ``prompt`` with each of ``params``: a few times, public seeds."""
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
