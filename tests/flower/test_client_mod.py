"""The client mod: what leaves a Flower client, whatever its app returns and its server asks."""

import logging
import sys
import time

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.constant import MessageTypeLegacy
from flwr.compat.common.recorddict_compat import (
    evaluateins_to_recorddict,
    fitins_to_recorddict,
    getparametersins_to_recorddict,
    getpropertiesins_to_recorddict,
    recorddict_to_fitres,
)
from flwr.compat.common.typing import EvaluateIns, FitIns, GetParametersIns, GetPropertiesIns

import dpfl_jax.flower

BUDGET = {"epsilon": 500.0, "delta": 1e-5, "rounds": 2, "clip_norm": 0.5}
MODEL = {
    "w": np.arange(6.0).reshape(2, 3),
    "seen": np.array(7),  # as of a batch normalization
    "b": np.ones(3, np.float16),
}
SECRET = "patient-4711"


def context(folder=None):
    config = {} if folder is None else {"dpfl-folder": str(folder)}
    return Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config={})


def to_client(content, kind="train"):
    metadata = Metadata(1, "message", 1, 2, "", "", time.time(), 600.0, kind)
    return Message(content, metadata=metadata)


def asked(model=MODEL, kind="train", **config):
    arrays = ArrayRecord({key: Array(x) for key, x in model.items()})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    return to_client(content, kind)


def app_of(train=lambda arrays: arrays, **more):
    """An app that trains, and tells all that it should not."""
    app = ClientApp(mods=[dpfl_jax.flower.mod(**{**BUDGET, **more})])
    app.calls = 0

    def told(message, context):
        app.calls += 1
        arrays = train({key: x.numpy() for key, x in message.content["arrays"].items()})
        record = ArrayRecord({key: Array(np.asarray(x)) for key, x in arrays.items()})
        metrics = MetricRecord({"num-examples": 4711, "loss": 0.4711})
        notes = ConfigRecord({"note": SECRET})
        content = RecordDict({"arrays": record, "metrics": metrics, "notes": notes})
        return Message(content, reply_to=message)

    for register in (app.train(), app.train("again"), app.evaluate(), app.query()):
        register(told)
    return app


def far(arrays):
    return {"w": arrays["w"] + 100, "seen": np.array(4711), "b": arrays["b"] - 100}


def test_only_noised_arrays_leave(tmp_path):
    reply = app_of(far)(asked(), context(tmp_path / "dp"))
    assert set(reply.content) == {"arrays", "metrics"}
    assert dict(reply.content["metrics"]) == {"num-examples": 1}
    sent = {key: x.numpy() for key, x in reply.content["arrays"].items()}
    assert {k: (x.dtype, x.shape) for k, x in sent.items()} == {
        k: (x.dtype, x.shape) for k, x in MODEL.items()
    }
    assert sent["seen"] == 7  # what has no noise comes back as it went
    moved = np.sqrt(sum(np.sum(np.square(sent[k].astype(float) - MODEL[k])) for k in "wb"))
    assert 0.3 < moved < 1.0  # clipped to 0.5, and little noise at this epsilon
    assert dpfl_jax.flower.__all__[-1] == "mod"


def test_a_retry_is_answered_alike_without_the_app_and_a_third_round_is_refused(tmp_path):
    app, where = app_of(far), context(tmp_path / "dp")
    first, again = (app(asked(round=1), where) for _ in range(2))
    assert first.content["arrays"] == again.content["arrays"]
    assert app.calls == 1
    # The same round with other parameters is another request: it is charged, with other noise.
    other = app(asked({**MODEL, "w": MODEL["w"] + 1e-9}, round=1), where)
    assert other.content["arrays"] != first.content["arrays"]
    assert app.calls == 2
    for message in (asked(round=3), asked(round=1), asked(kind="train.again")):
        refused = app(message, where)
        assert refused.error.reason == (
            "this silo has sent the 2 updates of its budget, and one more would exceed epsilon 500 "
            "at delta 1e-05: nothing was sent"
        )
    assert app.calls == 2
    # Another app, with a larger budget, is refused, too.
    assert app_of(far, epsilon=1e3)(asked(round=4), where).has_error()


def test_what_the_server_configures_changes_nothing(tmp_path):
    wild = {"clip_norm": 1e9, "noise_multiplier": 0.0, "epsilon": 1e9, "dpfl-folder": "/tmp/other"}
    wild |= {"clipping_norm": 1e9, "rounds": 10**6, "dpfl": "off"}
    where = context(tmp_path / "dp")
    where.run_config = dict(wild)
    sent = app_of(far)(asked(**wild), where).content["arrays"]["w"].numpy()
    assert np.abs(sent - MODEL["w"]).max() < 1.0
    assert len((tmp_path / "dp/rounds.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "train",
    [
        lambda arrays: 1 / 0 if SECRET else arrays,
        lambda arrays: {**arrays, "w": np.full((2, 3), np.nan)},
        lambda arrays: {**arrays, "w": arrays["w"][:1]},
        lambda arrays: {"b": arrays["b"]},
        lambda arrays: {**arrays, "w": np.array([["a"] * 3] * 2)},
        lambda arrays: (_ for _ in ()).throw(RuntimeError(SECRET)),
        lambda arrays: sys.exit(SECRET),
    ],
    ids=["error", "nan", "shape", "missing", "text", "secret", "exit"],
)
def test_a_failure_looks_like_an_update_of_zero(tmp_path, train, caplog):
    with caplog.at_level(logging.WARNING):
        reply = app_of(train, epsilon=8.0)(asked(), context(tmp_path / "dp"))
    assert set(reply.content) == {"arrays", "metrics"}
    sent = reply.content["arrays"]
    assert list(sent) == list(MODEL)
    assert np.isfinite(sent["w"].numpy()).all()
    assert not np.array_equal(sent["w"].numpy(), MODEL["w"])
    assert len((tmp_path / "dp/rounds.jsonl").read_text().splitlines()) == 1
    assert "counts as 0" in caplog.text  # the operator knows


@pytest.mark.parametrize("kind", ["evaluate", "query", "evaluate.mine"])
def test_nothing_but_training_is_answered(tmp_path, kind):
    app = app_of()
    if "." in kind:
        app.evaluate("mine")(lambda message, context: Message(RecordDict(), reply_to=message))
    reply = app(asked(kind=kind), context(tmp_path / "dp"))
    assert "this client answers training alone" in reply.error.reason
    assert app.calls == 0
    assert not (tmp_path / "dp").exists()


def pickled():
    return Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=b"\x80\x04K\x01.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"arrays": ArrayRecord({"w": pickled()})}, "not serialized by NumPy"),
        ({"arrays": ArrayRecord({"n": Array(np.arange(3))})}, "no arrays of floating-point"),
        ({"a": ArrayRecord(), "b": ArrayRecord()}, "2 ArrayRecords, but this client needs one"),
        ({}, "0 ArrayRecords"),
    ],
    ids=["pickled", "integers", "two", "none"],
)
def test_messages_that_cannot_be_protected_cost_nothing(tmp_path, content, words):
    app, where = app_of(), context(tmp_path / "dp")
    message = to_client(RecordDict(content))
    assert words in app(message, where).error.reason
    assert app.calls == 0
    assert not (tmp_path / "dp").exists()


def test_a_pickle_is_not_loaded(tmp_path):
    import io
    import pickle

    class Bad:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    file = io.BytesIO()
    np.save(file, np.array([Bad()], object), allow_pickle=True)
    bad = Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=file.getvalue())
    message = to_client(RecordDict({"arrays": ArrayRecord({"w": bad})}))
    assert "not serialized" in app_of()(message, context(tmp_path / "dp")).error.reason
    assert pickle.dumps(1)
    assert not (tmp_path / "ran").exists()


def test_a_client_without_a_folder_is_told_so(tmp_path):
    reply = app_of()(asked(), context())
    assert reply.error.reason == "this client has no folder: set dpfl-folder in --node-config"
    for relative in ("dp", ""):
        reply = app_of()(asked(), context(relative))
        assert "no absolute path" in reply.error.reason
    given = app_of(folder=str(tmp_path / "dp"))
    assert not given(asked(), context()).has_error()
    # A reason that its operator should see alone is not sent.
    assert "operator knows" in app_of(rounds=0)(asked(), context(tmp_path / "x")).error.reason


def test_a_round_is_used_up_before_its_training(tmp_path):
    """So a server can make the app crash, which it sees, at most as often as there are rounds."""
    where = tmp_path / "dp"

    def crashed(arrays):
        assert len((where / "rounds.jsonl").read_text().splitlines()) == 1
        return arrays

    assert not app_of(crashed)(asked(), context(where)).has_error()
    assert len((where / "rounds.jsonl").read_text().splitlines()) == 1


def test_an_array_without_axes_is_answered(tmp_path):
    reply = app_of()(asked({"scale": np.zeros((), np.float32)}), context(tmp_path / "dp"))
    assert reply.content["arrays"]["scale"].numpy().shape == ()


class Legacy(NumPyClient):
    def get_parameters(self, config):
        return [np.array([4711.0])]

    def get_properties(self, config):
        return {"secret": SECRET}

    def fit(self, parameters, config):
        return [x + 100 for x in parameters], 4711, {"note": SECRET}

    def evaluate(self, parameters, config):
        return 0.4711, 4711, {"note": SECRET}


def test_an_app_of_a_client_class_tells_no_more(tmp_path):
    mod = dpfl_jax.flower.mod(**BUDGET)
    app = ClientApp(client_fn=lambda context: Legacy().to_client(), mods=[mod])
    where, start = context(tmp_path / "dp"), ndarrays_to_parameters([np.zeros(2), np.ones((1, 3))])

    def ask(content, kind):
        return app(to_client(content, kind), where)

    reply = ask(fitins_to_recorddict(FitIns(start, {"round": 1}), keep_input=True), "train")
    result = recorddict_to_fitres(reply.content, keep_input=True)
    assert (result.num_examples, result.metrics, result.status.code.value) == (1, {}, 0)
    first, second = parameters_to_ndarrays(result.parameters)
    assert (first.shape, second.shape) == ((2,), (1, 3))
    assert 0.3 < np.sqrt(np.sum(first**2) + np.sum((second - 1) ** 2)) < 1.0
    for content, kind in [
        (evaluateins_to_recorddict(EvaluateIns(start, {}), keep_input=True), "evaluate"),
        (getparametersins_to_recorddict(GetParametersIns({})), MessageTypeLegacy.GET_PARAMETERS),
        (getpropertiesins_to_recorddict(GetPropertiesIns({})), MessageTypeLegacy.GET_PROPERTIES),
    ]:
        assert "answers training alone" in ask(content, kind).error.reason
