"""The command line itself: where arguments may stand, and what is refused."""

import errno
import shutil
import subprocess
import sys

import pytest

import dpfl_jax
from dpfl_jax.cli.main import COMMANDS, _parse, _use_no_tpu_that_is_not_here, build_parser, main
from dpfl_jax.errors import BadInputError


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "c.yaml", "a.b=1", "a.c=2", "--run-dir", "r"],
        ["train", "c.yaml", "--run-dir", "r", "a.b=1", "a.c=2"],
        ["train", "c.yaml", "a.b=1", "--run-dir", "r", "a.c=2"],
        ["train", "--run-dir", "r", "c.yaml", "a.b=1", "a.c=2"],
    ],
)
def test_overrides_may_stand_anywhere(argv):
    args = _parse(build_parser("train"), argv)
    assert (args.config, str(args.run_dir)) == ("c.yaml", "r")
    assert sorted(args.overrides) == ["a.b=1", "a.c=2"]


@pytest.mark.parametrize("extra", [["--nope"], ["--nope=1", "a.b=1"]])
def test_unknown_options_are_refused(extra):
    with pytest.raises(BadInputError, match="unrecognized arguments: --nope"):
        _parse(build_parser("train"), ["train", "c.yaml", *extra])


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["trian", "c.yaml"], "train"),
        (["train", "c.yaml", "--dryrun"], "--dry-run"),
        (["train", "c.yaml", "a.b=1", "--rundir=r"], "--run-dir"),
        (["data", "biuld"], "build"),
        (["account", "ulss"], "uls"),
    ],
)
def test_a_typo_gets_a_suggestion(argv, near, capsys):
    assert main(argv) == 2
    assert f"did you mean {near!r}?" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--epsilonn", "--steps", "--delta"])
def test_a_setting_that_was_given_as_an_option_gets_its_form(option, capsys):
    assert main(["train", "c.yaml", option, "4"]) == 2
    told = capsys.readouterr().err
    assert "settings of the configuration are given as section.key=value" in told
    assert "did you mean" not in told


@pytest.mark.parametrize(
    ("there", "environment", "wanted"),
    [
        ({"libtpu"}, {}, "cpu"),
        ({"libtpu", "jax_plugins"}, {}, None),
        ({"libtpu"}, {"TPU_WORKER_ID": "0"}, None),
        (set(), {}, None),
    ],
)
def test_a_compiler_for_tpus_is_no_tpu(monkeypatch, there, environment, wanted):
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr("glob.glob", lambda sign: [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in there or None)
    _use_no_tpu_that_is_not_here()
    assert environment.get("JAX_PLATFORMS") == wanted


def test_all_names_of_the_package_are_completed():
    assert {*dpfl_jax.__all__} <= {*dir(dpfl_jax)}


def test_a_command_without_overrides_takes_no_more():
    with pytest.raises(BadInputError, match="unrecognized"):
        _parse(build_parser("show"), ["show", "runs/one", "--json", "more"])


def test_the_package_is_a_command_too():
    for module in ("dpfl_jax", "dpfl_jax.cli.main"):
        done = subprocess.run(
            [sys.executable, "-m", module, "show", "nowhere"], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.startswith("dpfl: error: nowhere is not a run directory")
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "argv", [["--verbose", "show", "nowhere"], ["show", "nowhere", "--verbose"]]
)
def test_verbose_says_where(argv, capsys):
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("dpfl: error: nowhere is not a run directory")


def test_what_stands_behind_two_dashes_is_another_programs(capsys):
    assert main(["show", "nowhere", "--", "--verbose"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "--verbose" in said


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_command_and_its_options(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "--run-dir", "--which", "--compute-budget"):
        assert word in script
    if which := shutil.which(shell):
        assert subprocess.run([which, "-n"], input=script, text=True).returncode == 0


def test_completion_without_its_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'dpfl_jax[completion]'" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence(monkeypatch, capsys):
    def full(args):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/report.md")

    monkeypatch.setattr("dpfl_jax.cli.show.run", full)
    assert main(["show", "runs/a"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dpfl: error: runs/a/report.md cannot be used (No space left on device)")
    assert "free space" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "argv",
    [
        ["data", "build", "--input", "rows.jsonl", "--out", "ftp://host/store"],
        ["data", "build", "--input", "ftp://host/rows.jsonl", "--out", "store"],
        ["data", "inspect", "ftp://host/store"],
        ["train", "configs/quickstart.yaml", "--run-dir", "ftp://host/run"],
        ["train", "configs/quickstart.yaml", "--run-dir", "run", "data.path=ftp://host/rows.jsonl"],
        ["train", "configs/quickstart.yaml", "privacy.ledger=ftp://host/ledger.jsonl"],
        ["train", "configs/quickstart.yaml", "pretrain.cache_dir=ftp://host/cache"],
        ["finetune", "bundled:quickstart", "ftp://host/rows.jsonl"],
        ["sweep", "configs/quickstart.yaml", "--grid", "seed=1", "--out", "ftp://host/sweep"],
        ["export", "run", "ftp://host/model"],
        ["plan", "configs/quickstart.yaml", "--fit", "ftp://host/fit.json"],
        ["verify", "ftp://host/guarantee.json"],
        ["show", "ftp://host/run"],
    ],
)
def test_an_address_is_not_taken_for_a_folder(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert "ftp://host/" in printed
    assert "is an address" in printed
    assert not list(tmp_path.iterdir())


def test_a_prompt_may_begin_like_an_address(tmp_path, monkeypatch):
    argv = ["sample", "run", "--prompt", "https://example.org"]
    assert _parse(build_parser("sample"), argv).prompt == "https://example.org"
