"""``dpfl export`` of any model, and ``load_exported``: what comes back is what was released."""

import errno
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from runs import final_state

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.training.export import _whole_or_nothing

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "table"
MODULE = """
from flax import nnx

def build(task, key, width=4):
    first = nnx.Linear(*task.input_shape, width, rngs=nnx.Rngs(key))
    return nnx.Sequential(first, nnx.relu, nnx.Linear(width, task.classes, rngs=nnx.Rngs(key)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where `dpfl` is started: a table of 100 people in three hospitals, and the user's module."""
    rng = np.random.default_rng(0)
    rows = ["patient,hospital,age,dose,outcome"]
    for i in range(300):
        age, dose = rng.normal(size=2)
        rows.append(f"p{i % 100},h{i % 3},{age},{dose},{int(age > dose)}")
    (tmp_path / "visits.csv").write_text("\n".join(rows))
    (tmp_path / "own_export.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(capsys, *args, code=0):
    """Runs `dpfl export` and `dpfl verify`; returns the result, or the sentence on stderr."""
    capsys.readouterr()
    assert main(["export", *map(str, args), "--json"]) == code
    out, err = capsys.readouterr()
    if code:
        return " ".join(err.split())
    assert main(["verify", str(args[1])]) == 0
    return json.loads(out.splitlines()[-1])


def trained(capsys, system, *args):
    """Trains a configuration on the table."""
    columns = ("data.path=visits.csv", "data.user_column=patient", "data.target_column=outcome")
    columns += ("data.silo_column=hospital", "data.input_columns=[age,dose]", "data.classes=2")
    command = ["train", str(CONFIGS / f"{system}.yaml"), *columns, *args, "--run-dir", "run"]
    assert main([*command, "--allow-code", "--json"]) == 0, capsys.readouterr().err
    return pathlib.Path("run")


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


# ---- runs of ``fit`` ----------------------------------------------------------------------------


def with_nnx():
    from flax import nnx

    return "classification", nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {}


def with_equinox():
    equinox = pytest.importorskip("equinox")
    return "classification", equinox.nn.Linear(2, 2, key=jax.random.key(0)), {}


def with_linen():
    from flax import linen

    net = linen.Dense(2)
    return "classification", net.init(jax.random.key(0), jnp.zeros(2)), {"model": net}


def with_haiku():
    haiku = pytest.importorskip("haiku")

    def forward(x):  # the names of its modules hold slashes
        return haiku.nets.MLP([3, 2])(x)

    net = haiku.without_apply_rng(haiku.transform(forward))
    return "classification", net.init(jax.random.key(0), jnp.zeros(2)), {"model": net}


def with_a_tree():
    """Tuples, a scalar, more than ten in a list, bfloat16, an integer; one part is frozen."""
    steps = [jnp.full((), 0.1 * i, jnp.bfloat16) for i in range(12)]
    params = {"bias": (jnp.zeros(2), jnp.zeros(())), "steps": steps, "fixed": jnp.ones(2)}

    def loss(p, example):
        slope = sum(step.astype(jnp.float32) * (i + 1) for i, step in enumerate(p["steps"]))
        logits = p["bias"][0] * p["fixed"] + example["x"] * (slope + p["bias"][1])
        return -jax.nn.log_softmax(logits)[example["label"]]

    return loss, params, {"trainable": lambda name: name != "fixed"}


FITTED = {f.__name__: f for f in (with_nnx, with_equinox, with_linen, with_haiku, with_a_tree)}


@pytest.mark.nightly
@pytest.mark.slow("with_linen")
@pytest.mark.parametrize("name", FITTED)
def test_what_fit_trained_comes_back_in_its_own_structure(name, folder, capsys):
    loss, params, more = FITTED[name]()
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(60, 2)).astype(np.float32), "label": np.arange(60) % 2}
    data = dpfl.from_arrays(arrays, [i % 30 for i in range(60)])
    plan = dpfl.uls(group_size=2, cohort_size=8).plan(data, steps=2, epsilon=8.0)
    result = dpfl.fit(loss, params, plan, optax.sgd(0.1), run_dir=folder / "run", **more)
    told = export(capsys, folder / "run", folder / "out")
    assert told["layout"] == "named"
    found = dpfl.load_exported(folder / "out", like=params)
    same(jax.tree.leaves(found.params), jax.tree.leaves(result.params))
    assert type(found.params) is type(params)
    assert found.guarantee.epsilon == result.guarantee.epsilon
    # By name alone: nested dicts and lists.
    plain = dpfl.load_exported(folder / "out").params
    sizes = [np.size(x) for x in jax.tree.leaves(plain)]
    assert sum(sizes) == told["parameters"]
    if name == "with_haiku":
        assert set(plain) == {"mlp/~/linear_0", "mlp/~/linear_1"}
    if name == "with_a_tree":
        same(plain["steps"][10], result.params["steps"][10].astype(jnp.float32))
        assert plain["bias"][1].shape == ()
        assert "fixed" not in plain


def test_other_parameters_are_refused(folder, capsys):
    test_what_fit_trained_comes_back_in_its_own_structure("with_linen", folder, capsys)
    params = with_linen()[1]
    for change, message in (
        ({"params": {**params["params"], "more": jnp.zeros(1)}}, "has a parameter 'params/more'"),
        ({"params": {"bias": jnp.zeros(2)}}, "has no parameter 'params/kernel'"),
        ({"params": {**params["params"], "bias": jnp.zeros(3)}}, "has shape (3,), but the exp"),
    ):
        with pytest.raises(dpfl.BadInputError) as said:
            dpfl.load_exported(folder / "out", like=change)
        assert message in str(said.value)
    assert "trained no adapters" in export(capsys, "run", "again", "--adapter", code=2)
    assert "not an empty directory" in export(capsys, "run", "out", code=2)


# ---- what ties a guarantee to a model ----


def nines(file):
    """Replaces all numbers of a safetensors file."""
    from safetensors.numpy import load_file, save_file

    save_file({k: np.full_like(v, 9) for k, v in load_file(file).items()}, file)


@pytest.mark.slow
def test_a_guarantee_is_that_of_the_files_beside_it(folder, capsys):
    """Weights, a checkpoint and the configuration are changed: everybody who reads them refuses."""
    test_what_fit_trained_comes_back_in_its_own_structure("with_linen", folder, capsys)
    weights, more = folder / "out" / "model.safetensors", folder / "out" / "pytorch_model.bin"
    known = weights.read_bytes()
    card = folder / "out" / "README.md"
    assert json.loads((folder / "out" / "guarantee.json").read_text())["text"] in card.read_text()
    card.write_text(card.read_text() + "its author goes on writing the model card")
    assert dpfl.load_exported("out").guarantee.private
    for change in (lambda: nines(weights), lambda: more.write_bytes(known)):
        change()
        with pytest.raises(dpfl.BadInputError, match=r"is not the one|is not part of this export"):
            dpfl.load_exported("out")
        assert main(["verify", "out"]) == 3
        more.unlink(missing_ok=True)
        weights.write_bytes(known)
    assert main(["verify", "out"]) == 0
    assert "model.safetensors" in " ".join(capsys.readouterr().out.split())
    assert main(["verify", "run"]) == 0
    state = next((folder / "run" / "checkpoints" / "2" / "state").rglob("d/*"))
    for file in (folder / "run" / "config.yaml", state):
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        assert main(["verify", "run"]) == 3
        assert "is not the one" in export(capsys, "run", f"of {file.name}", code=2)
        if file.name == "config.yaml":
            assert main(["show", "run"]) == 2
            assert "is not the one" in " ".join(capsys.readouterr().err.split())
        file.write_bytes(before)
    export(capsys, "run", "again")


def test_a_guarantee_without_digests_is_read_and_says_so(folder, capsys):
    test_what_fit_trained_comes_back_in_its_own_structure("with_linen", folder, capsys)
    file = folder / "out" / "guarantee.json"
    values = json.loads(file.read_text())
    del values["digests"]
    for name in ("unit_key", "public_inputs"):
        del values["privacy"][name]
    values["text"] = str(dpfl.Guarantee.from_json(values["privacy"]))
    file.write_text(json.dumps(values | {"version": 1}))
    with pytest.warns(UserWarning, match="nothing ties the model"):
        dpfl.load_exported("out")
    capsys.readouterr()
    assert main(["verify", "out"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "nothing ties a model or a configuration to this file" in told
    assert "does not say what makes one" in told
    # The guarantee of the run, in the place of the export's, is of no file here.
    file.write_text((folder / "run" / "guarantee.json").read_text())
    with pytest.raises(dpfl.BadInputError, match="is not the guarantee of an export"):
        dpfl.load_exported("out")
    assert main(["verify", "out"]) == 0
    assert "no model or configuration was compared" in " ".join(capsys.readouterr().out.split())


# ---- runs of configurations ---------------------------------------------------------------------

SYSTEMS = {
    "uls": ("model.kind=mlp", "train.steps=2"),
    "hi_grad_avg": ("model.kind=logistic", "federation.rounds=2"),
    "rpdp": ("model.kind=mlp", "federation.rounds=1", "federation.local_steps=1"),
    "isrl": ("model.loss=logistic", "federation.rounds=2"),
}


@pytest.mark.slow
@pytest.mark.nightly("rpdp", "hi_grad_avg")
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system(system, folder, capsys):
    run = trained(capsys, system, *SYSTEMS[system])
    export(capsys, run, "out")
    found = dpfl.load_exported("out")
    same(found.params, final_state(folder / "run")["params"])
    assert found.guarantee.trust == ("central" if system == "uls" else "silo-local")
    if system == "isrl":  # a vector: scores are x @ w
        assert found.params.shape == (3,)
        assert json.loads(pathlib.Path("out/model.json").read_text())["loss"] == "logistic"
    else:
        assert found.task.input_shape == (2,)
        assert int(found.model.predict(found.params, jnp.ones(2))) in (0, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("system", ["uls", "hi_grad_avg", "rpdp"])
def test_a_module_of_ones_own(system, folder, capsys, monkeypatch):
    """Built by the reader, whose code it is; in a central run a part of it may not be trained."""
    more = {"uls": ("train.steps=2", "model.trainable=[layers/2/*]")}.get(
        system, ("federation.rounds=1", "federation.local_steps=1")
    )
    module = "model={module: own_export:build, options: {width: 3}}"
    run = trained(capsys, system, module, *more)
    report = json.loads((run / "report.json").read_text())
    assert report["model"]["module"] == "own_export:build"
    assert report["model"]["parameters"] == 2 * 3 + 3 + 3 * 2 + 2
    code = ["--module", "own_export:build"] if system == "uls" else []
    export(capsys, run, "out", *code)
    import own_export

    found = dpfl.load_exported("out", own_export.build)
    task, key = found.task, jax.random.key(0)  # of init_seed
    assert found.params(jnp.ones(2)).shape == (2,)
    first = own_export.build(task, key, 3)
    now, before = (dpfl.functional(net).params for net in (found.params, first))
    for name, value in now.items():
        moved = system != "uls" or name.startswith("layers/2")
        assert np.array_equal(value, before[name]) != moved, name
    if system == "uls":  # what was not trained is not in the run
        other = own_export.build(task, jax.random.key(9), 3)
        monkeypatch.setattr(own_export, "build", lambda task, key, width: other)
        assert "does not build what the run began with" in export(capsys, run, "new", *code, code=2)
        assert "is not in the run: give that function" in export(capsys, run, "new", code=2)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [True, False])
def test_a_language_model_of_no_family(family, folder, capsys):
    posts = [json.dumps({"user": f"u{i // 2}", "text": "stone lamp"}) for i in range(60)]
    pathlib.Path("posts.jsonl").write_text("\n".join(posts))
    shape = {"num_layers": 1, "embed_dim": 16, "num_heads": 2}
    config = {
        "data": {"source": "jsonl", "path": "posts.jsonl", "seq_len": 8, "test_fraction": 0.0},
        "model": {"overrides": shape | ({"activation": "swiglu"} if family else {})},
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "train": {"steps": 2},
    }
    pathlib.Path("lm.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "lm.yaml", "--run-dir", "run", "--json"]) == 0
    told = export(capsys, "run", "out")
    assert told["layout"] == ("huggingface" if family else "named")
    found = dpfl.load_exported("out")
    same(found.params, jax.tree.map(jnp.asarray, final_state(folder / "run")["params"]))
    assert found.model.num_params == told["parameters"]
    prompt = ["--prompt", "st", "--max-tokens", "2", "--temperature", "0", "--tokenizer", "bytes"]
    written = []
    for place in ("run", "out"):
        assert main(["sample", place, *prompt, "--json"]) == 0
        written.append(json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"])
    assert written[0] == written[1]


def test_only_what_was_exported_is_read(folder, capsys):
    with pytest.raises(dpfl.BadInputError, match=r"guarantee\.json cannot be read"):
        dpfl.load_exported(folder)
    assert "is not a run directory" in export(capsys, folder, "out", code=2)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left"),
    ],
)
def test_an_export_that_fails_leaves_no_model_without_its_guarantee(tmp_path, error):
    out = tmp_path / "out"

    def write(folder):
        with _whole_or_nothing(folder):
            folder.mkdir(exist_ok=True)
            (folder / "model.safetensors").write_text("half")
            raise error

    with pytest.raises(dpfl.BadInputError, match="disk is full"):
        write(out)
    assert not list(out.iterdir())
    (out / "mine").write_text("was there before")
    with pytest.raises(dpfl.BadInputError, match="disk is full"):
        write(out)
    assert (out / "mine").exists()
