"""Configs: what is wrong is said in one sentence that names the key."""

import pathlib
import random

import pytest
import yaml
from pydantic import ValidationError
from rich.console import Console

from dpfl_jax.config import config_fingerprint, config_to_dict, load_config, validate_config
from dpfl_jax.config.load import make_config, read_sections
from dpfl_jax.config.schema import PrivacyConfig, RunConfig
from dpfl_jax.data import DataConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.pipeline import run_experiment

MINIMAL = {
    "data": {"source": "python_source"},
    "mechanism": {"kind": "uls", "group_size": 1, "cohort_size": 16},
    "privacy": {"epsilon": 2.0},
    "train": {"steps": 3},
}


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def test_overrides_reach_any_key(minimal):
    config = load_config(
        minimal,
        [
            "mechanism={kind: els, group_size: 2, batch_size: 8}",
            "train.steps=20",
            "seed=3",
            "privacy.epsilon=1e-1",
        ],
    )
    assert config.mechanism.kind == "els"
    assert config.train.steps == 20
    assert config.privacy.epsilon == 0.1
    assert config.seed == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mechanism.clip_nrom=1", "unknown key 'mechanism.clip_nrom'.*did you mean 'clip_norm'"),
        ("steps=1", "unknown key 'steps'.*did you mean 'pretrain.steps' or 'train.steps'"),
        ("epsilonn=1", r"unknown key 'epsilonn'.*did you mean 'privacy\.epsilon'\?"),
        ("privacy.epsilonn=1", r"did you mean 'epsilon'\?"),
        ("lr=1", "unknown key 'lr'.*known here: "),
        ("trian.steps=1", "unknown key 'trian'.*did you mean 'train'"),
        ("data.seqlen=4", "unknown key 'data.seqlen'.*did you mean 'seq_len'"),
        ("mechanism.groupsize=4", "did you mean 'group_size'"),
        ("privacy.epsilon=0", "privacy.epsilon is 0"),
        ("privacy.epsilon=-1", "privacy.epsilon is -1"),
        ("privacy.delta=1", "privacy.delta is 1"),
        ("privacy.delta=0", "privacy.delta is 0"),
        ("privacy.epsilon=null", "neither privacy.epsilon nor privacy.noise_multiplier"),
        ("privacy.noise_multiplier=1", "both privacy.epsilon and privacy.noise_multiplier"),
        ("mechanism.noise_multiplier=1", "is 'privacy.noise_multiplier'"),
        ("mechanism.kind=dpsgd", "mechanism.kind is 'dpsgd'"),
        ("mechanism.kind=nowhere:X", "mechanism.kind is 'nowhere:X', code that would be run"),
        ("train.steps=zero", "train.steps"),
        ("mechanism.clip_norm=0", "mechanism: .*clip_norm is 0"),
        ("mechanism.clip_norm=x", "mechanism.clip_norm is 'x'"),
        ("mechanism={kind: uls}", "needs mechanism.group_size and mechanism.cohort_size"),
        ("mechanism=3", "must hold kind"),
        ("train.steps", "must look like section.key=value"),
        ("name.first=x", "goes below 'name'"),
        ("privacy.budget=3", "privacy.ledger"),
        ("privacy.ledger=spent.jsonl", "privacy.account"),
        ("privacy={ledger: ~/.bash_login, account: a}", r"is '.*/.bash_login', but a ledger is"),
        ("privacy.account=$(touch x)", "privacy.account: string should match"),
        ("processes.coordinator=a.example:80", "set the variable DPFL_COORDINATOR"),
        ('name="a\\nb"', "name: string should match"),
        ("name=$(touch x)", "name: string should match"),
        ("name=a;b", "name: string should match"),
        # An unset variable of the shell, and what YAML takes for nothing: no protection goes.
        ("data.user_column=", "'data.user_column=' is empty.*variable of the shell"),
        ("privacy.budget=", "'privacy.budget=' is empty"),
        ("data.user_column=#patient", "cuts a value off at the #: put it in quotes"),
        ("data.user_column=&user", "is empty.*needs quotes"),
        ("mechanism={kind: els, group_size}", "is empty"),
        ("data.path=a #1.csv", "cuts a value off at the #: put it in quotes"),
        ("train.steps=010", "is 010, which YAML reads as another number"),
        ("train.steps=1:30", "is 1:30, which YAML reads as another number"),
        ("population={num_users: 5, num_examples: 9, limited_examples: {010: 5}}", "is 010"),
        ("train.steps=true", "train.steps is true or false, but it must be a number"),
        ("data.scale={age: [0, yes]}", "data.scale.age.1 is true or false"),
        ("train={steps: 3, steps: 300}", "the key 'steps' occurs twice"),
        ("data.user_column=no", "given: False.*put it in quotes"),
        ("data.user_column=2024-01-01", "does not read as text: put it in quotes"),
        ("data.path=a: b.csv", "put it in quotes"),
        ("data.user_column=@id", "not valid YAML .*in single quotes"),
        ("data.user_column=!id", "not valid YAML .*in single quotes"),
        ("data.path=*.csv", "not valid YAML .*in single quotes"),
    ],
)
def test_each_mistake_is_one_sentence(minimal, override, message):
    overrides = ["name=x", override]
    with pytest.raises(BadInputError, match=message) as caught:
        load_config(minimal, overrides)
    assert "\n" not in str(caught.value)


def test_a_small_file_that_holds_too_much_is_refused(tmp_path):
    aliases = [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 10)]
    for text in (
        "a0: &a0 [x]\n" + "\n".join(aliases),
        "a: &a [*a]",
        "a: " + "[" * 60 + "]" * 60,
        "a0: &a0 [x]\n" + "\n".join(aliases) + "\n? *a9\n: x",
        "a: " + "[" * 3000,
        "a: " + "[" * 3000 + "]" * 3000,
        "a: 2026-13-41",
    ):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(BadInputError, match=r"holds more than|is not valid YAML"):
            load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("privacy: {epsilon: 4}\nprivacy: {epsilon: 80}\n", "'privacy' occurs twice"),
        ("privacy:\n  epsilon: 4\n  epsilon: 80\n", "line 2, privacy: the key 'epsilon' occurs"),
        ("data:\n  user_column:\n  path: x\n", "line 2, data.user_column is empty"),
        ("data:\n  user_column: #patient\n", "line 2, data.user_column is empty"),
        ("data:\n  user_column: &patient\n", "line 2, data.user_column is empty"),
        ("data:\n  path: a #1.csv\n", "line 2, data.path is cut off at the #.*in quotes"),
        ("data:\n  path: [a, ~]\n  silo: b: c\n", "line 3, is not valid YAML.*single quotes"),
        ("train:\n  steps: 010\n", "train.steps is 010"),
    ],
)
def test_a_file_that_yaml_would_read_otherwise_is_refused(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(BadInputError, match=message):
        load_config(tmp_path / "c.yaml")


def test_what_is_clear_is_read(minimal):
    overrides = [
        "data.user_column=null",
        "data.path='a #1.csv'",
        "optimizer.options={eps: 1e-8}",
        "train.steps=1_000",
    ]
    config = load_config(minimal, overrides)
    assert (config.data.user_column, config.data.path) == (None, "a #1.csv")
    assert (config.optimizer.options["eps"], config.train.steps) == (1e-8, 1000)
    minimal.write_text(minimal.read_text() + "seed: 3 #8, and a comment\nname: x # y\n")
    assert load_config(minimal).name == "x"


def test_missing_sections_and_files_are_named(tmp_path):
    path = tmp_path / "c.yaml"
    kind = "mechanism: {kind: uls, group_size: 1, cohort_size: 16}\n"
    path.write_text(f"data: {{source: python_source}}\n{kind}privacy: {{epsilon: 1}}\n")
    with pytest.raises(BadInputError, match=r"'train\.steps' is missing"):
        load_config(path)
    with pytest.raises(BadInputError, match="no config file"):
        load_config(tmp_path / "absent.yaml")
    path.write_text("a: [")
    with pytest.raises(BadInputError, match="not valid YAML"):
        load_config(path)
    path.write_text("- 1")
    with pytest.raises(BadInputError, match="mapping"):
        load_config(path)


def test_environment_variables_are_expanded(minimal, monkeypatch):
    monkeypatch.setenv("SOME_DIR", "/somewhere")
    config = load_config(minimal, ["data.path=${SOME_DIR}/x.jsonl"])
    assert config.data.path == "/somewhere/x.jsonl"
    with pytest.raises(BadInputError, match="ABSENT_DIR is not set"):
        load_config(minimal, ["data.path=${ABSENT_DIR}/x.jsonl"])
    monkeypatch.setenv("COLUMN", "")
    with pytest.raises(BadInputError, match="COLUMN is empty"):
        load_config(minimal, ["data.path=${COLUMN}"])


def test_outside_of_a_checkout_configs_are_those_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = ["privacy.ledger=spent.jsonl", "privacy.account=people"]
    config = load_config("configs/table/uls.yaml", ["data.path=visits.csv", *ledger])
    assert config.data.path == "visits.csv"
    assert config.privacy.ledger == str(tmp_path / "spent.jsonl")
    with pytest.raises(BadInputError, match="no config file configs/none"):
        load_config("configs/none.yaml")


def test_variables_are_replaced_in_paths_alone(minimal, monkeypatch):
    """What stands in other keys is published: whoever sent the file could ask for a password."""
    monkeypatch.setenv("DB_PASSWORD", "s3cr3t")
    for key in ("privacy.account", "name", "data.user_column", "sweep.grid.kind", "optimizer.name"):
        with pytest.raises(
            BadInputError, match=f"{key} uses .*DB_PASSWORD.* only replaced in paths"
        ) as error:
            load_config(minimal, [f"{key}=a ${{DB_PASSWORD}}"])
        assert "s3cr3t" not in str(error.value)
    given = ["data.path=[a.jsonl, '${DB_PASSWORD}']", "model.checkpoint=${DB_PASSWORD}"]
    config = load_config(minimal, given)
    assert (config.data.path, config.model.checkpoint) == (("a.jsonl", "s3cr3t"), "s3cr3t")


def test_a_relative_ledger_is_one_file_wherever_the_command_is_started(
    minimal, tmp_path, monkeypatch
):
    """Two working directories must not mean two ledgers, and twice the budget."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
        (folder / "link.yaml").symlink_to(minimal)
    wanted = str(tmp_path / "books" / "spent.jsonl")
    monkeypatch.setenv("BOOKS", "books")
    for folder in folders:
        monkeypatch.chdir(folder)
        for file in (minimal, "../c.yaml", "link.yaml"):
            for given in ("books/spent.jsonl", "./books/../books/spent.jsonl", wanted,
                          "${BOOKS}/spent.jsonl"):  # fmt: skip
                overrides = ["privacy.account=people", f"privacy.ledger={given}"]
                assert load_config(file, overrides).privacy.ledger == wanted
    assert load_config(minimal).privacy.ledger is None


def test_a_relative_ledger_without_a_file_is_refused(tmp_path):
    """A configuration made in Python has no folder: the working directory is no substitute."""
    config = validate_config(
        MINIMAL | {"privacy": {"epsilon": 2.0, "ledger": "spent.jsonl", "account": "people"}}
    )
    with pytest.raises(BadInputError, match=r"relative path 'spent.jsonl'.*full path"):
        run_experiment(config, tmp_path / "run", Console(quiet=True), lambda: 1 / 0)
    assert not (tmp_path / "run").exists()


def test_the_fingerprint_follows_what_is_computed(minimal):
    base = config_fingerprint(load_config(minimal))
    assert base == config_fingerprint(load_config(minimal, ["name=other"]))
    assert base != config_fingerprint(load_config(minimal, ["train.steps=4"]))
    ledger = ["privacy.ledger=spent.jsonl", "privacy.account=people"]
    with_budgets = [load_config(minimal, [*ledger, f"privacy.budget={b}"]) for b in (1, 2)]
    assert len({config_fingerprint(config) for config in with_budgets}) == 1
    assert config_fingerprint(with_budgets[0]) != base


SYSTEMS = {
    "central": {
        "data": {"source": "python_source"},
        "mechanism": {"kind": "uls", "group_size": 4, "cohort_size": 16},
        "privacy": {"epsilon": 2.0},
        "train": {"steps": 3},
    },
    "federated": {
        "mechanism": {"kind": "hi_grad_avg", "batch_size": 8},
        "federation": {"rounds": 2, "local_steps": 1},
        "privacy": {"epsilon": 2.0},
    },
    "isrl": {"mechanism": {"kind": "minibatch_sgd"}},
}
OTHER = {
    "microbatch_size": 3,
    "strategy": "scan",
    "attention": "blockwise",
    "group_buckets": True,
    "packing": 8,
    "examples_at_once": 2,
    "split_users": True,
    "sum_over_fsdp": "step",
    "mesh": {"fsdp": 2},
    "width": 2,
    "chunk_silos": 3,
    "rounds_per_block": 9,
    "profile": 2,
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_execution_is_no_part_of_what_is_guaranteed(system):
    """A run goes on with another one; every field is tried."""
    base = validate_config(SYSTEMS[system])
    for name in config_to_dict(base)["execution"]:
        other = validate_config(SYSTEMS[system] | {"execution": {name: OTHER[name]}})
        assert getattr(other.execution, name) != getattr(base.execution, name)
        assert config_fingerprint(other) == config_fingerprint(base), name


CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
# Keys below are names of other people, not ours.
FREE = {"options", "overrides", "grid", "limited_examples", "scale", "categories", "dates"}


def keys_in(section, above=()):
    for name, value in section.items():
        yield (*above, name)
        if isinstance(value, dict) and name not in FREE:
            yield from keys_in(value, (*above, name))


def misspelt(name, rng):
    """With two neighbours swapped, a letter left out, or one twice."""
    i = rng.randrange(len(name) - 1)
    swapped = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
    return next(
        new
        for new in (rng.choice([swapped, name[:i] + name[i + 1 :]]), name[:i] + name[i] + name[i:])
        if new != name
    )


@pytest.mark.parametrize("how", ["misspelt", "mistyped"])
def test_a_wrong_key_in_any_configuration_is_named(how, monkeypatch):
    """Fifty configurations each, over all variants, with one key wrong; seeded."""
    monkeypatch.setenv("DPFL_DATA_DIR", "/data")
    rng, files = random.Random(49), sorted(CONFIGS.rglob("*.yaml"))
    variants = set()
    for number in range(50):
        file = files[number % len(files)]
        raw = read_sections(file)
        variants.add(load_config(file).variant)
        # A word of few letters may mean many others, and the kind says what the keys are.
        *section, name = rng.choice(
            [k for k in keys_in(raw) if len(k[-1]) > 4 or how != "misspelt"]
        )
        inside = raw
        for part in section:
            inside = inside[part]
        if how == "misspelt":
            new = misspelt(name, rng)
            inside[new] = inside.pop(name)
            wanted = rf"unknown key '{'.'.join([*section, new])}'.*did you mean .*'(\w+\.)*{name}'"
        else:
            inside[name] = {"not": "this"} if not isinstance(inside[name], dict) else 3.5
            wanted = name
        with pytest.raises(BadInputError, match=wanted) as caught:
            make_config(raw, (), file)
        assert "\n" not in str(caught.value)
    assert variants == {"central", "silos", "isrl"}


def test_sections_that_are_objects_follow_the_rules_of_the_variant():
    """What is not set has the variant's default, and a key of another variant is refused."""
    raw = {"mechanism": {"kind": "minibatch_sgd"}, "federation": {"silos": 5}}
    assert RunConfig(**raw, privacy=PrivacyConfig(delta=1e-5)).privacy.epsilon == 3.0
    with pytest.raises(ValidationError, match=r"privacy\.noise_multiplier is for data in one"):
        RunConfig(**raw, privacy=PrivacyConfig(epsilon=8.0, noise_multiplier=50.0))
    with pytest.raises(ValidationError, match=r"data\.test_fraction is for data in one place"):
        RunConfig(**raw, data=DataConfig(source="digits", test_fraction=0.3))


@pytest.mark.parametrize("privacy", [{"policy": "minimum"}, {"budgets": {"kind": "pareto"}}])
def test_budgets_of_records_are_refused_where_no_record_has_one(privacy):
    raw = {
        "mechanism": {"kind": "local_item", "sampling_prob": 0.1},
        "federation": {"silos": 4, "rounds": 2, "local_steps": 1},
        "privacy": {"epsilon": 8.0, **privacy},
    }
    with pytest.raises(BadInputError, match=r"privacy\.\w+ is for records with personal budgets"):
        validate_config(raw)
