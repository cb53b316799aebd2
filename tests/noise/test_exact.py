"""Exact noise is what is accounted: table, arithmetic, keys. False alarms below 1e-6."""

import decimal
import math
import re
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from scipy import stats

from dpfl_jax.accounting import drawn, epsilon, events
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.noise import Noise, chacha, exact
from dpfl_jax.randomness import RootKey

KEY = RootKey.from_seed(11)
KNOTS = 2**32
PRECISE = decimal.Context(prec=90)
PI = Decimal("3.1415926535897932384626433832795028841971693993751058209749445923078164062862089986")


def key(step=0):
    return jnp.asarray(KEY.words("noise", step))


# ---- keys


RFC = (  # section 2.3.2: key, counter and nonce, words of a block after 20 rounds
    bytes(range(32)).hex(),
    "01000000000000090000004a00000000",
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
)
TWELVE = (  # draft-strombergson-chacha-test-vectors-01, TC1 with 256 bits and 12 rounds
    "00" * 32,
    "00" * 16,
    "9bf49a6a0755f953811fce125f2683d50429c3bb49e074147e0089a52eae155f"
    "0564f879d27ae3c02ce82834acfa8c793a629f2ca0de6919610be82f411326be",
)


@pytest.mark.parametrize("places", [1, 2 * chacha._WRITTEN_OUT])
@pytest.mark.parametrize(("rounds", "vector"), [(20, RFC), (12, TWELVE)])
def test_blocks_are_those_published(rounds, vector, places, monkeypatch):
    """By a loop over the rounds and written out; noise takes 12, which share all lines with 20."""
    assert chacha.ROUNDS == 12
    monkeypatch.setattr(chacha, "ROUNDS", rounds)
    secret, where, want = (bytes.fromhex(x) for x in vector)
    place = [jnp.full(places, x, jnp.uint32) for x in np.frombuffer(where, np.uint32)]
    words = np.stack(chacha.block(jnp.asarray(np.frombuffer(secret, np.uint32)), place))
    assert words[:, -1].tobytes() == want
    assert (words == words[:, :1]).all()


def test_keys_of_keys_are_hchacha20():
    """draft-irtf-cfrg-xchacha, section 2.2.1."""
    secret = jnp.asarray(np.frombuffer(bytes(range(32)), np.uint32))
    nonce = np.frombuffer(bytes.fromhex("000000090000004a0000000031415927"), np.uint32)
    found = np.asarray(chacha.subkey(secret, jnp.asarray(nonce)))
    assert found.tobytes().hex() == (
        "82413b4227b27bfed30e42508a877d73a0f9e4d58a74a853c12ec41326d3ecdc"
    )


# ---- the law, by its own arithmetic ------------------------------------------------------------


def columns():
    """Thresholds and aliases as integers."""
    rows = [[int(x) for x in row] for row in exact.alias_table()]
    thresholds = [sum(w << b for w, b in zip(c, (128, 96, 64, 32, 0))) for c in zip(*rows[:5])]
    return thresholds, rows[5]


def test_the_alias_table_draws_exactly_its_weights():
    thresholds, alias = columns()
    full, mass = 1 << exact.THRESHOLD_BITS, [0] * exact.COLUMNS
    for column, (threshold, other) in enumerate(zip(thresholds, alias)):
        assert 0 <= threshold <= full
        mass[column] += threshold
        mass[other] += full - threshold
    assert mass == exact.table_counts()
    assert sum(mass) == 2**159
    assert min(mass) > 10**8  # the last column too is known to nine digits


def test_the_tables_distance_is_what_is_accounted():
    with decimal.localcontext(PRECISE):
        true = exact.table_weights()
        inside = sum(true)
        beyond = 1 - inside
        chi = sum(
            (Decimal(n) / 2**159 - w / inside) ** 2 / (w / inside)
            for n, w in zip(exact.table_counts(), true)
        )
    assert drawn.BEYOND_TABLE / 2 < beyond <= drawn.BEYOND_TABLE
    assert drawn.TABLE / 2 < chi <= drawn.TABLE


def spline_probability(z, weights):
    """P(Z = z) with exact weights: eleven uniform words beside each column."""
    total = Decimal(0)
    for i in range(z // KNOTS - 8, z // KNOTS + 8):
        rest = z - (2 * i + 1) * (KNOTS // 2) + 11 * (KNOTS // 2) - 5
        ways = sum(
            (-1) ** k * math.comb(11, k) * math.comb(rest - k * KNOTS + 10, 10)
            for k in range(12)
            if rest >= k * KNOTS
        )
        if 0 <= rest <= 11 * (KNOTS - 1):
            total += weights[i if i >= 0 else -1 - i] / 2 * ways
    return total / Decimal(KNOTS) ** 11


def gaussian_probability(z):
    """P(floor(N(0, s^2)) = z), by Taylor's series in 1/s, whose next term is below 1e-60."""
    s = Decimal(exact.STDDEV)
    x = (Decimal(z) + Decimal("0.5")) / s
    series = 1 + (x**2 - 1) / (24 * s**2) + (x**4 - 6 * x**2 + 3) / (1920 * s**4)
    return (-(x**2) / 2).exp() / (s * (2 * PI).sqrt()) * series


def test_the_spline_is_gaussian_into_the_tails():
    """Relative errors of probabilities, from the middle to where 1e-36 of the mass lies beyond."""
    rng, step, chi = np.random.default_rng(0), 0.25, 0.0
    with decimal.localcontext(PRECISE):
        weights = exact.table_weights(exact.COLUMNS + 20)
        for x in np.arange(0.0, 12.75, step):
            errors = []
            for phase in range(4):
                place = int(KNOTS * (phase + rng.random()) / 4)
                z = int(x * exact.STDDEV / KNOTS) * KNOTS + place
                errors.append(float(spline_probability(z, weights) / gaussian_probability(z) - 1))
            assert max(map(abs, errors)) < 1e-26 * (1 + x) ** 6
            chi += 2 * step * stats.norm.pdf(x) * np.mean(np.square(errors))
        for z in (0, 1, 10**9, 10**12):  # Z + 1/2 is symmetric
            one, other = spline_probability(z, weights), spline_probability(-1 - z, weights)
            assert abs(one / other - 1) < Decimal("1e-70")
    # As the proof says: 2 * 11! / (2 pi 157.5)^22 = 1.0e-58.
    predicted = 2 * math.factorial(11) / (2 * math.pi * 157.5) ** 22
    assert chi == pytest.approx(predicted, rel=0.5)
    assert chi < drawn.SPLINE


def test_drawing_is_the_tables_arithmetic():
    """Every word's part, against Python's integers; thresholds met exactly, and one below."""
    thresholds, alias = columns()
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**32, (16, 6144), dtype=np.uint32)
    for at, column in enumerate(rng.integers(0, 2048, 4096)):  # u = threshold, or one less
        u = max(thresholds[column] - at % 2, 0) % (1 << 148)
        words[0, at] = (at % 4 // 2) << 31 | int(column) << 20 | u >> 128
        words[1:5, at] = [u >> by & 0xFFFFFFFF for by in (96, 64, 32, 0)]
    high, low = jax.jit(exact.draw)(list(words))
    found = [(int(h) << 32) + int(w) for h, w in zip(np.asarray(high).view(np.int32), low)]
    for i, w in enumerate(words.T.tolist()):
        column, u = w[0] >> 20 & 2047, (w[0] & 0xFFFFF) << 128
        u += sum(x << by for x, by in zip(w[1:5], (96, 64, 32, 0)))
        size = column if u < thresholds[column] else alias[column]
        v = (size if w[0] < 2**31 else -1 - size) * KNOTS + KNOTS // 2
        assert found[i] == v + sum(w[5:]) - 11 * 2**31 + 5


def test_numbers_drawn_are_gaussian():
    """Chi-square over 60 cells, Kolmogorov-Smirnov, a tail, and uniform low bits."""
    size = 2_000_000
    place = [jnp.arange(size, dtype=jnp.uint32)] + [jnp.zeros(size, jnp.uint32)] * 3
    high, low = jax.jit(lambda k: exact.draw(chacha.block(k, place)))(key())
    x = (np.asarray(high).view(np.int32) + np.asarray(low) / 2.0**32) / 157.5
    edges = stats.norm.ppf(np.linspace(0, 1, 61))
    assert stats.chisquare(np.histogram(x, edges)[0]).pvalue > 1e-6
    assert stats.kstest(x, "norm").pvalue > 1e-6
    beyond, expected = int((np.abs(x) > 4.5).sum()), size * 2 * stats.norm.sf(4.5)
    assert stats.poisson.sf(beyond, expected) > 1e-6
    assert stats.poisson.cdf(beyond, expected) > 1e-6
    for bits in (np.asarray(low) & 255, np.asarray(low) >> 24):
        assert stats.chisquare(np.bincount(bits, minlength=256)).pvalue > 1e-6


# ---- the sum -----------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False, allow_subnormal=False)
SCALES = st.floats(min_value=2.0**-60, max_value=2.0**80, width=32)
as_integers = jax.jit(exact.integers)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(x=st.lists(FLOATS, min_size=8, max_size=8), scale=SCALES)
def test_sums_become_integers_exactly(x, scale):
    values, scale = (
        np.asarray([*x[:7], np.clip(x[7] / scale, -3e38, 3e38)], np.float32),
        np.float32(scale),
    )
    high, low = map(np.asarray, as_integers(values, scale))
    most = Fraction(float(np.float32(2.0**61) / scale))
    for value, h, w in zip(values.tolist(), high.view(np.int32).tolist(), low.tolist()):
        clamped = (
            max(-most, min(most, Fraction(value)))
            if math.isfinite(value)
            else math.copysign(1, value) * most
        )
        assert (h << 32) + w == math.trunc(clamped * Fraction(float(scale)))


def test_what_is_no_number_is_nothing():
    high, low = as_integers(np.asarray([np.nan, -0.0, 1e-45], np.float32), np.float32(1.0))
    assert not np.any(high)
    assert not np.any(low)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    sigma=st.floats(0.01, 100.0),
    clip_norm=st.floats(1e-6, 1e6),
    coordinates=st.sampled_from([1, 10**4, 10**7, 10**10, 2**36]),
)
def test_the_noise_hides_clip_norm_and_grid(sigma, clip_norm, coordinates):
    """In steps of the grid, noise >= sigma (C + sqrt(d)), with the very float32 scale that runs."""
    stddev, norm = np.float32(sigma * clip_norm), np.float32(clip_norm)
    scale = Fraction(float(jax.jit(exact.grid, static_argnums=2)(stddev, norm, coordinates)))
    needed = Fraction(sigma) * (Fraction(clip_norm) * scale + math.isqrt(coordinates) + 1)
    assert needed <= Fraction(exact.STDDEV)
    assert needed > Fraction(exact.STDDEV) * Fraction(999, 1000)  # grid sqrt(d) < 0.1 % of C


def test_more_coordinates_than_are_accounted_are_refused():
    tree = {"a": jax.ShapeDtypeStruct((2**19, 2**18), jnp.float32)}
    with pytest.raises(BadInputError, match=r"mechanism\.arithmetic=float"):
        jax.eval_shape(lambda x: Noise(1.0, 1.0).add(key(), x), tree)


def test_a_sum_of_two_parts_is_clamped_without_a_jump():
    """Just below the clamp: two sums a hair apart, of which one's larger part is the clamp."""
    scale = exact.grid(1.0, 1.0, 1024)
    most = np.float32(exact._CLAMP / np.float32(scale))
    below = np.nextafter(most, np.float32(0))
    half = 0.999 * float(most - below) / 2

    def steps(x, rest):
        rest = exact._within(jnp.float32(x), jnp.float32(rest), jnp.float32(most))
        parts = [exact.integers(jnp.float32(part), scale) for part in (x, rest)]
        signed = [(int(high) << 32 | int(low)) for high, low in parts]
        return sum(n - (1 << 64) if n >> 63 else n for n in signed)

    for sign in (1, -1):
        apart = steps(sign * most, -sign * half) - steps(sign * below, sign * half)
        assert abs(apart) <= 0.01 * half * float(scale)
        assert steps(sign * most, sign * half) == steps(sign * most, 0.0)  # no further
        assert steps(4 * sign * most, -sign * half) == steps(sign * most, 0.0)

    # As it is noised: the rest of each changes nothing.
    x = np.float32([most, 4 * most, -most, -4 * most])
    rest, places = np.float32([half, -half, -half, half]), [jnp.zeros(4, jnp.uint32)] * 4
    noised = jax.jit(exact.noised_integers)
    found, wanted = (noised(key(), x, places, scale, more) for more in (rest, 0 * rest))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_what_is_left_of_a_sum_is_added_in_integers():
    """Halves of numbers give, bit for bit, what the numbers give; small ones count to the grid."""
    rng = np.random.default_rng(2)
    whole = np.float32(rng.integers(-(2**18), 2**18, size=300))
    nothing = {"w": jnp.zeros(300)}
    for law in ("exact", "float"):
        noise = Noise(2.0**-3, 2.0**-6, law, rows=4)
        wanted = noise.add(KEY.words("noise", 1), {"w": jnp.asarray(whole)}, nothing)["w"]
        for part in (0.25, 0.0):
            first, rest = ({"w": jnp.asarray(x * whole)} for x in (1 - part, part))
            found = noise.add(KEY.words("noise", 1), first, rest)["w"]
            np.testing.assert_array_equal(found, wanted)
    # Without a rest it is the same, but for the grid: that is no finer or coarser for it.
    plain = Noise(2.0**-3, 2.0**-6, rows=4).add(KEY.words("noise", 1), {"w": jnp.asarray(whole)})
    exactly = Noise(2.0**-3, 2.0**-6, rows=4).add(
        KEY.words("noise", 1), {"w": jnp.asarray(whole)}, nothing
    )
    np.testing.assert_array_equal(plain["w"], exactly["w"])
    # 2^20 and 2^-30 in one number: float32 has no room for the second, the sum of integers has.
    high, low = exact.integers(jnp.float32(2.0**20), jnp.float32(2.0**32))
    more_high, more_low = exact.integers(jnp.float32(2.0**-30), jnp.float32(2.0**32))
    assert (int(high) * 2**32 + int(low)) + (int(more_high) * 2**32 + int(more_low)) == 2**52 + 4


def test_noise_of_more_rows_is_at_most_so_large():
    """The grid hides sums that are cut off in every row: with a million rows, 1,000 times C."""
    with pytest.raises(BadInputError, match="supports at most 1000 times"):
        Noise(1001.0, 1.0, rows=10**6).add(KEY.words("noise", 0), {"w": jnp.zeros(3)})
    Noise(999.0, 1.0, rows=10**6).add(KEY.words("noise", 0), {"w": jnp.zeros(3)})


def test_the_grid_hides_what_every_row_is_cut_off_by():
    """Numbers of one key are as far apart as the grids: by what 4 million coordinates take."""
    tree = {"w": jnp.zeros(3), "b": jnp.zeros(1)}
    one, many = (Noise(1000.0, 1.0, rows=rows).add(key(), tree) for rows in (1, 10**6))
    cut_off = 1000.0 * math.sqrt(4e6) / exact.STDDEV
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(np.float64(b) / np.float64(a) - 1, cut_off, rtol=0.1)


def test_arrays_of_other_shapes_have_other_noise(monkeypatch):
    """Large ones are drawn shape by shape, small ones together."""
    monkeypatch.setattr(exact, "_SMALL", 64)
    tree = [jnp.zeros(shape) for shape in ((64,), (8, 8), (5,), (8, 8), (7,))]
    noised = jax.jit(lambda tree: Noise(1.0, 1.0).add(key(), tree))(tree)
    every = np.concatenate([np.ravel(x) for x in noised])
    assert len(np.unique(every)) == len(every)


# ---- layouts -----------------------------------------------------------------------------------


def test_words_are_turned_by_constants():
    """Else a CPU's compiler sees no rotations, and a number takes a third more time."""
    if jax.default_backend() != "cpu":
        pytest.skip("how another device turns words is its compiler's business")
    add = jax.jit(lambda key, x: Noise(2.0, 1.0).add(key, x))
    text = add.lower(key(), [jnp.zeros((60, 90)), jnp.zeros(7)]).compile().as_text()
    for body in text.split("\n\n"):
        made = dict(re.findall(r"(%[\w.-]+) = \S+ (\w[\w-]*\([^)]*\))", body))
        for by in re.findall(r"shift-(?:left|right-logical)\(%[\w.-]+, (%[\w.-]+)\)", body):
            inner = re.fullmatch(r"broadcast\((.*)\)", made[by])
            found = made[inner.group(1)] if inner else made[by]
            assert not found.startswith("parameter"), body[:200]


@pytest.mark.slow
def test_every_layout_gives_the_same_bits():
    tree = {
        "large": jnp.linspace(-3, 3, 512 * 320, dtype=jnp.float32).reshape(512, 320),
        "like it": jnp.zeros((512, 320)),
        "small": jnp.ones((64, 5)),
        "scalar": jnp.float32(2.0),
    }

    def draw(places):
        add = jax.jit(lambda k, x: Noise(2.0, 1.0).add(k, x), out_shardings=places)
        return jax.tree.map(np.asarray, add(key(5), jax.device_put(tree, places)))

    alone = draw(jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree))
    for devices, axes in ((2, ("data",)), (8, (None, "data")), (8, ())):
        mesh = data_parallel_mesh(jax.devices()[:devices])
        spec = {"large": axes, "like it": axes, "small": axes[:1], "scalar": ()}
        places = {n: NamedSharding(mesh, PartitionSpec(*a)) for n, a in spec.items()}
        jax.tree.map(np.testing.assert_array_equal, draw(places), alone)
    # Places are told apart, and arrays of one shape.
    assert len(np.unique(alone["like it"])) > 0.99 * 512 * 320
    drawn_for_large = alone["large"] - np.asarray(tree["large"])
    correlation = np.corrcoef(drawn_for_large.ravel(), alone["like it"].ravel())[0, 1]
    assert abs(correlation) < stats.norm.isf(5e-7) / np.sqrt(512 * 320)


# ---- what it is for ----------------------------------------------------------------------------


def attack(law, total, trials, coordinates, first):
    """How often a small coordinate has bits that float32 noise cannot leave on a sum of ``total``.

    Mironov 2012: where total + noise nearly cancels, the sum lies on the coarse grid of ``total``.
    """
    add = jax.jit(lambda k, x: Noise(4.0, 1.0, law).add(k, x))
    clean, found = jnp.full(coordinates, total, jnp.float32), 0
    grid = float(np.spacing(np.float32(0.01)))
    for trial in range(trials):
        released = np.asarray(add(key(first + trial), clean)).astype(np.float64)
        small = released[np.abs(released) < 0.002]
        found += bool(np.any(np.mod(small, grid) != 0))
    return found


@pytest.mark.slow
def test_float_noise_tells_the_sum_and_exact_noise_does_not():
    """Two sums 1 apart, sigma 4: what an attack on the low bits of ONE step proves, at 99 %."""
    trials, coordinates, delta = 400, 10_000, 1e-6
    claimed = epsilon(events.gaussian(4.0, 1), delta)
    proved = {}
    for law in ("float", "exact"):
        # All coordinates zero, or each 0.01: together of norm 1, which is the clip norm.
        hits = attack(law, 0.0, trials, coordinates, 0)
        alarms = attack(law, 0.01, trials, coordinates, trials)
        low = stats.beta.ppf(0.005, hits, trials - hits + 1)
        high = stats.beta.ppf(0.995, alarms + 1, trials - alarms) if alarms < trials else 1.0
        proved[law] = math.log((low - delta) / high)
    assert proved["float"] > 2 * claimed
    assert proved["exact"] < claimed


# ---- what is stated ----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(coordinates=st.floats(1, 1e18))
def test_the_stated_distance_is_the_closed_form(coordinates):
    with decimal.localcontext(PRECISE):
        n = Decimal(coordinates)
        roots = (Decimal(drawn.TABLE) / 2).sqrt() + (Decimal(drawn.SPLINE) / 2).sqrt()
        bound = n * Decimal(drawn.BEYOND_TABLE) + n.sqrt() * roots
    assert drawn.distance(coordinates) == pytest.approx(float(bound), rel=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sigma=st.floats(0.3, 20), delta=st.floats(1e-12, 1e-2), steps=st.integers(1, 10**6))
def test_stated_epsilon_covers_what_is_drawn(sigma, delta, steps):
    """delta of the Gaussian at the stated epsilon, in 60 digits, plus the sampler's distance."""
    stated = epsilon(events.gaussian(sigma * math.sqrt(steps), steps), delta)
    told = drawn.noise_assumptions("exact", stated, delta, steps)[0]
    if drawn.UNPAID in told:
        assert stated > 5
        return
    apart = drawn.distance(float(drawn.MOST_COORDINATES) * steps)
    mu = 1 / sigma
    log_q = stats.norm.logsf(stated / mu + mu / 2) + stated
    own = math.exp(stats.norm.logcdf(mu / 2 - stated / mu)) - math.exp(log_q)
    assert own + (1 + math.exp(stated)) * apart <= delta * (1 + 1e-9)


def test_guarantees_say_which_noise_it_is():
    exact_told = drawn.noise_assumptions("exact", 8.0, 1e-6, 1000)
    assert "2^-20 of delta" in exact_told[0]
    assert drawn.IDEALISED in exact_told
    assert drawn.noise_assumptions("float", 8.0, 1e-6, 1000) == (drawn.IDEALISED_FLOAT,)
    for unpaid in (60.0, math.inf):
        assert drawn.UNPAID in drawn.noise_assumptions("exact", unpaid, 1e-6, None)[0]


def test_what_exact_noise_cannot_hide_or_count_is_refused():
    key = jnp.arange(8, dtype=jnp.uint32)
    with pytest.raises(BadInputError, match="at most 1e\\+06 times"):
        Noise(3e6, 1.0).add(key, {"w": jnp.zeros(3)})
    with pytest.raises(BadInputError, match=r"set mechanism\.arithmetic=float"):
        Noise(1e-6, 1.0).add(key, {"w": jnp.zeros(3)})
    long = jax.ShapeDtypeStruct(((1 << 32) + 1,), jnp.float32)
    with pytest.raises(BadInputError, match="axis of 4,294,967,297"):
        jax.eval_shape(lambda x: exact.add_exact(key, x, 1.0, 1.0), long)
