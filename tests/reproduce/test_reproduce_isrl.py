"""The reproductions of ISRL-DP: every claim of the small ones holds."""

import pytest
from rich.console import Console

from dpfl_jax.errors import BadInputError
from dpfl_jax.reproduce import registry
from dpfl_jax.reproduce.registry import Settings


def outcome(name, tmp_path, data_dir=None):
    console = Console(quiet=True)
    return registry.load(name).run(Settings(True, tmp_path, console, data_dir))


def test_what_the_noise_really_spends(tmp_path):
    found = outcome("isrl/closed-forms", tmp_path)
    assert all(claim.holds for claim in found.claims)
    assert all(file.stat().st_size > 1000 for file in found.files)


@pytest.mark.parametrize("name", ["isrl/mnist", "isrl/insurance"])
def test_missing_data_is_one_sentence(tmp_path, name):
    with pytest.raises(BadInputError, match="DPFL_DATA_DIR"):
        outcome(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["isrl/rates", "isrl/acceleration"])
def test_rates_and_acceleration(tmp_path, name):
    assert all(claim.holds for claim in outcome(name, tmp_path).claims)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["isrl/mnist", "isrl/insurance"])
def test_experiments_on_real_data(tmp_path, data_dir, name):
    assert all(claim.holds for claim in outcome(name, tmp_path, data_dir).claims)
