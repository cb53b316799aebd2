"""Validators say what is wrong in one sentence; so does running out of memory."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.cli import main as cli
from dpfl_jax.errors import (
    BadInputError,
    TooLittleMemoryError,
    at_least,
    nearest,
    one_line,
    one_of,
    plain,
    positive,
    probability,
    require,
    too_little_memory,
)


@pytest.mark.parametrize("value", [None, 1, 0.5, np.float32(1e-30), np.int64(3)])
def test_positive_takes(value):
    positive("key", value)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "1", np.float64(-0.5)])
def test_positive_refuses(value):
    shown = repr(value) if isinstance(value, str) else str(value)
    with pytest.raises(BadInputError) as caught:
        positive("train.rate", value, "raise it")
    assert str(caught.value) == (
        f"train.rate is {shown}, but it must be finite and above 0: raise it"
    )


def test_at_least():
    for value in (None, 2, np.int32(8), 2.5):
        at_least("key", value, 2, most=8)
    at_least("key", 7, 2, whole=True)
    for value in (1, 9, math.nan, "2"):
        with pytest.raises(BadInputError, match=r"it must be at least 2 and at most 8$"):
            at_least("key", value, 2, most=8)
    for value in (1, True, 2.0, math.nan):
        with pytest.raises(BadInputError, match=r"must be a whole number, at least 2: use two$"):
            at_least("key", value, 2, whole=True, advice="use two")


def test_probability():
    for value in (None, 0, 1, 0.5):
        probability("key", value)
    probability("key", 0.5, zero=False, one=False)
    for value in (-1e-9, 1.1, math.nan, "half"):
        with pytest.raises(BadInputError, match=r"must be at least 0 and at most 1$"):
            probability("key", value)
    with pytest.raises(BadInputError, match=r"must be above 0 and at most 1$"):
        probability("key", 0.0, zero=False)
    with pytest.raises(BadInputError, match=r"must be at least 0 and below 1$"):
        probability("key", 1, one=False)


def test_one_of():
    one_of("key", "scan", ("scan", "vmap"))
    one_of("key", None, ("scan",))
    with pytest.raises(BadInputError, match=r"^key is 'vmapp', but it must be one of scan, vmap$"):
        one_of("key", "vmapp", (name for name in ("scan", "vmap")))


def test_nearest():
    assert nearest("vmapp", ["scan", "vmap"]) == "did you mean 'vmap'?"
    assert nearest("loop", ["vmap", "scan"]) == "known: scan, vmap"


def test_what_may_be_data_is_not_printed():
    for value, kind in ((np.arange(3), "ndarray"), ([7, 8], "list"), (jnp.arange(3), "ArrayImpl")):
        with pytest.raises(BadInputError, match=f"^ages is a {kind}, but it must be one number$"):
            require(False, "ages", value, "one number")


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
