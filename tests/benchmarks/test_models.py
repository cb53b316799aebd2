"""``dpfl bench models``: models of other libraries against plain vmap(grad)."""

import json

import pytest

from dpfl_jax.cli.main import main


def rows_of(capsys, *names):
    code = main(
        ["bench", "models", "--only", ",".join(names), "--batch", "4", "--rounds", "1", "--json"]
    )
    assert code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    if result["not_installed"]:
        pytest.skip(f"not installed (uv sync --group models): {sorted(result['not_installed'])}")
    return {row["model"]: row for row in result["rows"]}


@pytest.mark.nightly
def test_sums_and_norms_are_those_of_plain_gradients(capsys):
    rows = rows_of(capsys, "haiku")
    assert rows["haiku"]["norm_error"] < 1e-5
    assert rows["haiku"]["sum_error"] < 1e-5
    assert rows["haiku"]["time_ratio"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("nnx", 1e-5),
        ("linen", 1e-5),
        ("equinox", 1e-5),
        ("embedding-bag", 1e-5),
        ("tunix-qwen3", 1e-5),
        ("tunix-qwen3-moe", 1e-4),
        ("tunix-llama3", 1e-5),
        ("tunix-gemma3", 3e-2),  # bfloat16, as it comes
        ("qwix-lora", 1e-5),
        ("keras-gpt2", 1e-5),
    ],
)
def test_models_of_other_libraries(capsys, name, tolerance):
    row = rows_of(capsys, name)[name]
    assert row["norm_error"] < tolerance
    assert row["sum_error"] < tolerance
    assert (row["trained"] < row["parameters"]) == (name == "qwix-lora")


def test_unknown_models_are_named(capsys):
    assert main(["bench", "models", "--only", "torch"]) == 2
    assert "'torch', which is none of these" in capsys.readouterr().err
