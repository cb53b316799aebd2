"""Planted faults in reproductions that train: noise, rates, groups and budgets are the real ones.

Training itself is stood in for: the worse, the more noise it meets. So a verdict follows what was
calibrated, sampled and compared, and takes a second instead of minutes.
"""

import dataclasses
import functools
import itertools
import types
import zlib

import numpy as np
import pytest
from rich.console import Console

from dpfl_jax.planning import Planner, Sensitivities, UserStatistics
from reproductions.correlated import _training as correlated
from reproductions.correlated import language_model
from reproductions.isrl import insurance, mnist, obesity
from reproductions.registry import Settings
from reproductions.rpdp import _training, centralised, heart, published
from reproductions.rpdp import budgets as personal_budgets
from reproductions.rpdp import mnist as personal_mnist
from reproductions.subject import _closed_forms, curves, few_subjects, shakespeare, skew
from reproductions.subject import _training as subject_training
from reproductions.userlevel import _mean_estimation as mean_estimation
from reproductions.userlevel import _small_lm as small
from reproductions.userlevel import (
    budgets,
    figure_3,
    figure_4,
    figure_5,
    figure_6,
    figure_8,
    figure_18,
)


def verdicts(module, tmp_path, data_dir=None, seeds=None):
    settings = Settings(True, tmp_path, Console(quiet=True), data_dir, seeds)
    return {claim.claim: claim.holds for claim in module.run(settings).claims}


def jitter(*about, size=1.0):
    """What a seed does to a result: small, and the same whenever it is asked for."""
    return size * 1e-4 * np.random.default_rng(zlib.crc32(repr(about).encode())).normal()


# ---- nobody trusted -----------------------------------------------------------------------------


@pytest.fixture
def silos_by_noise(monkeypatch):
    """Errors of MB-SGD and local SGD by the noise of their messages, in units of the gradient."""

    def best(task, algorithm, spec, steps, *, clips, multiplier, repeats, seed, window=8):
        factor = {"local": 3.0, "minibatch": 1.0, "server_noise": 0.1}[algorithm]
        moved = 0.5 if getattr(spec, "clip", None) == "batch_mean" else 1.0
        batch = 1 if algorithm == "local" else task.batch / 30
        noise = factor * moved * multiplier / batch / task.cohort
        return float(0.1 + 0.5 * noise / (1 + noise) + jitter(seed, algorithm, noise))

    def local_noise(budget, *sizes, **how):
        return 8 / budget.epsilon, 0

    for module in (mnist, insurance, obesity):
        monkeypatch.setattr(module, "best_over_steps", best)
        monkeypatch.setattr(
            module, "local_sgd_noise", lambda budget, *a, **k: (8 / budget.epsilon, 0)
        )


@pytest.mark.nightly
def test_noise_that_ignores_epsilon(silos_by_noise, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    name = "MB-SGD as published: the error at epsilon 12 is below that at 3"
    assert verdicts(mnist, tmp_path)[name]
    made = mnist.silo_noise
    strictest = lambda budget, *a, **k: made(dataclasses.replace(budget, epsilon=0.75), *a, **k)  # noqa: E731
    monkeypatch.setattr(mnist, "silo_noise", strictest)
    assert not verdicts(mnist, tmp_path)[name]


def test_a_mean_that_is_not_clipped_whole(silos_by_noise, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    name = "N=10, epsilon 0.25: the script's MB-SGD, which clips the mean and has the largest K, "
    name += "is ahead of the paper's"
    assert verdicts(insurance, tmp_path)[name]
    made = insurance.Published
    monkeypatch.setattr(insurance, "Published", lambda clip=None: made())
    assert not verdicts(insurance, tmp_path)[name]


def test_noise_from_each_silo_where_the_server_added_it_once(silos_by_noise, monkeypatch, tmp_path):
    pytest.importorskip("sklearn")

    def advantage(module):
        settings = Settings(True, tmp_path, Console(quiet=True))
        rows = {(r["arm"], r["epsilon"]): np.mean(r["by_trial"]) for r in module.run(settings).rows}
        claims = obesity._claims(module.run(settings).rows, (1.0,))
        return rows["local", 1.0] - rows["as_coded", 1.0], claims[0].holds

    gain, holds = advantage(obesity)
    assert 0.1 < gain < 0.3
    assert holds
    made = obesity.work
    each = {"server_noise": "minibatch"}
    monkeypatch.setattr(
        obesity, "work", lambda e: [(w[0], each.get(w[1], w[1]), *w[2:]) for w in made(e)]
    )
    assert not advantage(obesity)[1]


# ---- personal budgets ---------------------------------------------------------------------------


@pytest.fixture
def accuracy_by_batch(monkeypatch):
    """Accuracy by the noise on the mean of the records that a silo expects in a step."""

    def run(self, made, params, seed):
        plan = made.federation.silos[0]
        expected = getattr(plan.mechanism.participation, "expected_batch", 30.0)
        noise = plan.sigma / expected
        found = 0.9 - 0.5 * noise / (1 + noise) + jitter(seed) + jitter(seed, noise, size=0.1)
        return np.full(self.rounds, found)

    monkeypatch.setattr(_training.Bench, "run", run)


def uniform(made):
    """Assigns the rates of the strictest record to all: what Minimum does."""

    def assign(policy, budgets, public, setting):
        if policy == "curve_fit":
            policy = "minimum"
        return made(policy, budgets, public, setting)

    return assign


def flips_with_uniform_rates(module, name, tmp_path, monkeypatch, data_dir=None):
    law = {"ThreeLevels": module.LAWS["ThreeLevels"]}
    monkeypatch.setattr(module, "LAWS", law)
    assert verdicts(module, tmp_path / "sound", data_dir, seeds=5)[name]
    monkeypatch.setattr(_training, "assign", uniform(_training.assign))
    made = _training.public_batch
    worst = lambda policy, *a: made("minimum" if policy == "curve_fit" else policy, *a)  # noqa: E731
    monkeypatch.setattr(_training, "public_batch", worst)
    return not verdicts(module, tmp_path / "faulty", data_dir, seeds=5)[name]


@pytest.fixture
def folders(tmp_path):
    for name in ("sound", "faulty", "data/heart_disease", "data/mnist"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "data"


@pytest.mark.slow
def test_the_fitted_curve_of_patients_replaced_by_uniform_rates(
    accuracy_by_batch, folders, tmp_path, monkeypatch
):
    pytest.importorskip("sklearn")
    name = "ThreeLevels: curve_fit is ahead of minimum"
    assert flips_with_uniform_rates(personal_budgets, name, tmp_path, monkeypatch)


@pytest.mark.nightly
def test_the_fitted_curve_of_hospitals_replaced_by_uniform_rates(
    accuracy_by_batch, folders, tmp_path, monkeypatch
):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(heart, "hospitals", lambda *a: personal_budgets.patients())
    monkeypatch.setattr(heart, "LogisticRegression", lambda _: heart_model())
    name = "tau 50, ThreeLevels: curve fit (paper) is ahead of minimum (a)"
    assert flips_with_uniform_rates(heart, name, tmp_path, monkeypatch, folders)


def heart_model():
    from dpfl_jax.models import LogisticRegression

    return LogisticRegression(30)


@pytest.mark.nightly
def test_the_fitted_curve_of_images_replaced_by_uniform_rates(
    accuracy_by_batch, folders, tmp_path, monkeypatch
):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(personal_mnist, "silos", lambda *a: personal_budgets.patients())
    monkeypatch.setattr(personal_mnist, "SmallCNN", heart_model)
    name = "IID, ThreeLevels: curve fit (paper) is ahead of minimum"
    assert flips_with_uniform_rates(personal_mnist, name, tmp_path, monkeypatch, folders)


def test_published_batches_are_not_those_of_uniform_rates(monkeypatch):
    def claims():
        return published._batches(published.PUBLISHED["hospitals"], "hospitals")

    assert all(claim.holds for claim in claims())
    made = published.rates
    monkeypatch.setattr(published, "rates", lambda method, *a: made("minimum", *a))
    assert [claim.holds for claim in claims()] == [False, False, True]


@pytest.mark.nightly
def test_a_filter_that_forgets_to_charge(accuracy_by_batch, tmp_path, monkeypatch):
    """Its records never leave, whatever they spend."""
    pytest.importorskip("sklearn")
    import jax.numpy as jnp

    name = "patients: the filter stops the first of a level when steps of the clip norm use its "
    name += "budget"

    def descent(model_loss, params, records, left, **settings):
        return params, jnp.minimum(left, settings["steps"]) * charged

    monkeypatch.setattr(centralised, "filtered_descent", descent)
    charged = 1.0
    assert verdicts(centralised, tmp_path, seeds=2)[name]
    charged = 0.0
    assert not verdicts(centralised, tmp_path, seeds=2)[name]


# ---- subjects over silos ------------------------------------------------------------------------


@pytest.fixture
def accuracy_by_groups(monkeypatch):
    """Accuracy by the noise on a subject's part of a mean, and by how few subjects there are."""

    weighs = {"local_group": 2.0, "hi_grad_avg": 0.5}

    def rounds(run, *, key, **rest):
        data, federation = run.data, run.federation
        mechanism, silo = federation.silos[0].mechanism, data.silos[0]
        sizes = np.diff(silo.subject_offsets)
        crowd = sizes.max() / sizes.sum()  # how much one subject weighs
        share = weighs.get(mechanism.kind, 0.0)
        noise = federation.silos[0].sigma / (
            1 if mechanism.kind == "user_ldp" else mechanism.participation.batch_size
        )
        noise = 0.0 if mechanism.kind == "fed_avg" else noise
        seed = key.fingerprint
        found = 0.95 - 0.9 * noise / (0.1 + noise) - share * crowd
        found += jitter(seed, mechanism.kind, noise, crowd, size=20)
        found = max(found, 0.1 + jitter(seed))
        metrics = [
            {"step": step, "eval": {"loss": 3 - found, "accuracy": found}}
            for step in range(1, federation.rounds + 1)
        ]
        return types.SimpleNamespace(metrics=metrics)

    monkeypatch.setattr(
        subject_training, "Rounds", lambda builder, **given: types.SimpleNamespace(**given)
    )
    monkeypatch.setattr(subject_training, "drive", rounds)
    return weighs


@pytest.mark.parametrize("quick", [True, False])
def test_arms_are_compared_after_the_same_round(quick, tmp_path, monkeypatch):
    """Where accuracy is the number of rounds, nine tenths of one arm's is below the other's."""

    def train(settings, raw, run, seeds, evals):
        rounds = raw["federation"]["rounds"]
        if run.recipe != "sound":
            rounds = _closed_forms.rounds_printed(rounds, raw["federation"]["silos"])
        every = max(1, rounds // evals)
        curve = [(t, 3.0, t / 1000) for t in range(every, rounds + 1, every)]
        claim = types.SimpleNamespace(rounds=rounds)
        return subject_training.Trained(run, [rounds / 1000] * seeds, [curve] * seeds, claim, 1.0)

    monkeypatch.setattr(curves, "train", train)
    monkeypatch.setattr(curves, "draw", lambda *a: None)
    monkeypatch.setattr(subject_training.Trained, "row", lambda self: {})
    outcome = curves.run(Settings(quick, tmp_path, Console(quiet=True)))
    (found,) = (c for c in outcome.claims if "over the same rounds" in c.claim)
    assert found.measured == ("-0.0018, 3 seeds" if quick else "-0.005, 3 seeds")
    assert found.holds


@pytest.mark.nightly
def test_groups_of_a_subject_that_are_clipped_as_single_records(accuracy_by_groups, tmp_path):
    """Then no subject weighs more than another, and skew costs LocalGroupDP nothing."""
    pytest.importorskip("sklearn")
    name = "text B: LocalGroupDP loses more than LocalItemDP and HiGradAvgDP"
    assert verdicts(skew, tmp_path)[name]
    accuracy_by_groups["local_group"] = 0.0
    assert not verdicts(skew, tmp_path)[name]


@pytest.mark.nightly
def test_few_subjects_that_are_many(accuracy_by_groups, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    name = "text B: LocalGroupDP drops more than LocalItemDP"
    assert verdicts(few_subjects, tmp_path)[name]
    made = few_subjects.train

    def all_of_them(settings, raw, run, seeds):
        data = {k: v for k, v in raw["data"].items() if k != "max_users"}
        return made(settings, raw | {"data": data}, run, seeds)

    monkeypatch.setattr(few_subjects, "train", all_of_them)
    assert not verdicts(few_subjects, tmp_path)[name]


def fractions_of_text_b(monkeypatch):
    """Both texts take q for the fraction of subjects in a batch, as B does."""
    made = _closed_forms.hi_grad_fraction
    monkeypatch.setattr(
        _closed_forms, "hi_grad_fraction", lambda q, cap, variant="exact": made(q, cap, "B")
    )


@pytest.mark.nightly
def test_the_sampling_fraction_of_records_for_subjects(accuracy_by_groups, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    name = "the texts differ most by the sampling fraction: same code, other noise"
    assert verdicts(curves, tmp_path)[name]
    fractions_of_text_b(monkeypatch)
    assert not verdicts(curves, tmp_path)[name]


def test_the_sampling_fraction_of_records_for_roles(tmp_path, monkeypatch):
    (tmp_path / "shakespeare_plays").mkdir()

    def train(settings, raw, run, seeds):
        cap = raw["mechanism"]["max_records_per_subject"]
        variant = {"paper_a": "A", "paper_b": "B"}.get(run.recipe, "exact")
        sigma = 0.7  # noise at these fractions grows with them
        if run.kind == "hi_grad_avg":
            sigma *= _closed_forms.hi_grad_fraction(0.001, cap, variant) / 0.001
        found = [0.5 - 0.001 * sigma + jitter(s, run.label) for s in range(seeds)]
        curve = [[(1, 3.0, accuracy)] for accuracy in found]
        claim = subject_training.Claim(4.0, 1e-5, "subject", 4.0, None, None, 36, ())
        return subject_training.Trained(run, found, curve, claim, sigma)

    monkeypatch.setattr(shakespeare, "train", train)
    monkeypatch.setattr(shakespeare, "draw", lambda *a: None)
    monkeypatch.setattr(subject_training.Trained, "row", lambda self: {})
    name = "text A: HiGradAvgDP is below LocalGroupDP"
    assert verdicts(shakespeare, tmp_path, tmp_path)[name]
    fractions_of_text_b(monkeypatch)
    assert not verdicts(shakespeare, tmp_path, tmp_path)[name]


# ---- users --------------------------------------------------------------------------------------


@pytest.fixture
def loss_by_noise(monkeypatch):
    """Held-out losses by the noise that the planner says a cell meets."""
    users = UserStatistics(2000, sizes=np.random.default_rng(0).geometric(0.1, 2000))
    norms = Sensitivities.assumed(0.5, [2**k for k in range(11)])
    made = functools.cache(
        lambda epsilon: Planner(users, norms, epsilon=epsilon, delta=1e-5, steps=25)
    )
    config = types.SimpleNamespace(train=types.SimpleNamespace(steps=25))
    store = types.SimpleNamespace(user_offsets=np.concatenate([[0], np.cumsum(users.sizes)]))
    data = types.SimpleNamespace(train=store)
    monkeypatch.setattr(small, "start", lambda quick: (data, None, None, config))
    monkeypatch.setattr(small, "planner", lambda quick, epsilon: made(epsilon))
    monkeypatch.setattr(small, "sensitivities", lambda quick: norms)
    monkeypatch.setattr(small, "median", lambda quick: 8)
    monkeypatch.setattr(small, "initial_loss", lambda quick: 5.0)
    monkeypatch.setattr(small, "fingerprint", lambda quick: {})


def trained(told=lambda option: option.noise):
    """What stands in for ``small._train``: of each option, at its rate, and seed."""

    def loss(option, rate, seed):
        own = jitter(seed, option.group_size, option.size, option.kind)
        return 3 + 40 * told(option) + jitter(seed) + own + 0.01 * abs(np.log2(rate))

    return lambda settings, options, rates, seeds: [
        np.array([loss(o, r, k) for k in seeds]) for o, r in zip(options, rates, strict=True)
    ]


def test_noise_that_grows_with_the_group_favours_small_groups(loss_by_noise, tmp_path, monkeypatch):
    """ELS by black-box group privacy: G times the noise."""
    monkeypatch.setattr(small, "median", lambda quick: 16)
    name = "B = 256, epsilon 4: the median group size (16) is near-best"
    monkeypatch.setattr(small, "_train", trained())
    assert verdicts(figure_4, tmp_path)[name]
    monkeypatch.setattr(small, "_train", trained(lambda o: o.noise * o.group_size))
    assert not verdicts(figure_4, tmp_path)[name]


def test_estimate_and_double_as_it_is_printed(loss_by_noise, tmp_path, monkeypatch):
    """Without 1/M it doubles the group for ever."""
    name = "Estimate-and-Double is better on average than max group"
    monkeypatch.setattr(small, "_train", trained())
    assert verdicts(figure_5, tmp_path)[name]
    made = figure_5._doubling
    monkeypatch.setattr(figure_5, "_doubling", lambda *a, literal: made(*a, literal=True))
    assert not verdicts(figure_5, tmp_path)[name]


def test_uls_noise_for_g_times_the_sensitivity(loss_by_noise, tmp_path, monkeypatch):
    name = ULS_AHEAD
    monkeypatch.setattr(small, "_train", trained())
    assert verdicts(figure_6, tmp_path)[name]

    def more(option):
        return option.noise * (option.group_size if option.kind == "uls" else 1)

    monkeypatch.setattr(small, "_train", trained(more))
    assert not verdicts(figure_6, tmp_path)[name]


def test_els_at_a_better_group_size_than_the_median(loss_by_noise, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "median", lambda quick: 16)

    def told(option):
        return option.noise * (0.3 if option.kind == "els" and option.group_size == 8 else 1)

    monkeypatch.setattr(small, "_train", trained(told))
    found = verdicts(figure_6, tmp_path)
    assert found["ULS is at least as good as ELS with G = 16 (the median): B = 512, epsilon 4"]
    assert found["ULS is at least as good as ELS with G = 8: B = 512, epsilon 4"] is None


def test_users_that_the_accounting_forgets(loss_by_noise, tmp_path, monkeypatch):
    name = "ELS gains more from more users than ULS"
    monkeypatch.setattr(small, "_train", trained())
    assert verdicts(figure_8, tmp_path)[name]
    made = figure_8.UserStatistics

    def there(count, limited):
        return made(2000, limited={8: limited[8] * 2000 // count})

    monkeypatch.setattr(figure_8, "UserStatistics", there)
    assert not verdicts(figure_8, tmp_path)[name]


# ---- faults that favour a claim -----------------------------------------------------------------


def favoured(module, tmp_path, claim, said):
    """Whether a claim is left undecided because of how the arms were tuned."""
    outcome = module.run(Settings(True, tmp_path, Console(quiet=True)))
    (found,) = (c for c in outcome.claims if c.claim == claim)
    return found.holds is None and said in found.note and said in outcome.tried.unfair


ULS_AHEAD = "ULS is at least as good as ELS with G = 8 (the median): B = 512, epsilon 4"


def test_uls_that_is_tuned_and_els_that_is_not(loss_by_noise, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "_train", trained())
    assert not favoured(figure_6, tmp_path, ULS_AHEAD, "")
    made = small._tune

    def tune(settings, options):
        one = {"learning rate": [small.RATE]}
        return [
            dataclasses.replace(tuned, grid=one) if option.kind == "els" else tuned
            for option, tuned in zip(options, made(settings, options), strict=True)
        ]

    monkeypatch.setattr(small, "_tune", tune)
    assert favoured(figure_6, tmp_path, ULS_AHEAD, "nothing of ELS")


def test_rates_that_are_chosen_on_the_seeds_that_are_reported(loss_by_noise, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "_train", trained())
    monkeypatch.setattr(small, "TUNING_SEEDS", (0, 1))
    assert favoured(figure_6, tmp_path, ULS_AHEAD, "is tuned on seeds that are reported")


def test_a_rate_at_which_less_noise_loses(loss_by_noise, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "_train", trained(lambda option: -option.noise))
    assert favoured(figure_8, tmp_path, "ULS gains more from compute than ELS", "less noise loses")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "claim"),
    [
        (mnist, "as_published, epsilon 12: MB-SGD is ahead of local SGD"),
        (insurance, "N=10, epsilon 0.25: MB-SGD is ahead of local SGD, as published"),
    ],
)
def test_mb_sgd_that_is_tuned_and_local_sgd_that_is_not(
    silos_by_noise, tmp_path, monkeypatch, module, claim
):
    pytest.importorskip("sklearn")
    assert verdicts(module, tmp_path)[claim]
    made = module.step_sizes
    monkeypatch.setattr(
        module,
        "step_sizes",
        lambda *a: {k: v[: 1 if k == "local" else 99] for k, v in made(*a).items()},
    )
    assert favoured(module, tmp_path, claim, "of local")


def test_steps_as_coded_that_are_tuned_and_local_ones_that_are_not(
    silos_by_noise, tmp_path, monkeypatch
):
    pytest.importorskip("sklearn")
    settings = Settings(True, tmp_path, Console(quiet=True))
    assert not obesity.run(settings).tried.unfair
    monkeypatch.setitem(obesity.STEPS, "local", obesity.STEPS["local"][:1])
    assert "nothing of local" in obesity.run(settings).tried.unfair


def test_users_that_are_all_alike(tmp_path, monkeypatch):
    """Mean estimation in closed form: the error of a group's mean, and the noise on it."""
    name = "large spread within users (sigma_2 = 4): larger groups improve ULS"

    def evaluate(arm, setting, rates, clip_norms, tuning, trials):
        units = arm.units(setting.budget)
        if not units:
            return None
        group = arm.group_size if arm.kind == "uls" else 1
        spread = 1 + within(setting) ** 2 / group
        noise = 0.5 / (setting.epsilon * units)
        errors = np.full(trials, spread * (0.01 + noise**2))
        errors += [jitter(k, size=0.1) + jitter(k, arm.name, size=0.1) for k in range(trials)]
        return mean_estimation.Result(float(errors.mean()), 1e-6, errors, 0.1, 1.0, False)

    monkeypatch.setattr(figure_3, "evaluate", evaluate)
    within = lambda setting: setting.sigma_2  # noqa: E731
    sound = verdicts(figure_3, tmp_path)
    within = lambda setting: 0.0  # noqa: E731
    faulty = verdicts(figure_3, tmp_path)
    assert (sound[name], faulty[name]) == (True, False)


def test_a_personal_copy_that_is_not_tuned(loss_by_noise, tmp_path, monkeypatch):
    name = "personalisation lowers the loss of ULS"
    data, *_, config = small.start(True)
    data.validation = data.train
    data.train.read = None
    monkeypatch.setattr(
        small, "start", lambda quick: (data, types.SimpleNamespace(loss=None), 0, config)
    )
    mechanism = types.SimpleNamespace(plan=lambda *a, **k: None)
    monkeypatch.setattr(figure_18, "els", lambda **k: mechanism)
    monkeypatch.setattr(figure_18, "uls", lambda **k: mechanism)
    drawn = itertools.count()
    monkeypatch.setattr(figure_18, "fit", lambda *a, **k: types.SimpleNamespace(params=next(drawn)))

    @dataclasses.dataclass
    class Losses:
        before: float
        after: float

    def personalize(loss, params, held_out):
        return Losses(4 + jitter(params), 4 - gain + jitter(params, 1))

    monkeypatch.setattr(figure_18, "personalize", personalize)
    gain = 0.5
    assert verdicts(figure_18, tmp_path, seeds=3)[name]
    gain = 0.0
    assert not verdicts(figure_18, tmp_path, seeds=3)[name]


def test_a_group_size_for_all_budgets(tmp_path, monkeypatch):
    """The noise of few users that the accounting makes too little: as if all took part."""
    users = UserStatistics(1200, sizes=np.full(1200, 16))
    norms = Sensitivities.assumed(0.5, [1, 4, 8, 16])

    def losses(settings, name, content, seeds):
        planner = Planner(users, norms, epsilon=2.0, delta=1e-4, steps=8)
        found = {}
        for budget in budgets.BUDGETS:
            for option in [*budgets._cells(planner, budget), planner.option("els", 8, budget)]:
                noise = told(option)
                found[option.kind, option.group_size, budget] = np.array(
                    [4 + 20 * noise + jitter(s) + jitter(s, noise) for s in range(3)]
                )
        return planner, found

    monkeypatch.setattr(budgets, "_losses", losses)
    name = "Shakespeare: examples of a user are worth more, against users, as compute grows"
    told = lambda option: option.noise  # noqa: E731
    assert verdicts(budgets, tmp_path)[name]
    told = lambda option: 0.01 * option.gradients  # noqa: E731
    assert not verdicts(budgets, tmp_path)[name]


@pytest.mark.nightly
def test_correlated_noise_that_does_not_cancel(tmp_path, monkeypatch):
    name = "epsilon 8, sgd: BandMF is not behind ULS by more than 5% of ULS's gain"
    data = types.SimpleNamespace(train=types.SimpleNamespace(num_users=1168), validation=None)
    option = {}
    model = types.SimpleNamespace(loss=0)
    monkeypatch.setattr(correlated, "read_data", lambda *a: (data, model))
    monkeypatch.setattr(correlated, "starting_params", lambda *a: (5.5, None))
    monkeypatch.setattr(
        correlated,
        "Evaluator",
        lambda *a: lambda params, held_out: types.SimpleNamespace(loss=params),
    )
    monkeypatch.setattr(
        correlated,
        "_mechanism",
        lambda o: types.SimpleNamespace(plan=lambda *a, **k: option.update(now=o)),
    )

    def fit(loss, params, plan, optimizer, *, loop, key):
        noise = told(option["now"])
        loss = 4 + 30 * noise + jitter(key.fingerprint) + jitter(key.fingerprint, noise)
        return types.SimpleNamespace(params=loss)

    monkeypatch.setattr(correlated, "fit", fit)
    told = lambda o: o.noise  # noqa: E731
    assert verdicts(language_model, tmp_path)[name]
    told = lambda o: o.noise / o.error  # noqa: E731 - every band's noise stays
    assert not verdicts(language_model, tmp_path)[name]
