"""The best of a random number of runs: the law of that number, its epsilon, scores, an attack."""

import dataclasses
import fractions
import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent, dp_event, rdp
from scipy import optimize, stats

from dpfl_jax.accounting import (
    ADD_OR_REMOVE,
    Account,
    BudgetExceededError,
    Ledger,
    accountant_of,
    epsilon,
    events,
    statement,
)
from dpfl_jax.accounting.event_types import ApproximateDpEvent, OneOfDpEvent, from_json, to_json
from dpfl_jax.accounting.renyi import ORDERS, renyi_divergences
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Independent, Population, allocation, bandmf, els, uls
from dpfl_jax.noise.exact import STDDEV, draw_integer
from dpfl_jax.planning.selection import RunCount, Selection, restate
from dpfl_jax.randomness import RootKey

DELTA = 1e-5
PEOPLE = Population(num_users=400, num_examples=2000, num_units=400)
SHAPES = [0.0, 0.5, 1.0]


def run_of(mechanism, population, steps):
    return mechanism.calibrate(population, steps, noise_multiplier=1.0, delta=DELTA)


def of_users(cohort=20, steps=30):
    return run_of(uls(group_size=3, cohort_size=cohort), PEOPLE, steps)


def selection(*cells, runs=None, epsilon=4.0, delta=DELTA, bound=3.0, held_out=50):
    runs = runs or RunCount(10.0)
    return Selection.calibrated(
        cells or [of_users()], runs, bound, held_out, epsilon=epsilon, delta=delta
    )


def definition(gamma, shape, k):
    """Definition 1 of the paper, term by term."""
    if shape == 0:
        return (1 - gamma) ** k / (k * math.log(1 / gamma))
    product = math.prod((i + shape) / (i + 1) for i in range(k))
    return (1 - gamma) ** k / (gamma**-shape - 1) * product


# ---- the number of runs ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.01, 2.5, 10.0, 100.0])
def test_the_law_is_that_of_the_paper(shape, mean):
    law = RunCount(mean, shape)
    found = [float(p) for p in itertools.islice(law.probabilities(), 30_000)]
    for k in (1, 2, 3, 7, 40):
        assert found[k - 1] == pytest.approx(definition(law.gamma, shape, k), rel=1e-9)
    assert sum(found) == pytest.approx(1.0, abs=1e-9)
    told = sum(k * p for k, p in enumerate(found, 1))
    assert told == pytest.approx(mean, rel=1e-6)
    # What is drawn costs no more than what dp-accounting takes for it.
    theirs = rdp.rdp_privacy_accountant._gamma_truncated_negative_binomial(shape, mean)
    assert theirs * (1 - 1e-12) <= law.gamma <= theirs * (1 + 1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_is_drawn_from_the_law(shape):
    """Chi-square over 2,000 keys; a right sampler fails 1 seed in 10,000, and it is fixed."""
    law, root = RunCount(5.0, shape), RootKey.from_seed(3)
    drawn = np.array([law.draw(root.child("sweep", i)) for i in range(2000)])
    top = 20
    seen = np.bincount(np.minimum(drawn, top), minlength=top + 1)[1:]
    expected = np.array([definition(law.gamma, shape, k) for k in range(1, top)]) * len(drawn)
    expected = np.append(expected, len(drawn) - expected.sum())
    assert stats.chisquare(seen, expected).pvalue > 1e-4
    # It would see the geometric law in the place of the logarithmic one.
    other = RunCount(5.0, 1.0 - shape if shape != 0.5 else 0.0)
    wrong = np.array([definition(other.gamma, other.shape, k) for k in range(1, top)]) * len(drawn)
    wrong = np.append(wrong, len(drawn) - wrong.sum())
    assert stats.chisquare(seen, wrong).pvalue < 1e-6


def test_all_256_bits_decide():
    class Bits:
        def __init__(self, value):
            self.value = value

        def derive(self, purpose):
            assert purpose == "selection:runs"
            return self.value.to_bytes(32, "big")

    law = RunCount(4.0, 1.0)
    edge = math.floor(fractions.Fraction(law.gamma) * 2**256)  # geometric: the first probability
    assert law.draw(Bits(edge - 1)) == 1
    assert law.draw(Bits(edge + 1)) == 2
    assert law.draw(Bits(0)) == 1
    assert law.draw(Bits(2**256 - 1)) > 100
    for mean in (1.0, 0.0, math.inf, math.nan):
        with pytest.raises(BadInputError, match=r"give 1\.001 or more"):
            RunCount(mean)


# ---- what it costs -----------------------------------------------------------------------------


def theorem(curve, gamma, shape, mean, delta):
    """Theorem 2 with all orders, not a grid of them, and the conversion of Canonne et al. 2020."""

    def extra(log_order):
        order = 1.0 + math.exp(log_order)
        return (1 - 1 / order) * curve(order) + math.log(1 / gamma) / order

    least = optimize.minimize_scalar(extra, bounds=(-8, 9), method="bounded")

    def cost(log_gap):
        order = 1.0 + math.exp(log_gap)
        renyi = curve(order) + (1 + shape) * least.fun + math.log(mean) / (order - 1)
        return renyi + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)

    return optimize.minimize_scalar(cost, bounds=(-4, 8), method="bounded").fun


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sigma", [2.0, 10.0])
@pytest.mark.parametrize("mean", [2.0, 10.0, 100.0])
def test_epsilon_is_theorem_2(shape, sigma, mean):
    event = dp_event.RepeatAndSelectDpEvent(GaussianDpEvent(sigma), mean, shape)
    found = epsilon(event, DELTA, accountant="rdp")
    gamma = RunCount(mean, shape).gamma
    best = theorem(lambda a: a / (2 * sigma**2), gamma, shape, mean, DELTA * (1 - 2**-20))
    assert best * (1 - 1e-9) <= found <= 1.01 * best


def test_golden_numbers():
    """By the formula, worked out once with mpmath at 30 digits; sigma 4, mean 10, delta 1e-5."""
    for shape, golden in GOLDEN.items():
        event = dp_event.RepeatAndSelectDpEvent(GaussianDpEvent(4.0), 10.0, shape)
        assert epsilon(event, DELTA, accountant="rdp") == pytest.approx(golden, rel=1e-3)


GOLDEN = {0.0: 1.78388909, 1.0: 2.15340936}


def test_of_several_cells_the_largest_divergence_counts_order_by_order():
    steep, flat = GaussianDpEvent(2.0), events.uls(0.7, 0.001, 2000)
    curves = [renyi_divergences(event) for event in (steep, flat)]
    assert (curves[0] < curves[1]).any()
    assert (curves[0] > curves[1]).any()
    together = OneOfDpEvent((steep, flat))
    np.testing.assert_array_equal(renyi_divergences(together), np.maximum(*curves))

    def best(event):
        return dp_event.RepeatAndSelectDpEvent(event, 10.0, 0.0)

    each = [epsilon(best(event), DELTA, accountant="rdp") for event in (steep, flat)]
    whole = epsilon(best(together), DELTA, accountant="rdp")
    # The largest epsilon of a cell alone would be no bound by this theorem.
    assert whole >= max(each)
    assert from_json(to_json(best(together))) == best(together)
    assert accountant_of(best(together)) == "rdp"
    assert accountant_of(flat) == "pld"
    private = OneOfDpEvent((steep, dp_event.NonPrivateDpEvent()))
    assert epsilon(private, DELTA, accountant="rdp") == math.inf
    assert epsilon(OneOfDpEvent((dp_event.NoOpDpEvent(),)), DELTA, accountant="rdp") == 0
    with pytest.raises(BadInputError, match="only Renyi divergences are known for OneOfDpEvent"):
        epsilon(together, DELTA)


def test_noise_is_found_for_the_whole():
    bands = bandmf(group_size=3, cohort_size=10, bands=2, column=(0.8, 0.6))
    limited = Population(num_users=400, num_examples=2000, num_units=1200)
    examples = run_of(els(group_size=4, batch_size=30), limited, 30)
    made = selection(of_users(), of_users(cohort=60), run_of(bands, PEOPLE, 60), examples)
    assert 0.999 * 4.0 < made.epsilon <= 4.0
    assert made.epsilon == epsilon(made.event, DELTA, accountant="rdp")

    def best(event):
        return epsilon(dp_event.RepeatAndSelectDpEvent(event, 10.0, 0.0), DELTA, accountant="rdp")

    alone = [best(cell.event()) for cell in made.cells]
    assert alone[0] > 0.999 * 4.0
    assert all(3.0 < found <= 4.0 for found in alone)
    together = best(OneOfDpEvent(tuple(cell.event() for cell in made.cells)))
    score = best(GaussianDpEvent(made.score_noise))
    assert max(*alone, score) <= together <= made.epsilon
    assert score > 3.0
    for cell in made.cells:
        assert epsilon(cell.event(), DELTA) < 2.8  # a run costs less than the best of many
        assert made.noised(cell) == cell
    # Where all cells cost alike none of them pays for another.
    same = selection(of_users(), epsilon=2.0)
    assert best(same.cells[0].event()) > 0.999 * 2.0
    with pytest.raises(BadInputError, match=r"kind=allocation: use .*kind=uls, els or bandmf"):
        selection(run_of(allocation(group_size=3, cohort_size=20), PEOPLE, 30))


def test_the_statement_holds_and_says_what_it_rests_on():
    made = selection(of_users(), of_users(cohort=60))
    stated = made.statement(("a caveat of the run",))
    assert stated.privacy.epsilon == made.epsilon
    found, own = statement.differences(stated, restate)
    assert found == []
    assert own == ["a caveat of the run"]
    assert Selection.from_json(made.to_json()) == made
    told = str(stated.privacy)
    for words in (
        "expected number of runs",
        "stays secret",
        "nobody who is held out is trained on",
    ):
        assert words in told
    # Less noise, or more runs, than the events say is seen.
    for changes in ({"score_noise": made.score_noise / 2}, {"expected_runs": 20.0}):
        false = stated.model_copy(update={"basis": {**stated.basis, **changes}})
        assert statement.differences(false, restate)[0]


def test_noise_is_told_as_that_of_the_cell_whose_noise_says_least():
    exact = of_users()
    single = dataclasses.replace(exact.mechanism, noise=Independent(arithmetic="float"))
    cells = exact, dataclasses.replace(exact, mechanism=single)
    for some, drawn in ((cells, "float"), (cells[::-1], "float"), (cells[:1], "exact")):
        made = Selection(some, RunCount(10.0), 3.0, 50, DELTA, 5.0).statement()
        assert made.noise.drawn == drawn


def test_a_ledger_adds_sweeps_and_runs(tmp_path):
    ledger, account = Ledger(tmp_path / "spent.jsonl"), Account("people")
    made = selection()
    once = ledger.reserve(account, "sweep", made.event, DELTA)
    assert once.after == pytest.approx(made.epsilon)
    again = ledger.reserve(account, "sweep", made.event, DELTA)
    assert again.after == once.after
    run = events.uls(2.0, 0.05, 30)
    both = ledger.reserve(account, "run", run, DELTA).after
    assert once.after < both < once.after + epsilon(run, DELTA / 2)
    with pytest.raises(BudgetExceededError):
        ledger.reserve(account, "another", made.event, DELTA, budget=5.0)
    # Of a foreign run no divergences are known: each has half of delta.
    foreign = ledger.reserve(account, "foreign", ApproximateDpEvent(0.5, 1e-7), DELTA).after
    assert both < foreign < math.inf


# ---- scores ------------------------------------------------------------------------------------


def test_a_person_moves_the_sum_by_half_the_bound_at_most():
    """Each is removed, and has their data changed: to nothing, to NaN, to whatever."""
    made, rng = selection(), np.random.default_rng(0)
    most = math.floor(STDDEV / made.score_noise)
    assert most * made.score_noise <= STDDEV
    counts = np.array([3, 1, 0, 5, 2])
    offsets = 100 + np.concatenate([[0], np.cumsum(counts)])
    losses = rng.exponential(2.0, counts.sum()).astype(np.float32)
    whole = made.shares(losses, offsets)
    assert all(isinstance(share, int) and abs(share) <= most for share in whole)
    assert whole[2] == 0
    first = 2 * min(float(losses[:3].mean()), made.bound) / made.bound - 1
    assert whole[0] == pytest.approx(first * most, abs=2.0**-20 * most)
    extreme = [np.nan, np.inf, -np.inf, -5.0, 0.0, 1e30, made.bound]
    for user, changed in itertools.product(range(5), extreme):
        here = slice(offsets[user] - 100, offsets[user + 1] - 100)
        left = np.delete(losses, here)
        there = np.concatenate([[100], 100 + np.cumsum(np.delete(counts, user))])
        without = made.shares(left, there)
        other = losses.copy()
        other[here] = changed
        moved = made.shares(other, offsets)
        assert [*moved[:user], *moved[user + 1 :]] == without
        assert abs(sum(moved) - sum(without)) <= most
        assert abs(sum(whole) - sum(without)) <= most


def test_the_noise_of_a_score_is_that_of_its_event():
    """Kolmogorov-Smirnov over 300 keys (a right sampler fails 1 seed in 10,000), and its place."""
    made, root = selection(held_out=4), RootKey.from_seed(0)
    drawn = [draw_integer(root.words("n", i)) / STDDEV for i in range(300)]
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    assert len(set(drawn)) == 300
    losses, offsets = np.full(4, 0.75), np.arange(5)
    most = math.floor(STDDEV / made.score_noise)
    for i in range(5):
        key = root.child("run", i)
        noise = draw_integer(key.words("selection:score"))
        expected = 0.75 + noise / most * made.bound / 2 / 4
        assert made.score(losses, offsets, key) == pytest.approx(expected, rel=1e-9)
    assert made.score_stddev == pytest.approx(made.score_noise * made.bound / 2 / 4, rel=1e-9)


# ---- an attack ---------------------------------------------------------------------------------


def proved(inside, outside, delta, level):
    """Epsilon that thresholds on a release refute, by Clopper and Pearson, a union over all tries.

    Half of the trials choose a threshold and a side; the others prove.
    """
    half = len(inside) // 2
    (learn_in, prove_in), (learn_out, prove_out) = ((x[:half], x[half:]) for x in (inside, outside))

    def rates(p, q, cut, sign):
        return (np.sum(sign * p > sign * cut), len(p)), (np.sum(sign * q > sign * cut), len(q))

    def bound(hits, misses):
        low = stats.beta.ppf(level / 2, hits[0], hits[1] - hits[0] + 1) if hits[0] else 0.0
        most = misses[1] - misses[0]
        high = stats.beta.ppf(1 - level / 2, misses[0] + 1, most) if most else 1.0
        return math.log((low - delta) / high) if low > delta else 0.0

    cuts = np.quantile(np.concatenate([learn_in, learn_out]), np.linspace(0.002, 0.998, 400))
    tries = [(cut, sign, swap) for cut in cuts for sign in (1, -1) for swap in (False, True)]

    def score(pair, cut, sign, swap):
        p, q = pair[::-1] if swap else pair
        return bound(*rates(p, q, cut, sign))

    best = max(tries, key=lambda one: score((learn_in, learn_out), *one))
    return score((prove_in, prove_out), *best)


def simulated(made, counts, rng, losses):
    """The released score of a sweep for each number of runs, one after the other."""
    total = sum(made.shares(np.asarray(losses), np.arange(len(losses) + 1)))
    noise = [rng.normal(size=k).min() for k in counts]
    return total / STDDEV + np.asarray(noise)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_an_attack_on_10000_sweeps_never_refutes_the_claim_and_sees_a_fixed_number(shape):
    """The attacker knows all held-out people but one; a true claim is refuted once in 1,000."""
    claimed, delta, level = 2.0, 1e-3, 1e-3
    law = RunCount(10.0, shape)
    made = selection(runs=law, epsilon=claimed, delta=delta)
    rng, root = np.random.default_rng(1), RootKey.from_seed(5)
    others = [0.4, 2.5, 1.1]
    counts = [law.draw(root.child("sweep", i)) for i in range(10_000)]
    worlds = (
        simulated(made, counts[:5000], rng, [*others, 0.0]),
        simulated(made, counts[5000:], rng, others),
    )
    found = proved(*worlds, delta, level)
    assert 0.1 < found <= made.epsilon <= claimed
    # 2,000 runs each time, accounted as 10 expected ones.
    fixed = [np.full(5000, 2000)] * 2
    worlds = (
        simulated(made, fixed[0], rng, [*others, 0.0]),
        simulated(made, fixed[1], rng, others),
    )
    assert proved(*worlds, delta, level) > claimed


def test_whose_event_is_whose():
    """Of who is trained on that of all cells' steps; of who is held out that of a score."""
    made = selection(of_users(), of_users(cohort=60))
    trained, held_out = made.event.events
    assert trained.event == OneOfDpEvent(tuple(cell.event() for cell in made.cells))
    assert all(isinstance(event, SelfComposedDpEvent) for event in trained.event.events)
    assert held_out.event == GaussianDpEvent(made.score_noise)
    for part in (trained, held_out):
        assert (part.mean, part.shape) == (10.0, 0.0)
        above = renyi_divergences(made.event, ORDERS, ADD_OR_REMOVE)
        assert (above >= renyi_divergences(part)).all()
