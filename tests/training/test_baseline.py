"""The run without privacy beside a private one: it is plain, apart, and named as what it is."""

import io
import json

import jax
import numpy as np
import optax
import pytest
import yaml
from rich.console import Console

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.driver import LoopConfig, drive
from dpfl_jax.run.pipeline import BASELINE_CAVEAT, WITHOUT_PRIVACY, train_baseline
from dpfl_jax.training.central import Central
from dpfl_jax.training.fitting import algorithm_of

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run on invented posts; the file's path."""
    folder = tmp_path_factory.mktemp("beside")
    rng = np.random.default_rng(0)
    words = ["river", "stone", "lamp", "green", "quiet", "seven", "horse", "under"]
    rows = [
        json.dumps({"user": f"u{user}", "text": " ".join(rng.choice(words, size=8))})
        for user in range(50)
        for _ in range(3)
    ]
    (folder / "posts.jsonl").write_text("\n".join(rows))
    settings = {
        "name": "small",
        "seed": 1,
        "data": {
            "source": "jsonl",
            "path": str(folder / "posts.jsonl"),
            "seq_len": 24,
            "validation_fraction": 0.2,
            "test_fraction": 0.0,
        },
        "model": {"overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8, "clipping": "normalized"},
        "privacy": {"epsilon": 2.0, "delta": 1e-3},
        "optimizer": {"name": "adam", "learning_rate": 0.01},
        "train": {"steps": 6, "eval_every": 3},
        "execution": {"microbatch_size": 4, "examples_at_once": 1},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(settings))
    return folder / "small.yaml"


def run(config, out, *overrides, capsys):
    command = ["train", str(config), "--run-dir", str(out), "--json", *overrides]
    assert main(command) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_it_is_plain_descent_from_where_the_private_run_starts():
    """Every example drawn at every step: then the steps are those of full-batch descent."""
    rng = np.random.default_rng(0)
    users = [(f"u{i}", {"x": rng.normal(size=(2, 3)).astype("f4")}) for i in range(8)]
    data = dpfl.ArrayStore.from_users(users)

    def loss(params, example):
        return 0.5 * ((example["x"] - params["w"]) ** 2).sum()

    params = {"w": np.full(3, 4.0, "f4")}
    plan = dpfl.uls(group_size=2, cohort_size=8, clip_norm=0.1).plan(
        data, steps=5, noise_multiplier=3.0, delta=1e-3
    )
    seen = []

    def evaluate(trained):
        seen.append(np.asarray(trained["w"]))
        return {"loss": 1.0, "loss_by_user": 1.0, "examples": 1, "users": 1}

    private, key = Central(loss, params, plan, optax.sgd(0.5)), RootKey.from_seed(0)
    loop = LoopConfig(eval_every=1, keep_best=True, patience=1)  # two are the private run's
    rows = train_baseline(private.without_privacy, key, evaluate, loop, QUIET)
    assert [row["step"] for row in rows] == list(range(6))
    mean = np.concatenate([held["x"] for _, held in users]).mean(0)
    for step, found in enumerate(seen):
        np.testing.assert_allclose(found, mean + (4.0 - mean) * 0.5**step, rtol=1e-5)

    def fails(trained):
        raise BadInputError("no memory left")

    said = Console(file=io.StringIO())  # the private run is reported all the same
    assert train_baseline(private.without_privacy, key, fails, LoopConfig(), said) is None
    assert "there is no comparison: no memory left" in said.file.getvalue()


@pytest.mark.nightly
def test_the_private_run_is_the_same_with_and_without_it(config, tmp_path, capsys):
    """Bit for bit: the baseline draws from a key of its own and changes nothing."""
    alone = run(config, tmp_path / "alone", capsys=capsys)
    both = run(config, tmp_path / "both", "eval.baseline=true", "eval.prompt=river", capsys=capsys)
    from dpfl_jax.training.export import load_trained

    models = [load_trained(tmp_path / name).params for name in ("alone", "both")]
    jax.tree.map(np.testing.assert_array_equal, *models)
    assert both["eval"] == alone["eval"]
    assert "without_privacy" not in alone["outside_guarantee"]
    assert "samples" not in alone
    # Its numbers are named as what the guarantee does not cover, wherever that is stated.
    assert BASELINE_CAVEAT in both["privacy"]["caveats"]
    assert BASELINE_CAVEAT in both["guarantee"]
    assert BASELINE_CAVEAT not in alone["guarantee"]
    assert both["privacy"]["epsilon"] == alone["privacy"]["epsilon"]
    rows = both["outside_guarantee"]["without_privacy"]
    assert [row["step"] for row in rows] == [0, 3, 6]
    assert rows[0]["loss"] == both["eval"]["initial"]["loss"]
    assert both["baselines"][WITHOUT_PRIVACY]["loss"] == rows[-1]["loss"]
    # No model of it is left behind.
    files = [{p.relative_to(tmp_path / name) for p in (tmp_path / name).rglob("*")
              if "checkpoints" not in p.parts} for name in ("alone", "both")]  # fmt: skip
    assert files[0] == files[1]
    assert both["samples"].keys() == {"before", "after"}
    for text in both["samples"].values():
        assert text.startswith("river")
    shown = (tmp_path / "both" / "report.md").read_text()
    assert WITHOUT_PRIVACY in shown
    assert "What the model writes after training" in shown


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.baseline=true", "eval.baseline needs held-out users"),
        ("eval.prompt=" + "x" * 30, "eval.prompt is 31 tokens long"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_training(
    config, tmp_path, capsys, override, message
):
    command = ["train", str(config), "data.validation_fraction=0", override]
    assert main([*command, "--run-dir", str(tmp_path / "bad")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "bad").exists()


def test_beside_users_with_budgets_of_their_own_nobody_leaves():
    """User updates are clipped as in the private run, and not noised."""
    users = [(f"u{i}", {"x": np.full((1, 3), i, "f4")}) for i in range(4)]

    def loss(params, example):
        return 0.5 * ((example["x"] - params["w"]) ** 2).sum()

    mechanism = dpfl.experimental.individual(
        group_size=1, cohort_size=4, clip_norm=9.0, user_learning_rate=0.5
    )
    plan = mechanism.plan(
        dpfl.ArrayStore.from_users(users), steps=6, noise_multiplier=1.0, delta=1e-3
    )
    run = algorithm_of(loss, {"w": np.zeros(3, "f4")}, plan, optax.sgd(1.0))
    found = drive(run.without_privacy(), key=RootKey.from_seed(0))
    np.testing.assert_allclose(found.params["w"], 1.5 * (1 - 0.5**6), rtol=1e-5)
