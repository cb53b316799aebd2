"""What `dpfl data` prints, and that private quantiles are private."""

import json
import pathlib

import numpy as np
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.data import ArrayStore
from dpfl_jax.data.build import write_store
from dpfl_jax.data.inspect import private_quantile, size_histogram
from dpfl_jax.data.shards import open_store
from dpfl_jax.errors import BadInputError


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "store"
    counts = [1] * 10 + [4] * 25 + [30] * 6
    users = ((f"u{i}", {"x": np.arange(n)}) for i, n in enumerate(counts))
    write_store(ArrayStore.from_users(users), path)
    return path


def last_json(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_inspect_counts_and_plots(store, tmp_path, capsys):
    png = tmp_path / "sizes.png"
    assert main(["data", "inspect", str(store), "--verify", "--png", str(png), "--json"]) == 0
    result = last_json(capsys)
    assert (result["users"], result["examples"], result["median"]) == (41, 10 + 100 + 180, 4)
    assert result["verified"] is True
    assert sum(row["users"] for row in result["histogram"]) == 41
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["data", "inspect", str(store)]) == 0
    assert "41 users" in capsys.readouterr().out


def test_verify_names_the_shard_with_exit_code_2(store, tmp_path, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    shard = next(copy.glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["data", "inspect", str(copy), "--verify"]) == 2
    error = capsys.readouterr().err
    assert shard.name in error
    assert "Traceback" not in error


def test_private_output_holds_nothing_exact(store, capsys):
    command = ["data", "inspect", str(store), "--private", "--epsilon", "1", "--json"]
    assert main(command) == 0
    result = last_json(capsys)
    assert set(result) == {
        "private", "epsilon", "delta", "unit", "adjacency", "mechanism", "largest", "public_seed",
        "quantiles", "verified",
    }  # fmt: skip
    fingerprint = open_store(store).fingerprint
    for arguments in (command, command[:-1]):
        assert main([*arguments, "--verify"]) == 0
        captured = capsys.readouterr()
        assert fingerprint[:8] not in captured.out + captured.err
    assert "every byte is as built" in captured.out
    assert "know the seed" not in captured.out
    assert main([*command[:-1], "--seed", "1"]) == 0
    assert "not against those who know the seed" in " ".join(capsys.readouterr().out.split())
    assert main(["data", "inspect", str(store), "--private"]) == 2
    assert "needs --epsilon" in capsys.readouterr().err
    assert main([*command[:-1], "--png", "x.png"]) == 2
    assert main(["data", "inspect", str(store), "--private", "--epsilon", "-1"]) == 2
    assert main(["data", "inspect", str(store), "--epsilon", "1"]) == 2


def test_build_command_end_to_end(tmp_path, capsys):
    path = tmp_path / "posts.jsonl"
    rows = [{"play": "p", "who": f"w{i % 7}", "said": f"line {i}"} for i in range(70)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "store"
    command = ["data", "build", "--input", str(path), "--user-column", "{play}/{who}"]
    command += ["--text-column", "said", "--seq-len", "16", "--out", str(out), "--json"]
    assert main(command) == 0
    result = last_json(capsys)
    assert (result["users"], result["examples"]) == (7, 70)
    assert main(command) == 2
    assert "exists" in capsys.readouterr().err
    for change, message in (
        (["--user-column", "author"], "no column 'author'"),
        (["--input", "/nowhere.jsonl"], "does not exist"),
        (["--store-format", "zip"], "must be one of arrow, arrayrecord"),
        (["--tokenizer", "x"], "neither 'bytes'"),
        (["--source", "tfds"], "cannot open the TFDS"),
        (["--source", "nothing"], "unknown"),
    ):
        assert main([*command, "--out", str(tmp_path / "new"), *change]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) <= 4  # progress lines and one sentence
        assert not pathlib.Path(tmp_path / "new").exists()


def test_histogram_classes():
    rows = size_histogram(np.array([1, 2, 3, 4, 7, 8, 1024]))
    assert [(r["from"], r["to"], r["users"]) for r in rows if r["users"]] == [
        (1, 1, 1), (2, 3, 2), (4, 7, 2), (8, 15, 1), (1024, 2047, 1),
    ]  # fmt: skip


def exact_law(counts, quantile, epsilon, largest):
    """The exponential mechanism's probabilities, by its definition."""
    v = np.arange(1, largest + 1)[:, None]
    score = -np.abs(quantile * (counts < v).sum(1) - (1 - quantile) * (counts > v).sum(1))
    weight = np.exp(epsilon * score / (2 * max(quantile, 1 - quantile)))
    return weight / weight.sum()


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_private_quantile_is_drawn_from_the_exponential_mechanism(quantile):
    counts = np.array([1, 1, 2, 5, 5, 6, 9, 12])
    law = exact_law(counts, quantile, 1.5, 15)
    rng = np.random.default_rng(0)
    draws = [private_quantile(counts, quantile, 1.5, 15, rng) for _ in range(20000)]
    observed = np.bincount(draws, minlength=16)[1:]
    chi2 = ((observed - 20000 * law) ** 2 / (20000 * law)).sum()
    assert chi2 < 54  # 14 degrees of freedom, false alarm 1e-6


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
def test_private_quantile_bounds_the_likelihood_ratio_of_neighbours(quantile):
    rng = np.random.default_rng(1)
    for _ in range(50):
        counts = rng.integers(1, 20, rng.integers(0, 12))
        neighbour = np.append(counts, rng.integers(1, 25))
        a = exact_law(counts, quantile, 0.7, 20)
        b = exact_law(neighbour, quantile, 0.7, 20)
        assert np.abs(np.log(a / b)).max() <= 0.7 + 1e-9


def test_private_median_is_near_for_many_users():
    counts = np.random.default_rng(2).geometric(0.05, 20000)
    median = np.median(counts)
    value = private_quantile(counts, 0.5, 1.0, 100_000, np.random.default_rng(3))
    assert abs(value - median) <= 2
    with pytest.raises(BadInputError, match="quantile is 1"):
        private_quantile(counts, 1.0, 1.0, 10, np.random.default_rng(3))
