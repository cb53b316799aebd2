"""Running out of memory is one sentence."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.cli import main as cli
from dpfl_jax.errors import BadInputError, TooLittleMemoryError, one_line, plain, too_little_memory


def test_text_of_others_is_told_without_letters_that_are_not_seen():
    assert plain("é 中\ta\nb\xa0c") == "é 中\ta\nb\xa0c"
    assert plain("\x1b[1m\r\u200f\u2028\u202e\x85") == "?[1m?????"
    assert one_line("a\nb\tc") == "a?b?c"


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (
            lambda: jnp.zeros((1 << 24, 1 << 22)),
            r"a device has too little memory for a step \(262,144.0 GiB more were",
        ),
        (
            lambda: np.zeros((1 << 24, 1 << 26)),
            r"the host has too little memory for a step \(8.00 PiB more were",
        ),
    ],
)
def test_what_was_asked_for_and_what_to_do(allocate, message):
    with (
        pytest.raises(TooLittleMemoryError, match=message) as caught,
        too_little_memory("a step", "use less"),
    ):
        allocate()
    assert str(caught.value).endswith(": use less")


def test_other_errors_pass():
    with pytest.raises(KeyError), too_little_memory("a step", "use less"):
        raise KeyError("memory")
    with pytest.raises(BadInputError, match="mine"), too_little_memory("a step", "use less"):
        raise BadInputError("mine")


def test_the_command_line_says_it(monkeypatch, capsys):
    import dpfl_jax.cli.show as show

    monkeypatch.setattr(show, "run", lambda args: jnp.zeros((1 << 24, 1 << 22)))
    assert cli.main(["show", "anything"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dpfl: error: a device has too little memory for `dpfl show` (262")
    assert error.count("\n") == 1
