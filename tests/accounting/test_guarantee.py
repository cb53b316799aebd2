"""A guarantee says everything, survives JSON, and compares only with its like."""

import dataclasses
import json
import math

import pytest

from dpfl_jax import accounting
from dpfl_jax.accounting import Guarantee, delta_caveats
from dpfl_jax.accounting.statement import dp_accounting_bounds
from dpfl_jax.errors import BadInputError

ONE = Guarantee(
    unit="user",
    adjacency="add-or-remove one user",
    trust="central",
    epsilon=1.5,
    delta=1e-6,
    noise_multiplier=8.4,
    accountant="PLD",
    sampling="Poisson over 1024 users",
    assumptions=("the number of users is public",),
    caveats=("tuning is not covered",),
)
NAMES = ("epsilon", "delta")


def test_in_short_it_is_six_lines():
    caveats = (*(f"caveat {i}: and why" for i in range(5)), "other runs are not counted: add up")
    given = Guarantee("user", "add-or-remove one user", "central", 3.99991, 1e-5, 1.0, "pld", "all",
                      caveats=caveats, unit_key="column who")  # fmt: skip
    assert given.in_short("An attacker finds few") == [
        "protects each user by column who (add-or-remove one user; trust model: central)",
        "epsilon 4, delta 1e-05",
        "An attacker finds few",
        "not covered: other runs are not counted",
        "not covered: caveat 4",
        "not covered: caveat 3",
    ]
    nobody = dataclasses.replace(given, epsilon=math.inf)
    assert nobody.in_short("") == ["NO differential-privacy guarantee"]


def test_paragraph_names_everything():
    text = str(ONE)
    for word in ("1.5", "1e-06", "user", "add-or-remove", "central", "8.4", "Poisson", "PLD"):
        assert word in text
    assert "number of users is public" in text
    assert "tuning is not covered" in text


def test_the_summary_is_one_line_and_rounds_up():
    assert ONE.summary() == (
        "epsilon 1.5, delta 1e-06 for each user (add-or-remove one user; trust model: central)"
    )
    for value in (8.0, 7.99973, 8.00001, 0.12341, 1234.5, 3.00000001e-5):
        tiny = min(value / 10, 0.4996)
        text = dataclasses.replace(ONE, epsilon=value, delta=tiny).summary()
        epsilon, delta = (float(text.split(f"{name} ")[1].split()[0].strip(",")) for name in NAMES)
        assert value <= epsilon < 1.0011 * value
        assert tiny <= delta < 1.011 * tiny
    assert "NO" in dataclasses.replace(ONE, epsilon=math.inf).summary()
    closed = dataclasses.replace(ONE, status="paper's closed form")
    assert "not verified" in closed.summary()


def test_the_paragraph_rounds_up_too():
    for value in (8.0, 2.4142134, 0.12341649, 5.00000049):
        given = dataclasses.replace(ONE, epsilon=value, delta=value * 1e-7)
        epsilon, delta = map(float, given.paragraph()[1:].split(")")[0].split(", "))
        assert value <= epsilon < 1.00002 * value
        assert value * 1e-7 <= delta < 1.00002e-7 * value


def test_a_second_opinion_is_none_where_it_is_no_bound():
    """At epsilon 1,462 dp_accounting's bound from below was 1,463: e^-epsilon is 0 there."""
    event = accounting.events.gaussian(0.02, 1)
    assert accounting.epsilon(event, 1e-5) == pytest.approx(1462.285, abs=1e-3)
    assert dp_accounting_bounds(event, 1e-5) is None
    small = accounting.events.gaussian(2.0, 1)
    low, high = dp_accounting_bounds(small, 1e-5)
    assert low <= accounting.epsilon(small, 1e-5) <= high * (1 + 1e-5)


def test_json_round_trip_even_when_infinite():
    for guarantee in (ONE, dataclasses.replace(ONE, epsilon=math.inf)):
        text = json.dumps(guarantee.to_json(), allow_nan=False)
        assert Guarantee.from_json(json.loads(text)) == guarantee


def test_infinite_epsilon_reads_as_no_guarantee():
    assert (
        "NO differential-privacy guarantee"
        in dataclasses.replace(ONE, epsilon=math.inf).paragraph()
    )


def test_a_delta_of_one_over_the_units_is_named():
    assert delta_caveats(1e-3, 999, "users") == ()
    for delta, units in ((1e-3, 1000), (0.5, 29)):
        (said,) = delta_caveats(delta, units, "users")
        assert f"delta {delta:g} is not below one over the {units:,} users" in said


def test_compare():
    smaller = dataclasses.replace(ONE, epsilon=1.0)
    assert smaller.compare(ONE) == "stronger"
    assert ONE.compare(smaller) == "weaker"
    assert ONE.compare(ONE) == "equal"
    assert dataclasses.replace(ONE, epsilon=1.0, delta=1e-5).compare(ONE) == "incomparable"


@pytest.mark.parametrize("field", ["unit", "adjacency", "trust"])
def test_unlike_guarantees_are_not_compared(field):
    with pytest.raises(BadInputError, match=field):
        ONE.compare(dataclasses.replace(ONE, **{field: "another"}))


def test_a_name_stands_in_its_line():
    """Of a column, say: `dpfl verify` prints it."""
    named = dataclasses.replace(ONE, unit_key="a\nall of it holds\u2028b", public_inputs=("c\n",))
    assert named.unit_key == "a?all of it holds?b"
    assert named.public_inputs == ("c?",)


def test_nan_is_never_a_guarantee():
    with pytest.raises(BadInputError):
        dataclasses.replace(ONE, epsilon=math.nan)
