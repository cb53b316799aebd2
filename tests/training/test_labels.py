"""What makes a loss NaN stops a run before its budget is spent, in one sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.data import DataConfig, load_dataset
from dpfl_jax.data.build import write_store
from dpfl_jax.data.store import scale_warning
from dpfl_jax.models import MLP, LogisticRegression

PEOPLE = 40
LABELS = {
    "1 and 2": np.arange(PEOPLE) % 2 + 1,
    "-1 and 1": np.arange(PEOPLE) % 2 * 2 - 1,
    "uint8 0 and 255": (np.arange(PEOPLE) % 2 * 255).astype(np.uint8),
    "halves": np.arange(PEOPLE) % 2 / 2,
}


def data(label, x=None):
    x = np.random.default_rng(0).normal(size=(PEOPLE, 3)) if x is None else x
    arrays = {"x": x.astype(np.float32), "label": label}
    return dpfl.from_arrays(arrays, [f"p{i}" for i in range(PEOPLE)])


def fit(loss, params, store, steps=2, **options):
    plan = dpfl.uls(group_size=1, cohort_size=20).plan(store, steps=steps, epsilon=9, delta=1e-3)
    return dpfl.fit(loss, params, plan, optax.sgd(0.1), key=dpfl.RootKey.from_seed(0), **options)


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_labels_that_are_no_classes_are_refused(label):
    def linear(params, x):
        return x @ params

    store = data(label)
    with pytest.raises(dpfl.BadInputError, match=r"a whole number from 0 to 1, one .*\(np\.unique"):
        fit("classification", jnp.zeros((3, 2)), store, model=linear)
    mlp, logistic = MLP((3,), 2), LogisticRegression(3)
    for model in (mlp, logistic):
        with pytest.raises(dpfl.BadInputError, match="whole number from 0 to 1"):
            fit(model.loss, model.init(jax.random.key(0)), store)
    good = data(np.arange(PEOPLE) % 2)
    with pytest.raises(dpfl.BadInputError, match="whole number from 0 to 1"):
        fit("classification", jnp.zeros((3, 2)), good, model=linear, validation=store)
    with pytest.raises(dpfl.BadInputError, match="the model has one output: two classes need two"):
        fit("classification", jnp.zeros((3, 1)), good, model=linear)


def log_likelihood(params, example):
    """Where it is the logarithm of a negative number, its gradient is a number."""
    return -jnp.log(example["x"] @ params["w"]) + jnp.square(params["b"])


PARAMS = {"w": jnp.ones(3), "b": jnp.ones(())}


def mostly(positive):
    x = np.ones((PEOPLE, 3))
    x[positive:] = -1
    return data(np.zeros(PEOPLE), x)


def test_a_loss_of_nan_stops_the_first_evaluation_and_the_first_step(tmp_path):
    with pytest.raises(dpfl.BadInputError, match="before the first step the mean loss of held-out"):
        fit(log_likelihood, PARAMS, mostly(40), validation=mostly(39), run_dir=tmp_path / "a")
    with pytest.raises(dpfl.BadInputError, match="first step loss or gradient is NaN or infinite"):
        fit(log_likelihood, PARAMS, mostly(20), run_dir=tmp_path / "b")
    for name in ("a", "b"):
        assert not list((tmp_path / name / "checkpoints").glob("[0-9]*"))


def test_a_few_losses_of_nan_are_counted():
    result = fit(log_likelihood, PARAMS, mostly(38), steps=6)
    told = [row["outside_guarantee"] for row in result.metrics]
    assert sum(row["nonfinite_units"] for row in told) > 0
    assert all(np.isfinite(row["train_loss"]) for row in told)


def test_labels_in_a_built_store_are_not_cut_to_whole_numbers(tmp_path):
    write_store(data(LABELS["halves"]), tmp_path / "S")
    config = DataConfig(source="store", path=str(tmp_path / "S"), classes=2)
    with pytest.raises(dpfl.BadInputError, match="whole numbers from 0 to 1"):
        load_dataset(config)
    write_store(data(LABELS["halves"] * 2), tmp_path / "T")
    config = DataConfig(source="store", path=str(tmp_path / "T"), classes=2)
    assert load_dataset(config).train.read(np.arange(2))["label"].dtype == np.int32


@pytest.mark.parametrize(
    ("x", "far"),
    [
        (np.random.default_rng(0).normal(size=(60, 3)), False),
        (np.random.default_rng(0).normal(size=(60, 3)) * [1, 1, 50], True),
        (np.random.default_rng(0).uniform(0, 255, (60, 4, 4, 1)), True),
        (np.random.default_rng(0).uniform(0, 1, (60, 4, 4, 1)), False),
        (np.full((60, 3), 5000), False),  # whole numbers: ids, for all that is known
    ],
)
def test_inputs_far_from_order_1_warn(x, far):
    """No refusal, as of tables: a model may well scale them itself."""
    store = dpfl.from_arrays({"x": x, "label": np.zeros(60)}, list(range(60)))
    assert (scale_warning(store) is not None) == far
    store = dpfl.from_arrays({"x": x, "label": np.full(60, 4000.0)}, list(range(60)))
    assert f"numbers of {'x and ' * far}label are far" in scale_warning(store)
