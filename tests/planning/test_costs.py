"""The bill: arithmetic, the largest budget that hours pay for, and operations of the real step."""

import json
import pathlib

import numpy as np
import pytest
from rich.console import Console

from dpfl_jax.cli.main import main
from dpfl_jax.cli.plan import _memory_words
from dpfl_jax.clipping.cost import PEAK
from dpfl_jax.config import load_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.planning import costs
from dpfl_jax.planning.costs import Chip, expected_rows

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "userlevel" / "stackoverflow_uls.yaml"
SMALL = [
    "model={size: tiny, overrides: {vocab_size: 512}}",
    "train.steps=100",
    "--max-group-size=2",
]


def test_hours_money_and_energy():
    chip = Chip.named("v5e", mfu=0.5, price=1.2, watts=200.0)
    found = chip.bill(PEAK["v5e"] * 0.5 * 3600 * 10)
    assert found["chip_hours"] == pytest.approx(10.0)
    assert found["money"] == pytest.approx(12.0)
    assert found["kwh"] == pytest.approx(2.0)
    assert set(Chip.named("1e12").bill(1.0)) == {"flops", "chip_hours"}
    each, steps = 1e12, 1000
    budget = chip.largest_budget(2.0, each, steps)
    assert chip.bill(budget * each * steps)["chip_hours"] <= 2.0
    assert chip.bill(2 * budget * each * steps)["chip_hours"] > 2.0


def test_rows_that_are_begun_are_computed_in_full():
    assert expected_rows(64, 1) == pytest.approx(64, rel=1e-6)
    drawn = np.random.default_rng(0).poisson(40, 200_000)
    assert expected_rows(40, 16) == pytest.approx(np.ceil(drawn / 16).mean(), rel=5e-3)
    assert expected_rows(9_999, 32) == pytest.approx(9_999 / 32 + 0.5, rel=1e-3)


def test_steps_cost_whatever_their_batch():
    chip = Chip(1e12, mfu=1.0, step_seconds=2.0)
    assert chip.bill(3.6e15, 1800)["chip_hours"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chip.named("v99"), "one of v2"),
        (lambda: Chip.named("v5e", mfu=1.5), "MFU is 1.5"),
        (lambda: Chip.named("v5e", price=-1.0), "price of a chip"),
        (lambda: Chip.named("-3"), "FLOP/s"),
        (lambda: Chip.named("v5e").largest_budget(1e-12, 1e12, 10), "do not pay"),
    ],
)
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises(BadInputError, match=message):
        make()


@pytest.mark.nightly
def test_cells_are_billed_for_the_operations_of_the_real_step(capsys):
    words = ["plan", str(CONFIG), *SMALL, "--chip", "1e15", "--mfu", "0.5", "--price", "2"]
    assert main([*words, "--compute-budget", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        main(["compile", str(CONFIG), *SMALL[:2], "--topology", "cpu:1", "--count-only", "--json"])
        == 0
    )
    shape = json.loads(capsys.readouterr().out.splitlines()[-1])
    # The textbook's 6 N per token, but for embeddings (no product), attention and clipping.
    textbook = 6.0 * shape["parameters"] * shape["seq_len"] * 64 * 100
    for option in found["options"]:
        assert 0.5 * textbook < option["bill"]["flops"] < 2.0 * textbook
        assert option["bill"]["money"] == pytest.approx(2 * option["bill"]["chip_hours"])
    assert "bill" in found["best"]
    hours = 1.01 * max(o["bill"]["chip_hours"] for o in found["options"])
    assert main([*words, "--chip-hours", str(hours), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["budget"] == 64
    assert main(["plan", str(CONFIG), "--compute-budget", "64", "--price", "2"]) == 2
    assert "needs --chip" in capsys.readouterr().err


def test_memory_is_that_of_the_programs_of_the_first_rows(monkeypatch):
    """Four programs; three rows are compiled, two of which are ELS and so one program."""
    asked = []

    def compiled(config, vocab, topology, mesh, **options):
        mechanism = config.mechanism
        asked.append((mechanism.kind, mechanism.participation.unit_examples))
        return {
            "fits": None,
            "peak_bytes": (mechanism.participation.unit_examples or 1) * 30 * 10**9,
        }

    monkeypatch.setattr("dpfl_jax.training.slices.measure", compiled)
    cells = [("els", 8, 0.1), ("uls", 4, 0.2), ("els", 2, 0.3), ("uls", 1, 0.4), ("els", 1, 0.5)]
    options = [
        {"kind": kind, "group_size": g, "gradients": g if kind == "uls" else 1, "bands": 1,
         "noise": noise}
        for kind, g, noise in cells
    ]  # fmt: skip
    result = {"options": options[::-1], "best": dict(options[0])}
    config = load_config(CONFIG, SMALL[:1])
    costs.add_memory(result, config, "cpu:1", Console(quiet=True), chip_name="h100")
    assert asked == [("els", None), ("uls", 4)]
    assert [option.get("memory", {}).get("fits") for option in options] == [
        True, False, True, None, True,
    ]  # fmt: skip
    assert result["best"]["memory"]["peak_bytes"] == 30 * 10**9
    assert _memory_words(options[1]) == ("111.76", "NO")
    assert _memory_words(options[3]) == ("-", "-")


def test_memory_of_another_chip_is_refused(capsys):
    assert main(["plan", str(CONFIG), "--chip", "v5e", "--memory", "v4:2x2x1"]) == 2
    assert "--memory is of v4" in capsys.readouterr().err
