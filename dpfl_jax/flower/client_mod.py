"""A Flower client mod: the app of somebody else trains, and ``PrivateClient`` releases its update.

What a client sends must not depend on its data in any other way. So the reply is made anew: it has
the arrays and nothing else of the app's reply. If training fails, the update counts as 0 and the
reply is noise. Messages that ask for anything but training are refused, without running the app.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.constant import ErrorCode

from dpfl_jax.errors import BadInputError

App = Callable[[Message, Context], Message]
FOLDER = "dpfl-folder"
UNSAID = "this client failed: its operator knows why"
_LEGACY = "fitins.parameters"
# The floating-point types that NumPy's own format can hold.
_FLOATS = (np.float16, np.float32, np.float64)
_log = logging.getLogger("flwr")


class _RefusedError(Exception):
    """A sentence for the server, in which nothing depends on the client's data."""


def client_mod(folder: str | None, budget: dict[str, Any]) -> Callable[..., Message]:
    """Returns the mod of ``dpfl_jax.flower.mod``."""

    def private(message: Message, context: Context, call_next: App) -> Message:
        try:
            return _answer(message, context, call_next, folder, budget)
        except _RefusedError as refusal:
            why = str(refusal)
        except Exception:  # the reason may depend on the data, so it is not sent
            _log.exception("dpfl_jax: nothing is sent")
            why = UNSAID
        return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, why), reply_to=message)

    return private


def _answer(
    message: Message, context: Context, call_next: App, folder: Any, budget: dict[str, Any]
) -> Message:
    kind = message.metadata.message_type
    if (asked := kind.partition(".")[0]) != "train":
        advice = "set fraction_evaluate=0.0" if asked == "evaluate" else "set initial parameters"
        raise _RefusedError(
            f"this client answers training alone, as its reply to {asked!r} would have no noise: "
            f"{advice} in the server's strategy"
        )
    name, before = _sent_arrays(message)
    update = {key: np.zeros(x.shape) for key, x in before.items() if x.dtype in _FLOATS}
    if not update:
        raise _RefusedError("the message holds no arrays of floating-point numbers to train")
    # A retry is recognised by its content, which the app may change.
    request = f"{kind} {message.content.object_id}"
    where = context.node_config.get(FOLDER, folder)  # the operator's before the app's
    if where is None:
        raise _RefusedError(f"this client has no folder: set {FOLDER} in --node-config")
    if not os.path.isabs(str(where)):  # in another working directory it would be a new budget
        raise _RefusedError(f"this client's folder is no absolute path: set {FOLDER} to one")
    # Here, as these take seconds to import, and every message starts a process.
    from dpfl_jax.accounting import BudgetExceededError
    from dpfl_jax.federation.client import PrivateClient

    client = PrivateClient(str(where), **budget)
    if not client.answered(request):
        try:
            client.reserve(request)  # a crash of the app can be seen, and so costs a round
        except BudgetExceededError as error:
            raise _RefusedError(str(error)) from None
        try:
            update = _update(before, list(update), call_next(message, context))
        except (Exception, SystemExit):
            _log.exception("dpfl_jax: training failed: the update counts as 0, and noise is sent")
    noised = client.release(update, request)
    arrays = {
        key: np.asarray(x + noised[key], x.dtype) if key in noised else x
        for key, x in before.items()
    }
    return Message(_reply(name, arrays), reply_to=message)


def _sent_arrays(message: Message) -> tuple[str, dict[str, np.ndarray]]:
    """The name and the arrays of the only ArrayRecord of the server's message."""
    records = message.content.array_records
    if len(records) != 1:
        raise _RefusedError(
            f"the message has {len(records)} ArrayRecords, but this client needs one"
        )
    ((name, record),) = records.items()
    try:
        return name, {key: array.numpy() for key, array in record.items()}
    except (ValueError, TypeError, EOFError):  # nothing is unpickled
        raise _RefusedError("the message's arrays are not serialized by NumPy") from None


def _update(before: dict[str, np.ndarray], keys: list[str], reply: Message) -> dict[str, Any]:
    """The arrays that the app returns under these keys, minus those that the server sent."""
    if reply.has_error():
        raise BadInputError(f"the app replied with an error: {reply.error.reason}")
    (record,) = reply.content.array_records.values()
    after = {key: record[key].numpy() for key in keys}
    if different := [key for key in keys if after[key].shape != before[key].shape]:
        raise BadInputError(f"the app changed the shapes of {different}: send them as they came")
    return {key: after[key].astype(np.float64) - before[key] for key in keys}


def _reply(name: str, arrays: dict[str, np.ndarray]) -> RecordDict:
    """A reply in which only the arrays depend on the client's data."""
    record = ArrayRecord({key: Array(x) for key, x in arrays.items()})
    if name != _LEGACY:
        return RecordDict({name: record, "metrics": MetricRecord({"num-examples": 1})})
    return RecordDict(
        {
            "fitres.parameters": record,
            "fitres.num_examples": MetricRecord({"num_examples": 1}),
            "fitres.metrics": ConfigRecord({}),
            "fitres.status": ConfigRecord({"code": 0, "message": "Success"}),
        }
    )
