"""``dpfl reproduce correlated/...``: runs in small, at equal epsilon and compute."""

import dataclasses
import json

import pytest

from dpfl_jax.accounting import epsilon
from dpfl_jax.cli.main import main
from dpfl_jax.mechanisms import Population
from dpfl_jax.planning import Option
from reproductions.correlated import _training as correlated


@pytest.mark.nightly
def test_the_language_model_in_small(tmp_path, capsys):
    command = ["reproduce", "correlated/language-model", "--quick", "--seeds", "1", "--json"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    uls, *others = found["rows"]
    assert [row["kind"] for row in found["rows"]] == ["uls", "bandmf", "blt", "allocation"]
    users = int(found["notes"][0].split()[0])
    people = Population(users, users, users)
    for row in found["rows"]:
        assert uls["size"] * uls["gradients"] == row["size"] * row["gradients"]
        option = Option(**{field.name: row[field.name] for field in dataclasses.fields(Option)})
        made = correlated._mechanism(option).calibrate(
            people, 16, noise_multiplier=option.noise_multiplier
        )
        assert 7.9 < epsilon(made.event(), 1e-4) <= 8.0
    assert len(found["claims"]) == len(others)
    for claim in found["claims"]:
        assert claim["holds"] is None  # one seed decides nothing
    assert float(found["claims"][0]["measured"].split(",")[0]) < 0
    assert (tmp_path / "correlated-language-model.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (2.0, "BLT is ahead of ULS"),
        (1.0, "BLT is not behind ULS by more than 5% of ULS's gain"),
        (0.8, None),
        (0.5, "BLT is behind ULS"),
    ],
)
def test_what_noise_foretells_is_what_is_claimed(gain, words):
    def row(kind, noise, losses):
        known = {"epsilon": 8.0, "optimizer": "sgd", "kind": kind, "noise": noise, "bands": 1}
        return {**known, "losses": losses, "mean": sum(losses) / 3}

    worse = {2.0: -0.5, 0.5: 0.5}.get(gain, 0.0)
    rows = [
        row("uls", 1.0, [4.0, 4.1, 4.2]),
        row("blt", 1 / gain, [4.0 + worse, 4.11 + worse, 4.19 + worse]),
    ]
    claims = correlated._claims(rows, 5.5)
    assert [claim.claim for claim in claims] == ([f"epsilon 8, sgd: {words}"] if words else [])
    assert all(claim.holds for claim in claims)
