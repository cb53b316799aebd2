"""`dpfl init`: the configurations shipped, as files."""

import json
import pathlib

import pytest

import dpfl_jax
from dpfl_jax.cli.init import shipped
from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
NAMES = sorted(
    path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.y*ml")
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def said(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_is_shipped_with_a_ledger(name, capsys, monkeypatch):
    monkeypatch.setenv("DPFL_DATA_DIR", "/data")
    assert main(["init", name, "--json"]) == 0
    written = pathlib.Path(name).name + ".yaml"
    assert said(capsys) == {"name": name, "file": written}
    made, plain = load_config(written), load_config(CONFIGS / f"{name}.yaml")
    assert made.privacy.account == "people"
    assert made.privacy.ledger == str(pathlib.Path("ledger.jsonl").resolve())
    alone = made.privacy.model_copy(update={"ledger": None, "account": None})
    assert made.model_copy(update={"privacy": alone}) == plain
    lines = pathlib.Path(written).read_text().splitlines()
    for line in (CONFIGS / f"{name}.yaml").read_text().splitlines():
        assert line in lines or line.startswith("privacy: {"), line


BUNDLED = {  # whose data come with a package, and which no other test trains
    "isrl/accelerated": (),
    "isrl/multi_stage": (),
    "isrl/one_pass": (),
    "subject/digits": ("federation.rounds=2", "train.eval_every=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_what_is_shipped_trains_within_its_epsilon(name, capsys):
    pytest.importorskip("sklearn")
    path = CONFIGS / f"{name}.yaml"
    assert main(["train", str(path), *BUNDLED[name], "--run-dir", "run", "--json"]) == 0
    report = said(capsys)
    assert report["status"] == "finished"
    assert 0 < report["privacy"]["epsilon"] <= load_config(path).privacy.epsilon


def test_the_quickstart_unless_told(capsys):
    assert main(["init", "--out", "mine.yaml"]) == 0
    assert "dpfl train mine.yaml" in capsys.readouterr().out
    assert load_config("mine.yaml").name == "quickstart"


def test_all_are_listed_with_what_they_are(capsys):
    assert main(["init", "--list", "--json"]) == 0
    rows = said(capsys)["configs"]
    assert sorted(row["name"] for row in rows) == NAMES
    assert rows[0]["name"] == "python_els"  # top-level ones first
    about = {row["name"]: row["about"] for row in rows}
    assert about["rpdp/mnist"].endswith(
        "(Liu et al. 2024, Table 1); set partition: labels for their non-IID split"
    )
    assert not any(text.endswith(".") or not text for text in about.values())
    assert not list(pathlib.Path().iterdir())


def test_nothing_is_overwritten(capsys):
    pathlib.Path("quickstart.yaml").write_text("mine")
    assert main(["init"]) == 2
    assert "quickstart.yaml exists: name another file with --out" in capsys.readouterr().err
    assert pathlib.Path("quickstart.yaml").read_text() == "mine"


def test_an_unknown_name_and_a_folder_that_is_not_there(capsys):
    assert main(["init", "isrl/quikstart"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'isrl/quickstart'?" in error
    assert main(["init", "xyz"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in NAMES)
    assert main(["init", "--out", "absent/mine.yaml"]) == 2
    assert "absent/mine.yaml cannot be written" in capsys.readouterr().err


def test_an_installed_package_has_them_inside(tmp_path, monkeypatch):
    inside = tmp_path / "dpfl_jax" / "configs" / "subject"
    inside.mkdir(parents=True)
    (inside / "one.yaml").touch()
    monkeypatch.setattr(dpfl_jax, "__file__", str(tmp_path / "dpfl_jax" / "__init__.py"))
    assert shipped() == {"subject/one": inside / "one.yaml"}
