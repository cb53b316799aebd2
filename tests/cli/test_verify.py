"""``dpfl verify`` accepts what runs state, and refuses what was changed in it."""

import copy
import dataclasses
import json
import os
import pathlib
import re

import pytest
import yaml
from rich.console import Console

from dpfl_jax.accounting import Guarantee, digests, epsilon, meaning, statement
from dpfl_jax.cli.main import main
from dpfl_jax.config.load import validate_config
from dpfl_jax.federation import federated_run
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.guarantee import federated_guarantee, federated_statement
from dpfl_jax.federation.isrl.privacy import Budget, SiloNoise, worst_guarantee
from dpfl_jax.federation.mechanisms import hi_grad_avg
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.mechanisms import Calibrated, Population, els, uls
from tests.run.silo_configs import SILOS
from tests.statements import EXTRA, SOUND, central, federated, finished, personal

BEFORE = pathlib.Path(__file__).parents[1] / "artefacts" / "0.1.0" / "guarantees"


def verify(path, capsys, *options):
    capsys.readouterr()
    code = main(["verify", str(path), "--json", *options])
    printed = capsys.readouterr()
    if code == 2:
        return code, printed.err
    told = json.loads(printed.out.strip().splitlines()[-1])
    assert told["holds"] == (code == 0)
    return code, "\n".join(told["failures"])


@pytest.mark.parametrize("name", SOUND)
def test_what_is_stated_holds(name, tmp_path, capsys):
    """Mechanisms of all four systems, also such as state that there is no guarantee."""
    made = SOUND[name]()
    (tmp_path / "guarantee.json").write_text(made.dumps())
    assert statement.read(tmp_path / "guarantee.json") == made
    assert verify(tmp_path, capsys) == (0, "")
    assert EXTRA[0] in made.privacy.caveats
    assert made.privacy.private is (name not in ("none", "fed_avg"))


def test_a_run_of_an_older_release_is_read_and_tied_to_nothing(tmp_path, capsys):
    """Version 1 had no digests, and said neither what makes a unit nor what was public."""
    values = SOUND["uls"]().to_json() | {"version": 1}
    del values["digests"]
    for name in ("unit_key", "public_inputs"):
        del values["privacy"][name]
    (tmp_path / "guarantee.json").write_text(json.dumps(values))
    report = {"privacy": values["privacy"], "guarantee": values["text"]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "config.yaml").write_text("of any content")
    assert verify(tmp_path, capsys) == (0, "")
    assert main(["verify", str(tmp_path)]) == 0
    assert "nothing ties a model or a configuration" in " ".join(capsys.readouterr().out.split())


def test_digests_name_files_of_their_own_folder_alone(tmp_path, capsys):
    for name in ("../secret", str(tmp_path / "secret")):
        made = SOUND["uls"]().tied(run={name: "0" * 64})
        (tmp_path / "secret").write_text("of somebody else")
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "guarantee.json").write_text(made.dumps())
        code, told = verify(tmp_path / "run", capsys)
        assert code == 3
        assert "names a file outside its folder" in told


def test_a_model_that_is_gone_and_one_without_a_digest_are_named(tmp_path, capsys):
    """The guarantee holds for the run, and says nothing of what lies in another step's folder."""
    for step in (2, 3):
        (tmp_path / "checkpoints" / f"{step}" / "state").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"{step}" / "state" / "model").write_text(f"{step}")
    (tmp_path / "config.yaml").write_text("name: tiny")
    made = SOUND["uls"]().tied(run=digests.of_run(tmp_path, [3, 2]))
    (tmp_path / "guarantee.json").write_text(made.dumps())

    def told():
        code = main(["verify", str(tmp_path), "--json"])
        printed = capsys.readouterr()
        found = json.loads(printed.out.splitlines()[-1])
        return code, found["missing"], found["untied"], " ".join(printed.err.split())

    code, *none, said = told()
    assert (code, none) == (0, [[], []])
    assert "those of config.yaml, checkpoints/3/state, checkpoints/2/state" in said
    (tmp_path / "checkpoints" / "3").rename(tmp_path / "checkpoints" / "4")
    code, missing, untied, said = told()
    assert (code, missing, untied) == (0, ["checkpoints/3/state"], ["checkpoints/4/state"])
    assert "those of config.yaml, checkpoints/2/state not here" in said
    assert "not compared: checkpoints/3/state checkpoints that this file has no digest of" in said
    assert "what model they hold: checkpoints/4/state" in said


def reworded(values):
    """The text that goes with the changed numbers: a forger would write it."""
    values["text"] = str(Guarantee.from_json(values["privacy"]))


def every_event(values, change):
    def look(node):
        if isinstance(node, list):
            for item in node:
                look(item)
        if isinstance(node, dict):
            change(node)
            look(list(node.values()))

    look(values["events"])


def lower_epsilon(v):
    v["privacy"]["epsilon"] *= 0.99
    reworded(v)


def lower_delta(v):
    v["privacy"]["delta"] /= 2
    if "delta" in v["basis"]:
        v["basis"]["delta"] /= 2
    reworded(v)


def noise_in_words(v):
    v["text"] = v["text"].replace("noise multiplier is ", "noise multiplier is 1")


def noise_in_privacy(v):
    v["privacy"]["noise_multiplier"] *= 2
    reworded(v)


def noise_in_mechanism(v):
    basis = v["basis"]
    one = basis["mechanism"] if "mechanism" in basis else basis["kinds_of_silos"][0]
    one["noise_multiplier"] *= 2


def noise_in_events(v):
    def louder(node):
        for name in ("noise_multiplier", "standard_deviation"):
            if name in node:
                node[name] *= 2

    every_event(v, louder)
    v["privacy"]["epsilon"] /= 2
    reworded(v)


def probability_in_events(v):
    def rarer(node):
        if "sampling_probability" in node:
            node["sampling_probability"] /= 2
        if "sampling_probs" in node:
            first, *rest = node["sampling_probs"]
            node["sampling_probs"] = [first + sum(rest) / 2, *(p / 2 for p in rest)]
        if node.get("type") == "GaussianDpEvent" and "poisson" not in v["text"].lower():
            node["noise_multiplier"] *= 2  # nothing is sampled: the same by noise

    every_event(v, rarer)


def fewer_steps(v):
    v["privacy"]["steps"] -= 1
    reworded(v)


def fewer_steps_everywhere(v):
    """In the mechanism, too, but not in the events."""
    basis = v["basis"]
    fewer = basis["kinds_of_silos"][0] if "kinds_of_silos" in basis else basis
    fewer["steps" if "steps" in basis else "rounds"] -= 1


def other_unit(v):
    v["privacy"]["unit"] = "person and all their friends"
    reworded(v)


def other_adjacency(v):
    v["privacy"]["adjacency"] = "add-or-remove one whole silo"
    reworded(v)


def other_trust(v):
    v["privacy"]["trust"] = "nobody"
    reworded(v)


def event_left_out(v):
    case = v["events"][0]
    if len(case) > 1:
        del case[-1]
    else:
        event = case[0]
        if event["type"] == "ComposedDpEvent":
            del event["events"][-1]
        else:
            case[0] = {"type": "NoOpDpEvent"}


def better_status(v):
    v["privacy"]["status"] = "exact"
    reworded(v)


def unknown_version(v):
    v["version"] = 3


def larger_population(v):
    basis = v["basis"]
    if "population" in basis:
        basis["population"]["num_users"] *= 2
        basis["population"]["num_units"] *= 2
    elif "silos" in basis:
        basis["silos"][0]["num_records"] *= 9
        basis["silos"][0]["num_subjects"] *= 9
    elif "num_records" in basis:
        basis["groups_budget_rate_rounds"][0][1] /= 2
    else:
        basis["kinds_of_silos"][0]["silo_size"] *= 2
        basis["kinds_of_silos"][0]["rounds"] += 1  # with full batches the size does not matter


def assumption_left_out(v):
    v["privacy"]["assumptions"] = v["privacy"]["assumptions"][:-1]
    reworded(v)


def other_noise(v):
    v["noise"]["drawn"] = "float"


def another_key(v):
    v["basis"]["checked_by"] = "everybody"


# What is changed -> what the sentence says, or for which code of exit.
TAMPERED = {
    lower_epsilon: "but the events cost",
    lower_delta: "delta|events cost",
    noise_in_words: "the text is not what the fields say",
    noise_in_privacy: "privacy.noise_multiplier is",
    noise_in_mechanism: "noise_multiplier|events",
    noise_in_events: "events",
    probability_in_events: "events",
    fewer_steps: "privacy.steps is",
    fewer_steps_everywhere: "events|privacy.steps|basis|groups",
    other_unit: "privacy.unit is",
    other_adjacency: "privacy.adjacency is",
    other_trust: "privacy.trust is",
    event_left_out: "events",
    better_status: "privacy.status is 'exact'",
    unknown_version: "version",
    larger_population: "events|sampling|basis|groups",
    assumption_left_out: "privacy.assumptions has",
    other_noise: "drawn",
    another_key: "checked_by",
}


@pytest.mark.parametrize(
    "name", ["els", "uls", "adaptive", "hi_grad_avg", "local_group", "personal", "isrl"]
)
def test_what_was_changed_is_refused(name, tmp_path, capsys):
    """Nineteen changes of a statement of each kind, every one refused with its reason."""
    made, file = SOUND[name]().to_json(), tmp_path / "guarantee.json"
    for change, words in TAMPERED.items():
        values = copy.deepcopy(made)
        change(values)
        assert values != made, change
        file.write_text(json.dumps(values))
        code, told = verify(file, capsys)
        assert code == (2 if change is unknown_version else 3), (change, told)
        assert any(word in told for word in words.split("|")), (change, told)


@pytest.mark.parametrize(("key", "value"), [("count_weight", 0.01), ("clip_norm", 2.0)])
def test_the_price_of_an_adaptive_clip_norm_is_known(key, value, tmp_path, capsys):
    """A run adds noise for the count, too; a file may not tell of less, nor leave it out."""
    made, file = SOUND["adaptive"]().to_json(), tmp_path / "guarantee.json"
    assert "by at most 1.001249 clip norms, and noise is scaled to that" in made["text"]
    made["basis"]["mechanism"]["clip"][key] = value
    file.write_text(json.dumps(made))
    assert "privacy.assumptions[3] says" in verify(file, capsys)[1]
    made["basis"]["mechanism"]["clip"] = {"kind": "normalized", "clip_norm": 1.0}
    file.write_text(json.dumps(made))
    assert "privacy.assumptions has" in verify(file, capsys)[1]


def test_a_group_that_is_told_to_spend_less_is_refused(tmp_path, capsys):
    """Its epsilon is below that of the run: each is held against its own event."""
    values, file = SOUND["personal"]().to_json(), tmp_path / "guarantee.json"
    for group in values["groups"]:
        kept = group["epsilon"]
        group["epsilon"] = 0.99 * kept
        file.write_text(json.dumps(values))
        code, told = verify(file, capsys)
        group["epsilon"] = kept
        assert code == 3
        assert f"the group {group['of']!r} has epsilon" in told


def population(**numbers):
    return lambda v: v["basis"]["population"].update(numbers)


def cell(**numbers):
    return lambda v: v["basis"]["cells"][1]["population"].update(numbers)


def basis(**numbers):
    return lambda v: v["basis"].update(numbers)


def silo(**numbers):
    return lambda v: v["basis"]["silos"][0].update(numbers)


def kind(**numbers):
    return lambda v: v["basis"]["kinds_of_silos"][0].update(numbers)


# Numbers that no data and no run have; some would make a caveat or a cost disappear.
IMPOSSIBLE = [
    ("uls", population(num_users=-7), "num_users is -7"),
    ("uls", population(num_users=10**9), "num_users is 1000000000"),
    ("els", population(num_units=10**9), "num_units is 1000000000"),
    ("els", population(num_users=10), "num_units is 1600, but 10 users with 2000 examples have"),
    ("els", population(num_units=1601), "from 1 to 1600 that may be drawn"),
    ("els, several owners", population(num_users=10), "from 1 to 40 that"),
    ("individual_els", population(num_users=399), "from 1 to 1197 that"),
    ("owner_sets", population(num_users=99), "from 1 to 396 that"),
    ("uls", population(num_units=2000), "from 400 to 400 that"),
    ("selection", cell(num_units=2000), "from 400 to 400 that"),
    ("selection", cell(num_users=2001), "num_users is 2001"),
    ("uls", population(num_users=True), "num_users is True"),
    ("uls", basis(steps=4.0), "steps is 4.0"),
    ("hi_grad_avg", basis(rounds=True), "rounds is True"),
    ("hi_grad_avg", basis(num_subjects=-1), "num_subjects is -1"),
    ("hi_grad_avg", basis(num_subjects=1), "num_subjects is 1"),
    ("hi_grad_avg", basis(num_subjects=82), "num_subjects is 82"),
    ("local_item", silo(num_records=-(10**6)), "num_records is -1000000"),
    ("local_item", silo(num_records=10**6), "a silo of 100 subjects has 100 to 100 records"),
    ("hi_grad_avg", silo(num_subjects=24), "a silo of 24 subjects has 24 to 96 records"),
    ("subject_uls", silo(num_subjects=101), "a silo of 101 subjects has 101 to 101 records"),
    ("personal", basis(num_records=-3), "num_records is -3"),
    ("personal", basis(rounds=7), "rounds is 7"),
    ("isrl", kind(silo_size=0), "silo_size is 0"),
    ("isrl", kind(batch=0), "no silo has this batch"),
    ("isrl", kind(batch=1e6), "no silo has this batch"),
    ("isrl", kind(rounds=0), "rounds is 0"),
    ("isrl", kind(arm="certified"), "no silo has arm"),
    ("isrl", kind(budget={"epsilon": 0.1, "delta": 1e-5}), "says a budget of 0.1"),
    ("isrl", kind(noise="none at all"), "no silo has this noise"),
    ("isrl", basis(kinds_of_silos=[]), "kinds_of_silos is empty"),
]


# By the mechanism -> what is said instead of it.
PUBLIC = {
    "uls": {
        "counts: 400 users, 2,000 examples": "counts: 1000000 users",
        "clip norm: 1": "clip norm: 10",
        "group size: 3 examples of a user": "group size: 1000 examples of a user",
    },
    "hi_grad_avg": {
        "counts: 4 silos, and the sizes of each": "counts: 40 silos, and the sizes of each",
        "clip norm: 1": "clip norm: 0.001",
        "group size: 4 records of a subject in a silo": "group size: 44 records of a subject",
    },
    "subject_uls": {  # has two group sizes
        "counts: 3 silos, and the sizes of each": "counts: 3 silos less",
        "clip norm: 1": "clip norm: 1e-3",
        "group size: 2 examples of a user": "group size: 22 examples of a user",
        "group size: 1 records of a subject in a silo": "group size: 2 records of a subject",
    },
    "personal": {
        "clip norm: 1": "clip norm: 0.001",
        "group size: 1 records of a subject in a silo": "group size: 0 records of a subject",
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_inputs_are_those_of_the_mechanism(name, tmp_path, capsys):
    made, file = SOUND[name](), tmp_path / "guarantee.json"
    told = ("tokenizer: any", *PUBLIC[name])

    def verified(inputs):
        values = made.about(dataclasses.replace(made.privacy, public_inputs=inputs))
        file.write_text(values.dumps())
        return verify(file, capsys)

    assert verified(()) == (0, "")  # of a loop of one's own
    assert verified(told) == (0, "")
    for entry, wrong in PUBLIC[name].items():
        others = [other for other in told if other != entry]
        left_out, added = f"leaves out '{entry[:8]}", f"says {wrong!r}"
        for inputs, words in (([*told, wrong], [added]), ([*others, wrong], [left_out, added])):
            code, said = verified(tuple(inputs))
            assert code == 3
            assert all(f"privacy.public_inputs {word}" in said for word in words)
        assert verified(tuple(others))[0] == 3


def test_cheap_guarantees_of_data_that_cannot_be_are_refused(tmp_path, capsys):
    """Everything in the file follows from these numbers, but nobody has that many units."""
    plain = els(group_size=1, batch_size=5)
    population = Population(10, 10**6, 10**6)
    cheap = Calibrated(plain, 0.5, population, 100, 1e-5)
    made = cheap.statement(cheap.guarantee())
    assert made.privacy.epsilon < 0.01
    true = dataclasses.replace(cheap, population=dataclasses.replace(population, num_units=10))
    assert true.guarantee().epsilon > 100
    hi = hi_grad_avg(batch_size=5)
    federation = Federation((SiloPlan(hi, SiloFacts(10**6, 10), 1, 1.0, 1.0),), 10, 1)
    guarantee = federated_guarantee(federation, 1e-5, 10, num_subjects=10)
    silo = federated_statement(federation, 10, 10, guarantee)
    assert silo.privacy.epsilon < 0.01
    for forged, words in ((made, "from 1 to 10 that"), (silo, "10 subjects has 10 to 10 records")):
        (tmp_path / "guarantee.json").write_text(forged.dumps())
        code, said = verify(tmp_path, capsys)
        assert code == 3
        assert words in said


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("hi_grad_avg", "sampling", "fixed"),
        ("hi_grad_avg", "denominator", "distinct_subjects"),
        ("personal", "denominator", "realized_batch"),
        ("isrl", "arm", "as_published"),
        ("isrl", "sampling", "with_replacement"),
    ],
)
def test_what_had_no_guarantee_is_given_none(name, key, value, tmp_path, capsys):
    """Options of November 2026: a file may have one of them, or an epsilon, but not both."""
    values = json.loads((BEFORE / f"{name}.json").read_text())
    basis = values["basis"]
    section = basis["mechanism"] if "mechanism" in basis else basis["kinds_of_silos"][0]
    section[key] = value
    (tmp_path / "guarantee.json").write_text(json.dumps(values))
    code, told = verify(tmp_path, capsys)
    assert code == 3
    assert re.search(f"(unknown key 'mechanism.|no silo has (this )?){key}", told)


@pytest.mark.parametrize(("name", "change", "words"), IMPOSSIBLE)
def test_impossible_numbers_are_refused(name, change, words, tmp_path, capsys):
    values, file = SOUND[name]().to_json(), tmp_path / "guarantee.json"
    change(values)
    file.write_text(json.dumps(values))
    code, told = verify(file, capsys)
    assert code == 3
    assert words in told


def test_a_file_without_a_guarantee_states_nothing_else(tmp_path, capsys):
    values, file = SOUND["none"]().to_json(), tmp_path / "guarantee.json"
    event = {"type": "NoOpDpEvent"}
    values["groups"] = [{"of": "every user", "epsilon": 0.01, "event": event}]
    file.write_text(json.dumps(values))
    code, told = verify(file, capsys)
    assert code == 3
    assert "has events or groups" in told


def test_caveats_of_the_run_are_told_apart(tmp_path, capsys):
    (tmp_path / "guarantee.json").write_text(SOUND["uls"]().dumps())
    assert main(["verify", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "cannot show to be all" in told
    assert told.strip().endswith(EXTRA[0])


def test_a_delta_that_is_too_much_for_the_largest_silo_is_named(tmp_path, capsys):
    small, large = (
        SiloNoise(2.0, 10.0, size, 12, "poisson", Budget(8.0, 1e-3)) for size in (100, 5000)
    )
    for order in ([small, large], [large, small]):
        caveats = worst_guarantee(order).caveats
        assert any("5,000 records" in caveat for caveat in caveats)


def test_a_caveat_of_the_mechanism_may_not_be_left_out(tmp_path, capsys):
    values = central(uls(group_size=3, cohort_size=20), 1.0, delta=0.01).to_json()
    file = tmp_path / "guarantee.json"
    values["privacy"]["caveats"] = [c for c in values["privacy"]["caveats"] if c in EXTRA]
    reworded(values)
    file.write_text(json.dumps(values))
    code, told = verify(file, capsys)
    assert code == 3
    assert "a caveat of the mechanism is missing: delta 0.01 is not below one over" in told


def test_a_forger_of_everything_is_left_with_the_truth(tmp_path, capsys):
    """Whoever changes mechanism, events and words alike must state what these cost."""
    made = central(uls(group_size=3, cohort_size=20), 1.0).to_json()
    other = central(uls(group_size=3, cohort_size=20), 0.9).to_json()
    other["privacy"]["epsilon"] = made["privacy"]["epsilon"]
    reworded(other)
    (tmp_path / "guarantee.json").write_text(json.dumps(other))
    code, told = verify(tmp_path, capsys)
    assert code == 3
    assert told.count("\n") == 0
    assert "but the events cost" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "has no version"),
        ('{"version": 1, "version": 1}', "occurs twice"),
        ('{"version": 1, "x": NaN}', "not a number in JSON"),
        ('{"version": 1}', "Field required"),
        (r'{"version": 2, "library": "a\nall of it holds"}', "line break"),
        (r'{"version": 2, "a\u200fb": [["\ud800"]]}', "invisible character in"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_statement_is_unreadable(text, words, tmp_path, capsys):
    if text is not None:
        (tmp_path / "guarantee.json").write_text(text)
    code, told = verify(tmp_path / "guarantee.json", capsys)
    assert code == 2
    assert words in told


def test_no_code_is_run_for_a_file(tmp_path, capsys):
    """A mechanism is made of the file only by its name among those that are here."""
    values = SOUND["uls"]().to_json()
    values["basis"]["mechanism"]["kind"] = "os:system"
    (tmp_path / "guarantee.json").write_text(json.dumps(values))
    code, told = verify(tmp_path, capsys)
    assert code == 3
    assert "no mechanism can be built from `basis`" in told
    assert "should be a plain name" in told


def test_the_other_accountant_knows_better_than_too_small_an_epsilon():
    """Its lower bound is above what is stated wherever that is wrong by a few percent."""
    for name in ("uls", "hi_grad_avg", "user_ldp", "isrl", "isrl, one pass"):
        made = SOUND[name]()
        both, doubt = statement.second_opinion(made)
        assert both is not None, name
        assert both[0] <= made.privacy.epsilon <= both[1] * 1.05, name
        assert not doubt
        values = made.to_json()
        values["privacy"]["epsilon"] *= 0.9
        wrong = statement.Statement.model_validate(values)
        assert statement.second_opinion(wrong)[1], name


@pytest.mark.parametrize("silos", [3, 9])
def test_the_explanation_holds_for_every_silo(silos):
    """Nearly that of the silo which tells most; from epsilon and delta where silos are many."""
    sigmas = [1.0 + 0.2 * i for i in range(silos)]
    made = federated(hi_grad_avg(batch_size=20), sigmas, silos_per_subject=1)
    found, (events,) = made.meaning(), made.cases
    assert len(events) == silos
    alone = [meaning(event, made.privacy.delta) for event in events]
    for a in (1e-3, 1e-2, 0.05, 0.3):
        most = max(one.true_positive_rate(a) for one in alone)
        assert 0.999 * most <= found.true_positive_rate(a)
        assert (found.true_positive_rate(a) <= 1.02 * most) == (silos == 3)


@pytest.mark.slow
def test_nothing_about_records_with_budgets_is_told():
    """But for what is declared: the file is the same whatever the records' own budgets are."""
    told = []
    for seed in (0, 1):
        config = copy.deepcopy(SILOS["personal"])
        config["privacy"]["budgets"] = {"kind": "three_levels", "seed": seed}
        prepared = federated_run.prepare(validate_config(config), Console(quiet=True))
        guarantee = prepared.guarantee(4)
        made = prepared.statement(4, guarantee)
        told.append((sorted(prepared.personal.budgets), made.dumps()))
    assert told[0][0] != told[1][0]
    assert told[0][1] == told[1][1]


def test_a_group_costs_what_is_told():
    made = personal()
    for group in made.groups:
        event = statement.event_types.from_json(group.event)
        assert group.epsilon == epsilon(event, 1e-4)
    assert made.groups[0].epsilon < made.groups[1].epsilon < made.privacy.epsilon


def central_config(kind, **mechanism):
    return {
        "data": {"source": "digits", "records_per_user": 6},
        "model": {"kind": "mlp", "options": {"hidden": [8]}},
        "mechanism": {"kind": kind, "group_size": 2, **mechanism},
        "train": {"steps": 3},
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
    }  # fmt: skip


def federated_config(kind, **mechanism):
    made = copy.deepcopy(SILOS["federated"])
    made["mechanism"] = {
        "kind": kind,
        "sampling_prob": 0.2,
        "max_records_per_subject": 3,
    } | mechanism
    made["federation"] |= {"silos": 3, "rounds": 2}
    return made


def test_a_declared_population_that_cannot_be_is_priced_by_nobody(tmp_path, capsys):
    declared = {"num_users": 10, "num_examples": 10**6, "limited_examples": {2: 10**6}}
    config, file = central_config("els", batch_size=16), tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"name": "tiny", **config, "population": declared}))
    assert main(["train", str(file), "--dry-run"]) == 2
    assert "num_units is 1000000, but 10 users" in capsys.readouterr().err


RUNS = {
    "els": central_config("els", batch_size=16),
    "uls": central_config("uls", cohort_size=8),
    "automatic": central_config("uls", cohort_size=8, clip={"kind": "automatic"}),
    "adaptive": central_config("uls", cohort_size=8, clip={"kind": "adaptive"}),
    "local_group": federated_config("local_group"),
    "hi_grad_avg": federated_config("hi_grad_avg"),
    "user_ldp": federated_config("user_ldp"),
    "subject_uls": federated_config("subject_uls", group_size=2),
    "local_item": federated_config("local_item"),
    "rpdp": SILOS["personal"],
    "isrl": SILOS["isrl"],
}


@pytest.mark.slow
@pytest.mark.nightly("els", "automatic", "user_ldp", "local_item", "local_group", "subject_uls")
@pytest.mark.parametrize("name", RUNS)
def test_the_report_of_a_run_holds(name, tmp_path, capsys):
    """A tiny run of each mechanism, trained: its folder, its report and its file are accepted."""
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump({"name": "tiny", **RUNS[name]}))
    assert main(["train", str(config), "--dry-run", "--json"]) == 0
    price = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert main(["train", str(config), "--run-dir", str(run)]) == 0
    for path in (run, run / "report.json", run / "guarantee.json"):
        assert verify(path, capsys) == (0, "")
    report = json.loads((run / "report.json").read_text())
    assert report["meaning"][0].startswith("An attacker who")
    assert price["meaning"] == report["meaning"]
    assert f"- {report['meaning'][0]}\n" in (run / "report.md").read_text()
    assert (run / "attacks.png").stat().st_size > 10_000
    report["privacy"]["epsilon"] *= 0.9
    (run / "report.json").write_text(json.dumps(report))
    code, told = verify(run, capsys)
    assert code == 3
    assert "states another guarantee" in told
    assert verify(run / "guarantee.json", capsys) == (0, "")


@pytest.mark.parametrize("place", ["privacy", "guarantee", "summary"])
def test_a_changed_report_is_neither_printed_nor_exported(place, tmp_path, capsys):
    """Of a run that somebody sent, whose guarantee.json holds: only `verify` said so."""
    made = SOUND["uls"]()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("config: {}\nfacts: {}\n")
    report = finished(tmp_path / "run", made)
    assert verify(tmp_path / "run", capsys) == (0, "")
    assert main(["show", str(tmp_path / "run")]) == 0
    if place == "privacy":
        report["privacy"]["epsilon"] = 0.125
    else:
        report[place] = re.sub(r"\d+\.\d+", "0.125", report[place], count=1)
    (tmp_path / "run" / "report.json").write_text(json.dumps(report))
    assert verify(tmp_path / "run", capsys)[0] == 3
    for command in (["show"], ["show", "--json"], ["export", "--out", str(tmp_path / "out")]):
        words = [command[0], str(tmp_path / "run"), *command[1:]]
        if command[0] == "export":
            words = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
        assert main(words) == 2
        told = capsys.readouterr()
        assert "states another guarantee" in told.err
        assert "0.125" not in told.out + told.err


def test_a_changed_text_beside_the_report_does_not_hold(tmp_path, capsys):
    """`show` prints report.json: people read report.md by other means, too."""
    made = SOUND["uls"]()
    finished(tmp_path, made)
    file = tmp_path / "report.md"
    parts = re.split("(## Guarantee)", file.read_text())
    for place in (0, 2):  # the headline, the paragraph
        changed = re.sub(r"\d+\.\d+", "0.125", parts[place], count=1)
        file.write_text("".join([*parts[:place], changed, *parts[place + 1 :]]))
        code, told = verify(tmp_path, capsys)
        assert code == 3
        assert "report.md states another guarantee" in told
    main(["show", str(tmp_path)])
    assert "0.125" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["guarantee.json", "report.json", "report.md"])
def test_a_file_without_an_end_is_not_read(name, tmp_path, capsys):
    finished(tmp_path, SOUND["uls"]())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    code, told = verify(tmp_path, capsys)
    assert code == 2
    assert f"{name} must be a regular file" in told
    assert main(["show", str(tmp_path)]) == (0 if name == "report.md" else 2)


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("what", ["deep", "huge"])
def test_numbers_and_nesting_without_bound_are_refused(what, group, tmp_path, capsys):
    values = SOUND["uls"]().to_json()
    event = {"type": "GaussianDpEvent", "noise_multiplier": 1.0}
    if what == "huge":
        event = {"type": "SelfComposedDpEvent", "event": event, "count": int("9" * 4000)}
    for _ in range(400 * (what == "deep")):
        event = {"type": "ComposedDpEvent", "events": [event]}
    if group:
        values["groups"] = [{"of": "some", "epsilon": 1.0, "event": event}]
    else:
        values["events"] = [[event]]
    (tmp_path / "guarantee.json").write_text(json.dumps(values))
    code, told = verify(tmp_path / "guarantee.json", capsys)
    assert code == 2
    assert "more than 64 bits, or is nested deeper than 50 levels" in told


def test_a_group_whose_event_costs_nothing_computable_is_told(tmp_path, capsys):
    values = SOUND["uls"]().to_json()
    values["groups"] = [{"of": "some", "epsilon": 1.0, "event": {"type": "os.system"}}]
    (tmp_path / "guarantee.json").write_text(json.dumps(values))
    code, told = verify(tmp_path / "guarantee.json", capsys)
    assert code == 3
    assert "events cannot be accounted" in told
