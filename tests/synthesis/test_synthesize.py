"""From a run to a folder of rows that may be shared: rows, card, guarantee, and what is refused."""

import concurrent.futures
import json
import pathlib
import random
import shutil
import sys

import pyarrow.parquet
import pytest
import yaml

from dpfl_jax import accounting
from dpfl_jax.cli.main import main
from dpfl_jax.config.load import write_yaml
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.synthesis import Settings, histogram, synthesize

SCHEMA = {"categories": {"kind": ["ode", "joke"]}, "ranges": {"age": [18, 65]}}
TEXTS = {"ode": "O wind and water", "joke": "ha, said the dog"}
LABELS = {"ode": 5, "joke": 20}


def rows_of_people():
    draw = random.Random(0)
    for user in range(160):
        for _ in range(draw.randint(1, 4)):
            kind = "ode" if draw.random() < 0.75 else "joke"
            yield {"user": f"u{user}", "kind": kind, "age": draw.randint(20, 60)} | {
                "text": TEXTS[kind]
            }


def train(folder, data, steps=60, more=(), **sections):
    config = {
        "name": "verses",
        "data": {"source": "jsonl", "path": str(folder / "rows.jsonl"), "seq_len": 32} | data,
        "model": {"size": "tiny"},
        "mechanism": {"kind": "uls", "group_size": 1, "cohort_size": 64, "clip_norm": 0.5},
        "privacy": {"noise_multiplier": 0.5, "delta": 1e-4},
        "optimizer": {"learning_rate": 0.01},
        "train": {"steps": steps},
    } | sections
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows_of_people()))
    (folder / "config.yaml").write_text(write_yaml(config))
    given = ["train", str(folder / "config.yaml"), "--run-dir", str(folder / "run")]
    assert main([*given, *more]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on rows of a template, charged to a ledger."""
    folder = tmp_path_factory.mktemp("synthesize")
    privacy = {
        "noise_multiplier": 0.5,
        "delta": 1e-4,
        "ledger": str(folder / "ledger.jsonl"),
        "account": "poets",
        "budget": 1000.0,
    }
    data = {"template": "<kind> | <age> | <text>", **SCHEMA}
    return train(folder, data, privacy=privacy)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


pytestmark = pytest.mark.slow


def test_rows_of_a_template_fit_its_columns_and_are_what_was_asked_for(run, tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    made = synthesize(run, out, labels=LABELS, report=tmp_path / "private")
    rows = read(out)
    assert "NOT TO BE PUBLISHED" in pathlib.Path(made["report"]).read_text()
    assert made["rows"] == len(rows) == 25
    assert made["given_up"] == 0
    assert [row["kind"] for row in rows].count("ode") == 5
    assert all([*row] == ["kind", "age", "text"] and 18 <= row["age"] <= 65 for row in rows)
    # What was learned: a text goes with its kind. By chance none of 25 would be the whole text.
    assert sum(row["text"] == TEXTS[row["kind"]] for row in rows) > 4
    table = tmp_path / "table" / "rows.parquet"
    synthesize(run, table, labels=LABELS, batch_size=7)
    assert pyarrow.parquet.read_table(table).to_pylist() == rows
    assert synthesize(run, tmp_path / "other" / "rows.jsonl", 3, Settings(seed=1))["rows"] == 3


def test_the_folder_has_a_card_and_a_guarantee_that_holds(run, tmp_path, capsys):
    out = tmp_path / "new" / "rows.jsonl"
    made = synthesize(run, out, labels=LABELS)
    assert {path.name for path in out.parent.iterdir()} == {
        "rows.jsonl",
        "README.md",
        "guarantee.json",
    }
    stated = json.loads((run / "guarantee.json").read_text())["privacy"]
    assert made["privacy"]["epsilon"] == stated["epsilon"]
    added = set(made["privacy"]["caveats"]) - set(stated["caveats"])
    assert sorted(added)[0].startswith("how many synthetic rows each label has was given")
    _, head, card = (out.parent / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["configs"] == [
        {"config_name": "default", "data_files": "rows.jsonl"}
    ]
    assert "| kind | ode, joke | ode 20.0%, joke 80.0% |" in card
    assert "differential privacy for each user" in card
    assert main(["verify", str(out.parent)]) == 0
    (out.parent / "README.md").write_text("my own words")  # a card may be edited
    assert main(["verify", str(out.parent)]) == 0
    out.write_text(out.read_text().replace("ode", "Ode"))
    assert main(["verify", str(out.parent)]) == 3
    capsys.readouterr()


def test_a_killed_command_goes_on_to_the_same_rows(run, tmp_path, monkeypatch):
    files = sys.modules[synthesize.__module__]
    whole, out = tmp_path / "whole" / "rows.jsonl", tmp_path / "killed" / "rows.jsonl"
    synthesize(run, whole, labels=LABELS)
    add = files._Partial.add

    def dies(self, text, rows):
        if len(self.read()) == 9:
            raise KeyboardInterrupt
        add(self, text, rows)

    with monkeypatch.context() as patch:
        patch.setattr(files._Partial, "add", dies)
        with pytest.raises(KeyboardInterrupt):
            synthesize(run, out, labels=LABELS, batch_size=4)
    part = out.parent / ".rows.jsonl.part"
    with part.open("a") as file:
        file.write('{"number": 3, "rows"')  # a line that was being written
    with pytest.raises(BadInputError, match="the beginning of other rows"):
        synthesize(run, out, None, Settings(temperature=0.5), labels=LABELS)
    synthesize(run, out, labels=LABELS)
    assert out.read_text() == whole.read_text()
    assert not part.exists()


def test_a_histogram_is_charged_and_is_the_same_ever_after(run, tmp_path, capsys):
    made = [synthesize(run, tmp_path / name / "rows.jsonl", 20, label_epsilon=4.0) for name in "ab"]
    stated = json.loads((run / "guarantee.json").read_text())["privacy"]
    assert stated["epsilon"] < made[0]["privacy"]["epsilon"] < stated["epsilon"] + 4.0
    rows = [read(tmp_path / name / "rows.jsonl") for name in "ab"]
    assert rows[0] == rows[1]
    assert 11 <= [row["kind"] for row in rows[0]].count("ode") <= 18  # 3 of 4
    assert main(["verify", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    ledger = accounting.Ledger(run.parent / "ledger.jsonl")
    (account,) = ledger.accounts()
    assert len(ledger.runs(account)) == 2
    assert ledger.spent(account, 1e-4) > stated["epsilon"] * 1.001
    with pytest.raises(BadInputError, match="has released a histogram at epsilon 4, and a second"):
        synthesize(run, tmp_path / "c" / "rows.jsonl", 20, label_epsilon=2.0)
    # Other data under the same noise would show the difference.
    (run / "label_histogram.json").unlink()
    data = run.parent / "rows.jsonl"
    kept = data.read_text()
    data.write_text(kept.split("\n", 1)[1])
    with pytest.raises(BadInputError, match="are not those that it was trained on"):
        synthesize(run, tmp_path / "d" / "rows.jsonl", 20, label_epsilon=4.0)
    data.write_text(kept)


@pytest.fixture(scope="module")
def without_ledger(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without_ledger")
    return train(folder, {"template": "<kind> | <age> | <text>", **SCHEMA}, steps=30)


@pytest.fixture
def mine(without_ledger, tmp_path):
    """A copy of a run that has released no histogram."""
    return shutil.copytree(without_ledger, tmp_path / "run")


def test_two_commands_at_once_release_one_histogram(mine, tmp_path):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(synthesize, mine, tmp_path / f"{e}" / "rows.jsonl", 4, label_epsilon=e)
            for e in (1.0, 4.0)
        ]
    (error,) = [one.exception() for one in asked if one.exception() is not None]
    assert "has released a histogram at epsilon" in str(error)


def test_nothing_is_charged_for_what_is_refused(mine, tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    with pytest.raises(BadInputError, match="room for 26"):
        synthesize(mine, out, 4, Settings(max_tokens=99), label_epsilon=1.0)
    for report in (mine / "config.yaml", mine / "config.yaml" / "report"):
        with pytest.raises(BadInputError, match="which is no folder"):
            synthesize(mine, out, 4, label_epsilon=1.0, report=report)
    with pytest.raises(BadInputError, match=r"config\.yaml is a file: give another folder"):
        synthesize(mine, mine / "config.yaml" / "new" / "rows.jsonl", 4, label_epsilon=1.0)
    assert not (mine / "label_histogram.json").exists()


def test_other_rows_of_the_same_people_have_other_noise():
    key, words = RootKey.from_seed(0), ("ode", "joke")
    noise = []
    for counts in ([[1, 3]], [[2, 2]]):
        own = histogram.key_of(key, counts)
        sums = histogram.noisy_sums(counts, 1.0, own)
        noise.append([a - n / 4 for a, n in zip(sums, counts[0])])
    assert len(words) == 2
    assert min(abs(a - b) for a, b in zip(*noise)) > 1e-3


def test_a_run_of_somebody_else_runs_no_code(tmp_path, monkeypatch):
    (tmp_path / "owners_of.py").write_text(
        "import pathlib; pathlib.Path('ran').touch()\ndef owner(row): return row['user']"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    data = {"template": "<kind> | <age> | <text>", **SCHEMA, "user_column": "owners_of:owner"}
    run = train(tmp_path, data, steps=2, more=["--allow-code"])
    for asked in ({"report": "private"}, {"label_epsilon": 1.0}):
        pathlib.Path("ran").unlink()
        sys.modules.pop("owners_of")
        with pytest.raises(BadInputError, match="owners_of:owner', code that would be run"):
            synthesize(run, "new/rows.jsonl", 2, **asked)
        assert not pathlib.Path("ran").exists()
        with pytest.raises(BadInputError, match="can be read back"):  # it has learned nothing
            synthesize(run, "new/rows.jsonl", 2, **asked, allow_code=True)
        shutil.rmtree("new")
        assert pathlib.Path("ran").exists()


@pytest.mark.parametrize("place", ["new", "new/private", "new/.private"])
def test_a_report_never_lies_in_the_folder_that_is_published(run, tmp_path, place):
    out = tmp_path / "new" / "rows.jsonl"
    with pytest.raises(BadInputError, match="a folder that is to be published"):
        synthesize(run, out, 2, report=tmp_path / place)
    synthesize(run, out, 2, report=tmp_path / "private")
    shutil.copytree(tmp_path / "private", out.parent / ".private")
    assert main(["verify", str(out.parent)]) == 3


@pytest.mark.parametrize(
    "line",
    [
        '{"number": 99, "rows": [], "redraws": 0, "tokens": 1}',
        '{"number": 1, "rows": [{"kind": "SECRET", "age": 20, "text": "x"}], '
        '"redraws": 0, "tokens": 1}',
        '{"number": 1, "rows": [{"kind": "ode", "age": 1, "text": "x"}], '
        '"redraws": 0, "tokens": 1}',
        '{"number": 1, "rows": 3, "redraws": 0, "tokens": 1}',
        '{"number": 1, "rows": [{"kind": "ode", "age": "30", "text": "x"}], '
        '"redraws": 0, "tokens": 1}',
        '{"number": 1, "rows": [{"kind": "ode", "age": 30, "text": ["x"]}], '
        '"redraws": 0, "tokens": 1}',
        '{"number": 1, "rows": [{"kind": "ode", "age": 30, "text": "\\ud800"}], '
        '"redraws": 0, "tokens": 1}',
        '{"number": 1, "rows": [], "redraws": Infinity, "tokens": 1}',
        "[" * 100_000,
        '{"number": 1}',
        "[]",
        "null",
        "garbage",
    ],
)
def test_a_damaged_beginning_is_one_sentence(run, tmp_path, monkeypatch, line):
    out = tmp_path / "new" / "rows.jsonl"
    begun(monkeypatch, run, out)
    with (out.parent / ".rows.jsonl.part").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BadInputError, match="holds what this command does not write"):
        synthesize(run, out, labels=LABELS)
    assert not out.exists()


def begun(monkeypatch, run, out, after="_write_rows"):
    """A command that dies before a function of it."""
    files = sys.modules[synthesize.__module__]
    with monkeypatch.context() as patch:
        patch.delattr(files, after)
        with pytest.raises(NameError):
            synthesize(run, out, labels=LABELS)


def test_a_command_that_was_killed_while_it_wrote_a_file_goes_on(run, tmp_path, monkeypatch):
    out = tmp_path / "new" / "rows.jsonl"
    begun(monkeypatch, run, out, "card")
    for name in ("rows.jsonl", "README.md", "guarantee.json"):
        (out.parent / f".{name}.123.tmp").write_text("half")
    (out.parent / "guarantee.json").write_text("{}")  # and before the part was removed
    synthesize(run, out, labels=LABELS)
    found = {path.name for path in out.parent.iterdir()}
    assert found == {"rows.jsonl", "README.md", "guarantee.json"}
    assert main(["verify", str(out.parent)]) == 0


def test_a_command_that_was_killed_in_its_report_repeats_it(run, tmp_path, monkeypatch):
    out, report = tmp_path / "new" / "rows[1].jsonl", tmp_path / "private"
    files = sys.modules[synthesize.__module__]
    with monkeypatch.context() as patch:
        patch.delattr(files, "write_report")
        with pytest.raises(NameError):
            synthesize(run, out, labels=LABELS, report=report)
    (out.parent / ".rows[1].jsonl.1.tmp").write_text("half")
    synthesize(run, out, labels=LABELS, report=report)
    assert "NOT TO BE PUBLISHED" in (report / "NOT_TO_BE_PUBLISHED.md").read_text()
    assert len([*out.parent.iterdir()]) == 3
    with pytest.raises(BadInputError, match="a folder that is to be published"):
        synthesize(run, tmp_path / "b" / "rows.jsonl", 2, report=out.parent / "deep" / "report")


def test_a_histogram_is_added_to_a_ledger_that_knows_the_run(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "label_histogram.json").unlink(missing_ok=True)
    ledger = run.parent / "ledger.jsonl"
    kept = ledger.read_bytes()
    ledger.unlink()
    try:
        with pytest.raises(BadInputError, match="does not hold what the run itself has spent"):
            synthesize(tmp_path / "run", tmp_path / "new" / "rows.jsonl", 4, label_epsilon=4.0)
    finally:
        ledger.write_bytes(kept)


def test_labels_of_a_histogram_stay_its_own(mine, tmp_path, monkeypatch):
    """Its numbers, given with --label to resume, are not numbers known without the data."""
    out = tmp_path / "new" / "rows.jsonl"
    files = sys.modules[synthesize.__module__]
    with monkeypatch.context() as patch:
        patch.delattr(files, "_write_rows")
        with pytest.raises(NameError):
            synthesize(mine, out, 8, label_epsilon=4.0)
    known = json.loads((out.parent / ".rows.jsonl.part").read_text().split("\n")[0])
    with pytest.raises(BadInputError, match="the beginning of other rows"):
        synthesize(mine, out, labels=known["labels"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "the number of rows (--rows) is 0, but it must be"),
        ([], "it is not said how many rows to write: give --rows, or --label"),
        (["--label", "ode"], "--label is 'ode': write WORD=NUMBER"),
        (["--label", "ode=-1"], "--label is 'ode=-1': write WORD=NUMBER"),
        (["--label", "ode=1", "--label", "ode=2"], "--label names 'ode' twice"),
        (["--label", "odd=3"], "'odd', which is none of the words of 'kind': did you mean 'ode'?"),
        (["--label", "ode=3", "--rows", "4"], "--rows is 4, but the numbers of --label sum to 3"),
        (["--label", "ode=3", "--label-epsilon", "1"], "both --label and --label-epsilon"),
        (["--rows", "4", "--label-epsilon", "0"], "(--label-epsilon) is 0.0, but it must be"),
        (["--rows", "4", "--prompts", "x.jsonl"], "--prompts is for models of answers"),
        (["--rows", "4", "--top-p", "2"], "top_p is 2.0, but it must be"),
        (["--rows", "4", "--batch-size", "0"], "the batch size is 0"),
        (["--rows", "4", "--seed", "-1"], "the seed is -1"),
        (
            ["--rows", "4", "--max-tokens", "99"],
            "room for 32, but a row may have 99",
        ),
        (["--rows", "4", "--out", "new/rows.csv"], "give a new file, NAME.jsonl or NAME.parquet"),
        (["--rows", "4", "--out", "full/rows.jsonl"], "already holds 'notes.txt'"),
        (["--rows", "4", "--out", "new/a`b.jsonl"], "give a name of visible letters"),
        (["--rows", "4", "--out", "new/a\nb.jsonl"], "give a name of visible letters"),
        (["--rows", "4", "--temperature", "inf"], "the temperature is inf"),
        (["--rows", "4", "--report", "new"], "--report is new, a folder that is to be published"),
    ],
)
def test_bad_options_are_one_sentence(options, message, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("full").mkdir()
    pathlib.Path("full/notes.txt").write_text("mine")
    given = options if "--out" in options else [*options, "--out", "new/rows.jsonl"]
    assert main(["synthesize", str(run), *given]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "new" / "rows.jsonl").exists()


def test_several_rows_of_one_person(tmp_path):
    data = {"template": "<kind>;<age>", **SCHEMA, "rows_per_text": 3}
    trainer = {"mechanism": {"kind": "none", "batch_size": 64}, "privacy": {}, "seed": 0}
    run = train(tmp_path, data, **trainer)
    made = synthesize(run, tmp_path / "new" / "rows.jsonl", 12)
    rows = read(tmp_path / "new" / "rows.jsonl")
    persons = [row["person"] for row in rows]
    assert persons == sorted(persons)
    assert len({*persons}) == 12
    assert max(map(persons.count, persons)) in (2, 3)
    assert "NO differential-privacy guarantee" in made["guarantee"]
    card = (tmp_path / "new" / "README.md").read_text()
    assert "trained WITHOUT privacy" in card
    with pytest.raises(BadInputError, match="has no guarantee that a histogram could be a part of"):
        synthesize(run, tmp_path / "other" / "rows.jsonl", 12, label_epsilon=4.0)


def test_answers_follow_public_prompts(tmp_path):
    data = {"prompt_column": "kind", "completion_column": "text"}
    run = train(tmp_path, data, steps=2)
    public = tmp_path / "public.jsonl"
    public.write_text('{"kind": "a limerick: "}\n{"kind": "an epic: "}\n')
    made = synthesize(run, tmp_path / "new" / "rows.jsonl", 3, prompts=public)
    rows = read(tmp_path / "new" / "rows.jsonl")
    assert [row["kind"] for row in rows] == ["a limerick: ", "an epic: ", "a limerick: "]
    assert all([*row] == ["kind", "text"] for row in rows)
    assert any("prompts that synthetic answers follow" in c for c in made["privacy"]["caveats"])
    with pytest.raises(BadInputError, match="learned answers alone"):
        synthesize(run, tmp_path / "other" / "rows.jsonl", 3)
    with pytest.raises(BadInputError, match="which the model was trained on"):
        synthesize(run, tmp_path / "other" / "rows.jsonl", 3, prompts=tmp_path / "rows.jsonl")
    report = run / "report.json"
    report.write_text(report.read_text().replace('"finished"', '"interrupted"'))
    with pytest.raises(BadInputError, match="is not finished: resume it"):
        synthesize(run, tmp_path / "other" / "rows.jsonl", 3, prompts=public)
