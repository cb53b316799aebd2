"""How many people have which label, with noise of its own, in the guarantee of a run.

    x_u = the shares of user u's rows that have each label            # norm at most 1
    h = sum over training users of floor(x_u s) + integer noise, entry by entry

with s grid steps to 1, so that the noise's standard deviation is at least sigma. A run releases one
such histogram, ever: it is kept in the run's directory, and asked for again it is the same.
"""

from __future__ import annotations

import collections
import dataclasses
import fcntl
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting
import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting.statement import Statement, cost, read_values, whole_number
from dpfl_jax.data import load_dataset
from dpfl_jax.data.load import template_of
from dpfl_jax.errors import BadInputError, positive, require
from dpfl_jax.noise.exact import STDDEV, draw_integer
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import open_plain, read_root_key, write_atomically
from dpfl_jax.synthesis.writer import real_rows
from dpfl_jax.training.central_statement import restate as restate_training
from dpfl_jax.training.export import FinishedRun
from dpfl_jax.training.start import data_section

FILE = "label_histogram.json"
_ASSUMPTIONS = (
    "that a histogram of labels would be released, its labels and its noise were fixed before "
    "looking at one user's data, and without looking at the trained model",
    "a user adds the shares of their own rows to the histogram, whose norm is at most 1; its noise "
    "is drawn in integers, and added to integers",
)


def with_histogram(stated: Statement, noise_multiplier: float, labels: int) -> Statement:
    """Returns the statement of a run that has also released a histogram of labels.

    Args:
      stated: the statement of the run.
      noise_multiplier: sigma, the standard deviation of the noise on each entry.
      labels: number of entries.
    """
    privacy = stated.privacy
    # proof: histogram-event-1
    event_of_histogram = dp_accounting.GaussianDpEvent(noise_multiplier)
    cases = [
        [accounting.events.composed(event, event_of_histogram) for event in case]
        for case in stated.cases
    ]
    made = dataclasses.replace(
        privacy,
        epsilon=cost(cases, privacy.delta, stated.relation),
        accountant=f"{privacy.accountant}; composed with the histogram's Gaussian sum",
        sampling=f"{privacy.sampling}; then one histogram of {labels} labels, in which every user "
        f"counts once, noise multiplier {noise_multiplier:.7g}",
        assumptions=(*privacy.assumptions, *_ASSUMPTIONS),
        released=f"{privacy.released}, and the noisy histogram of labels",
    )
    # Advisories on runs like this one find its settings where they look for them.
    histogram = {"noise_multiplier": noise_multiplier, "labels": labels}
    basis = {**stated.basis, "histogram": histogram}
    return Statement.of(made, basis, cases).model_copy(update={"library": stated.library})


def restate(basis: dict[str, Any]) -> Statement:
    """Computes the statement of a run and its histogram with this basis.

    Raises:
      BadInputError: no mechanism has these settings.
    """
    histogram = basis["histogram"]
    sigma, labels = histogram["noise_multiplier"], whole_number(histogram, "labels", 2)
    positive("noise_multiplier of the histogram", sigma)
    training = {name: value for name, value in basis.items() if name != "histogram"}
    return with_histogram(restate_training(training), sigma, labels)


def released_histogram(
    kept: FinishedRun, epsilon: float, console: Any
) -> tuple[dict[str, float], Statement]:
    """Releases the histogram of a run's first column, or returns the one that it has released.

    Args:
      kept: the run.
      epsilon: what the histogram alone costs, at the run's delta.
      console: prints for people.

    Returns:
      The noisy number of people of each label, and the statement of the run with the histogram.

    Raises:
      BadInputError: the run has no such column, no guarantee for users, or other data than it was
        trained on; or it has released another histogram, or the ledger refuses the charge.
    """
    stated, words = kept.stated, _labels(kept)
    privacy = stated.privacy
    positive("the histogram's epsilon (--label-epsilon)", epsilon)
    if not privacy.private:
        raise BadInputError(
            f"the run in {kept.path} has no guarantee that a histogram could be a part of: give "
            "the number of rows of each label with --label"
        )
    plain = privacy.unit == "user" and privacy.adjacency == "add-or-remove one user"
    if stated.basis.get("system") != "central" or not plain or stated.groups:
        raise BadInputError(
            f"a histogram counts users once each, but the run in {kept.path} protects "
            f"{privacy.unit}s ({privacy.adjacency}): give the number of rows of each label with "
            "--label"
        )
    # Of two commands at once the second finds what the first has released.
    with open_plain(kept.path / "run.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _released(kept, epsilon, words, console)


def _released(
    kept: FinishedRun, epsilon: float, words: tuple[str, ...], console: Any
) -> tuple[dict[str, float], Statement]:
    stated, config, privacy = kept.stated, kept.config, kept.stated.privacy
    file = kept.path / FILE
    sigma = accounting.calibrate_noise_multiplier(
        dp_accounting.GaussianDpEvent, epsilon, privacy.delta
    )
    key = read_root_key(kept.path / "private")
    if file.exists():
        known = read_values(file, FILE)
        seal = known.pop("seal", None) if isinstance(known, dict) else None
        if seal != key.keyed_digest("histogram", json.dumps(known)):
            raise BadInputError(f"{file} was changed after it was written: bring it back")
        if known["epsilon"] != epsilon:
            raise BadInputError(
                f"the run in {kept.path} has released a histogram at epsilon {known['epsilon']:g}, "
                f"and a second one would cost more: take that one, --label-epsilon "
                f"{known['epsilon']:g}"
            )
        people = dict(zip(words, known["people"], strict=True))
        return people, with_histogram(stated, known["noise_multiplier"], len(words))
    made = with_histogram(stated, sigma, len(words))
    console.print(f"with a histogram of labels: {made.privacy.summary()}", highlight=False)
    with console.status("reading the training data, for a histogram of labels"):
        train = config.mechanism.bounded(load_dataset(data_section(config)).train)
        if key.keyed_digest("data", str(train.fingerprint)) != kept.facts.get("data"):
            raise BadInputError(
                f"the data that {kept.path} names are not those that it was trained on: bring them "
                "back, or give the number of rows of each label with --label"
            )
        users = set(train.user_ids(range(train.num_users)))
        counts = _counts(config, users, words)
    if not counts:
        raise BadInputError(
            f"no row of the files of {kept.path} has a label and is of a user who was trained on: "
            "give the number of rows of each label with --label"
        )
    _charge(kept, sigma)
    sums = noisy_sums(counts, sigma, key_of(key, counts))
    content: dict[str, Any] = {"epsilon": epsilon, "noise_multiplier": sigma, "people": sums}
    content["seal"] = key.keyed_digest("histogram", json.dumps(content))
    write_atomically(file, json.dumps(content, indent=2) + "\n")
    return dict(zip(words, sums, strict=True)), made


def _labels(kept: FinishedRun) -> tuple[str, ...]:
    """The words of the first column of a run's template."""
    template = template_of(kept.config.data)
    words = () if template is None else template.columns[0].words
    if len(words) < 2:
        raise BadInputError(
            f"the run in {kept.path} has no labels: its data.template must begin with a column "
            "whose words data.categories lists, as in '<label> | <text>'"
        )
    return words


def _counts(config: Any, users: set[str], words: tuple[str, ...]) -> list[list[int]]:
    """How many rows of each of the users have each label, [users][labels]."""
    template = template_of(config.data)
    assert template is not None
    label = template.columns[0].name
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for user, row in real_rows(config):
        if user in users and row[label] is not None:
            counts[user][row[label]] += 1
    return [[count[word] for word in words] for count in counts.values()]


def key_of(key: RootKey, counts: Sequence[Sequence[int]]) -> RootKey:
    """The key of these counts' noise: others, whatever rows they are of, have other noise."""
    return key.child(f"histogram:{key.keyed_digest('counts', json.dumps(counts))}")


def noisy_sums(
    counts: Sequence[Sequence[int]], noise_multiplier: float, key: RootKey
) -> list[float]:
    """Returns for each label the sum over users of its share in their rows, plus noise.

    Args:
      counts: how many of a user's rows have each label, [users][labels].
      noise_multiplier: standard deviation of the noise on each sum.
      key: of this histogram only.

    Raises:
      BadInputError: there is too little noise to draw it in integers.
    """
    require(
        1e-3 < noise_multiplier < 1e6,
        "the noise multiplier of the histogram",
        noise_multiplier,
        "above 0.001 and below a million",
        "choose another --label-epsilon",
    )
    steps = math.floor(STDDEV / noise_multiplier)
    name, sums = f"labels:{noise_multiplier!r}", []
    for label in range(len(counts[0])):
        # proof: histogram-sum-1
        total = sum(of_user[label] * steps // sum(of_user) for of_user in counts)
        sums.append((total + draw_integer(key.words(name, label))) / steps)
    return sums


def _charge(kept: FinishedRun, noise_multiplier: float) -> None:
    """Reserves the histogram in the run's ledger, before it is released."""
    privacy, stated = kept.config.privacy, kept.stated.privacy
    if privacy.ledger is None:
        return
    ledger, name = accounting.Ledger(privacy.ledger), f"{kept.path.name}:{kept.facts['data'][:16]}"
    account = accounting.Account(privacy.account, stated.unit, stated.adjacency, stated.unit_key)
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if account not in ledger.accounts():
        raise BadInputError(
            f"the ledger {privacy.ledger} (privacy.ledger of {kept.path}) does not hold what the "
            "run itself has spent: bring it back, so that the histogram is added to that"
        )
    ledger.reserve(account, f"{name}:histogram", event, stated.delta, privacy.budget)
    ledger.commit(f"{name}:histogram")


def allotted(people: Mapping[str, float], rows: int) -> dict[str, int]:
    """Splits ``rows`` in proportion to noisy numbers of people; negative ones count as 0."""
    weights = np.maximum(np.array(list(people.values())), 0.0)
    if not weights.sum():
        weights = np.ones(len(weights))
    exact = weights / weights.sum() * rows
    counts = np.floor(exact).astype(int)
    largest = np.argsort(counts - exact, kind="stable")[: rows - int(counts.sum())]
    counts[largest] += 1
    return dict(zip(people, counts.tolist(), strict=True))
