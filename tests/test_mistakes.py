"""What newcomers get wrong: each is one sentence that names the argument and what to give."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.models.checkpoint import tokenizer_file

PARAMS = {"w": np.zeros(3, np.float32)}
uls = dpfl.uls(group_size=2, cohort_size=5)


def loss(params, example):
    return jnp.sum((example["x"] @ params["w"]) ** 2)


@pytest.fixture(scope="module")
def store():
    arrays = {"x": np.ones((60, 3), np.float32), "label": np.zeros(60, np.int32)}
    return dpfl.from_arrays(arrays, np.arange(60) // 3)


@pytest.fixture(scope="module")
def plan(store):
    return uls.plan(store, steps=2, epsilon=8.0)


MECHANISMS = {
    "clip_norm must be one number": {"clip_norm": "1"},
    "group_size is 2.5": {"group_size": 2.5},
    "group_size is True": {"group_size": True},
    "cohort_size is '5'": {"cohort_size": "5"},
    "clipping is 'soft'": {"clipping": "soft"},
}


@pytest.mark.parametrize("message", MECHANISMS)
def test_mechanisms(message):
    with pytest.raises(dpfl.BadInputError, match=message):
        dpfl.uls(**{"group_size": 2, "cohort_size": 5} | MECHANISMS[message])


PLANS = {
    "data is ndarray, but it must be a store": {"data": np.ones((3, 2))},
    "data is DataConfig, but it must be a store": {"data": dpfl.DataConfig()},
    "epsilon is '8'": {"epsilon": "8"},
    "epsilon is -1": {"epsilon": -1},
    "noise_multiplier is '1'": {"noise_multiplier": "1", "epsilon": None},
    "delta is '1e-5'": {"delta": "1e-5"},
    "delta is 2": {"delta": 2},
    "number of steps is 2.5": {"steps": 2.5},
    r"execution is \{.*give a dpfl_jax.Execution": {"execution": {"microbatch_size": 2}},
    r"mesh is 3 .*make_mesh": {"mesh": 3},
    "set mechanism.cohort_size to at most 20": {
        "mechanism": dpfl.uls(group_size=2, cohort_size=500)
    },
}


@pytest.mark.parametrize("message", PLANS)
def test_plans(message, store):
    given = {"mechanism": uls, "data": store, "steps": 2, "epsilon": 8.0} | PLANS[message]
    with pytest.raises(dpfl.BadInputError, match=message):
        given.pop("mechanism").plan(given.pop("data"), **given)


FITS = {
    r"key is 3 \(int\): give a RootKey": {"key": 3},
    r"key is .*\(PRNGKeyArray\)": {"key": jax.random.key(0)},
    "optimizer is 'adam'.*give an Optax optimiser": {"optimizer": "adam"},
    r"loss_fn is 3 \(int\)": {"loss": 3},
    "plan is Mechanism.*mechanism.plan": {"plan": uls},
    "validation is ndarray": {"validation": np.ones(3)},
    r"loss of one example must be one number, but it has shape \(3,\)": {
        "loss": lambda p, e: e["x"] * p["w"]
    },
    "must be one number, but it is a tuple: return the number alone": {
        "loss": lambda p, e: (loss(p, e), {"aux": 1.0})
    },
    "must be one number, but it is a NoneType": {"loss": lambda p, e: None},
    "loss of one example is int32, which has no gradient": {
        "loss": lambda p, e: jnp.int32(loss(p, e))
    },
    "loss of one example is bool": {"loss": lambda p, e: loss(p, e) > 0},
    r"asks for 'features', which neither an example \(label, x\) nor": {
        "loss": lambda p, e: loss(p, {"x": e["features"]})
    },
    "cannot be traced by JAX: .*jnp.where": {
        "loss": lambda p, e: loss(p, e) if e["label"] else 0.0
    },
    "cannot be traced by JAX": {"loss": lambda p, e: float(loss(p, e))},
    "cannot be traced by JAX: .*jnp": {"loss": lambda p, e: np.sum(np.asarray(e["x"]))},
    "optimizer asks for more .*'value'.*from their gradients alone": {
        "optimizer": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    },
    "optimizer asks for more .*'value_fn'": {"optimizer": optax.lbfgs()},
    r"is a MultiSteps: give its .gradient_transformation\(\)": {
        "optimizer": optax.MultiSteps(optax.sgd(0.1), 2)
    },
    "no floating-point parameter": {
        "params": {"w": np.zeros(3, np.int32)},
        "loss": lambda p, e: jnp.float32((e["x"] @ p["w"]).sum()),
    },
    "parameters hold no array": {"params": None},
    r"run_dir is 3 \(int\)": {"run_dir": 3},
    "trainable.*are not bools": {"trainable": "w"},
    "loop is 3": {"loop": 3},
    "hooks is <built-in": {"hooks": print},
}


@pytest.mark.parametrize("message", FITS)
def test_fits(message, plan):
    given = {"loss": loss, "params": PARAMS, "plan": plan, "optimizer": optax.sgd(0.1)}
    given |= FITS[message]
    first = [given.pop(name) for name in ("loss", "params", "plan", "optimizer")]
    with pytest.raises(dpfl.BadInputError, match=message):
        dpfl.fit(*first, **given)


def test_who_forbids_their_own_code_to_promote_types_can_train(plan):
    with jax.numpy_dtype_promotion("strict"):
        result = dpfl.fit(loss, PARAMS, plan, optax.adam(0.1))
    assert np.isfinite(result.params["w"]).all()


OTHERS = {
    "key is 3": lambda plan: next(plan.batches(3)),
    "key is 'a'": lambda plan: next(plan.batches("a")),
    "the seed is 'a'": lambda _: dpfl.RootKey.from_seed("a"),
    "the seed is 2.5": lambda _: dpfl.RootKey.from_seed(2.5),
    "config is 'a.csv'": lambda _: dpfl.load_dataset("a.csv"),
    "unknown data source 'cvs'": lambda _: dpfl.load_dataset(dpfl.DataConfig(source="cvs")),
    "no.csv does not exist": lambda _: dpfl.load_dataset(
        dpfl.DataConfig(source="csv", path="no.csv")
    ),
    "users is 3": lambda _: dpfl.from_arrays({"x": np.ones(3)}, 3),
    "frame is .*DataFrame": lambda _: dpfl.from_pandas([1], user="a", text="b"),
    "the tokenizer is int": lambda _: dpfl.from_texts([("a", "b")], 3),
    "seq_len is '3'": lambda _: dpfl.from_texts([("a", "b")], seq_len="3"),
    r"each must be a pair \(user, text\)": lambda _: dpfl.from_texts(["one text"]),
    "there is no folder nowhere": lambda _: tokenizer_file("nowhere"),
    "huge": lambda _: dpfl.transformer_config("huge"),
    "layers": lambda _: dpfl.transformer_config("tiny", layers=3),
}


@pytest.mark.parametrize("message", OTHERS)
def test_others(message, plan):
    with pytest.raises(dpfl.BadInputError, match=message) as caught:
        OTHERS[message](plan)
    assert "\n" not in str(caught.value)
