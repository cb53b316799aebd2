"""What a run is shown beside: the same run without privacy, and what its models write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.console import Console

from dpfl_jax.data.tokenizers import Tokenizer, prompt_ids
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import NoNoise, non_private
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.models import LanguageModel
from dpfl_jax.models.generate import generate
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.driver import Pace
from dpfl_jax.training.central import Central, FitResult, train

PyTree = Any
# Long enough to tell the manner, cool enough that small models stay on their way.
_TIMES, _LENGTH, _TEMPERATURE, _TOP_K = 4, 28, 0.5, 40


def plain(
    run: Central,
    key: RootKey,
    evaluate: Callable[[PyTree], dict[str, Any]],
    pace: Pace,
    console: Console,
) -> FitResult:
    """Trains what ``run`` trains from where it starts, without noise (local steps: clipped).

    Args:
      run: the private one: data, compute budget, steps and optimiser are taken from it.
      key: of the baseline's draws alone.
      evaluate: as the private run's.
      pace: likewise.
      console: for people.
    """
    plan = run.plan
    execution = plan.execution.model_copy(update={"examples_at_once": None, "split_users": False})
    offsets = plan.data.user_offsets
    budget = min(plan.mechanism.compute_budget, float(offsets[-1] - offsets[0]))
    mechanism = non_private(batch_size=budget)
    if plan.mechanism.takes_local_steps:
        # Its optimiser is the server's, which is given updates. It clips, too.
        mechanism = dataclasses.replace(plan.mechanism, noise=NoNoise(), budget=None)
    calibrated = mechanism.calibrate(
        mechanism.participation.count(plan.data), plan.steps, delta=plan.delta
    )
    beside = Plan(calibrated, plan.data, execution, plan.mesh)
    return train(
        Central(run.loss_fn, run.given, beside, run.optimizer, run.trainable),
        key=key,
        evaluate=evaluate,
        pace=dataclasses.replace(pace, keep_best=False, patience=None),
        console=console,
    )


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
