"""What an extra installs, and the sentence of everything that needs one that is not installed."""

import json
import pathlib
import re
import sys
import tomllib

import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError, extra

ROOT = pathlib.Path(__file__).parents[1]
ACCOUNT = ["account", "els", "--noise-multiplier", "1", "--delta", "1e-6", "--steps", "10"]
ACCOUNT += ["--group-size", "4", "--sampling-prob", "0.01"]


def without(monkeypatch, package):
    """As if a package were not installed, also for modules of ours that import it on top."""
    ours = ("dpfl_jax.data.build", "dpfl_jax.data.chat_templates", "dpfl_jax.planning.figures")
    for name in [*sys.modules, package]:
        if name == package or name.startswith(f"{package}."):
            monkeypatch.setitem(sys.modules, name, None)
    for name in (*ours, "dpfl_jax.flower.client_mod"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def sentence(package, name):
    return f"needs the package {package}: pip install 'dpfl_jax[{name}]'"


def test_every_extra_is_asked_for_by_its_name():
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "".join(path.read_text() for path in (ROOT / "dpfl_jax").rglob("*.py"))
    asked = set(re.findall(r'with extra\("(\w+)"', sources)) | {"tensorboard", "wandb", "mlflow"}
    assert asked == set(names) - {"cuda", "tpu", "dev"}


@pytest.mark.parametrize(
    ("package", "name", "command"),
    [
        ("matplotlib", "plots", [*ACCOUNT, "--plot", "x.png"]),
        ("duckdb", "build", ["data", "build", "--source", "shakespeare", "--out", "store"]),
        ("sklearn", "sklearn", ["train", "isrl/quickstart", "--dry-run"]),
        ("flwr", "flower", ["silo", "run", "folder"]),
    ],
)
def test_a_command_says_which_extra_it_needs(package, name, command, monkeypatch, capsys, tmp_path):
    command = [str(ROOT / "configs" / f"{x}.yaml") if "isrl/" in x else x for x in command]
    monkeypatch.chdir(tmp_path)
    without(monkeypatch, package)
    assert main(command) == 2
    assert sentence(package, name) in " ".join(capsys.readouterr().err.split())


def test_so_do_functions(monkeypatch):
    import dpfl_jax.flower
    from dpfl_jax.data.chats import ChatTemplate

    for package in ("jinja2", "flwr"):
        without(monkeypatch, package)
    with pytest.raises(BadInputError, match=re.escape(sentence("jinja2", "chat"))):
        ChatTemplate("{{ messages }}").render([], "row 1")
    with pytest.raises(BadInputError, match=re.escape(sentence("flwr", "flower"))):
        dpfl_jax.flower.mod(epsilon=1.0, delta=1e-5, rounds=1, clip_norm=1.0)
    with pytest.raises(BadInputError, match="needs the package: pip"), extra("plots", "a picture"):
        raise ImportError("a library of the system is missing")


@pytest.mark.slow
def test_a_run_without_matplotlib_has_no_pictures_and_says_so(tmp_path, monkeypatch, capsys):
    rows = [f"p{i % 40},{i % 7},{int(i % 7 > 3)}" for i in range(200)]
    (tmp_path / "visits.csv").write_text("\n".join(["patient,age,ill", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    without(monkeypatch, "matplotlib")
    config = {
        "name": "plain",
        "data": {"source": "csv", "path": "visits.csv", "user_column": "patient",
                 "target_column": "ill", "classes": 2},
        "model": {"kind": "linear"},
        "mechanism": {"kind": "uls", "cohort_size": 8, "group_size": 1},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "train": {"steps": 2},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert main(["train", "run.yaml", "--run-dir", "run"]) == 0
    assert "no pictures, without dpfl_jax[plots]" in " ".join(capsys.readouterr().out.split())
    assert list((tmp_path / "run").glob("*.png")) == []
    assert "![](" not in (tmp_path / "run/report.md").read_text()
    assert main(["verify", "run"]) == 0
