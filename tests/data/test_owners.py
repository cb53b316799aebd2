"""Records with several owners: one store from every door, and refused where one owner is needed."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.data import UserView, split_by_user
from dpfl_jax.data.build import write_store
from dpfl_jax.data.owners import BoundedStore, SharedStore, grouped_by_owner_set, owner_ids
from dpfl_jax.data.shards import Manifest, open_store
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Calibrated, Population
from dpfl_jax.training.canaries import check_fit
from tests.noised import noised

MAILS = [
    (["ann", "bob"], "Dear Bob, how are you?"),
    (["bob", "ann", "ann"], "Well, thank you."),
    (["cat"], "Note to myself"),
    (["ann", "cat", "dan"], "Meeting at nine"),
]
ROWS = [{"authors": owners, "body": text} for owners, text in MAILS]


@pytest.fixture
def files(tmp_path):
    jsonl, parquet = tmp_path / "mails.jsonl", tmp_path / "mails.parquet"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), parquet)
    return jsonl, parquet


def build(path, out, *more):
    given = ["--input", str(path), "--user-column", "authors", "--text-column", "body"]
    return main(["data", "build", *given, "--out", str(out), "--workers", "1", *more])


def test_one_store_from_every_door(files, tmp_path, capsys):
    whole = dpfl.from_texts(MAILS)
    assert isinstance(whole, SharedStore)
    # Of several owners nobody is first, and nobody counts twice.
    assert sorted(whole.user_ids(range(whole.num_users))) == ["ann", "bob", "cat", "dan"]
    assert sorted(zip(whole.user_ids(range(4)), whole.examples_per_owner.tolist())) == [
        ("ann", 3), ("bob", 2), ("cat", 2), ("dan", 1)
    ]  # fmt: skip
    assert (whole.num_examples, whole.most_owners) == (4, 3)
    frame = pd.DataFrame(ROWS)
    arrays = whole.read(np.arange(4))
    owners = [name.split("\x1f") for name in grouped_by_owner_set(whole).user_ids(range(3))]
    sizes = np.diff(grouped_by_owner_set(whole).user_offsets)
    repeated = [some for some, size in zip(owners, sizes) for _ in range(size)]
    made = [
        dpfl.from_pandas(frame, user="authors", text="body"),
        dpfl.from_rows(ROWS, user="authors", text="body"),
        dpfl.from_rows(
            [row | {"authors": [a.upper() for a in row["authors"]]} for row in ROWS],
            user="lower(authors)", text="body",
        ),
        dpfl.from_arrays(arrays, repeated, "bytes"),
    ]  # fmt: skip
    for path in files:
        out = tmp_path / f"store of {path.suffix[1:]}"
        assert build(path, out, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["users"], told["examples"], told["most_owners"]) == (4, 4, 3)
        made.append(open_store(out))
        assert main(["data", "inspect", str(out), "--verify"]) == 0
        assert "4 users, 4 examples of up to 3 owners" in " ".join(capsys.readouterr().out.split())
        config = dpfl.DataConfig(
            source=path.suffix[1:], path=str(path), user_column="authors", text_column="body",
            validation_fraction=0.0, test_fraction=0.0,
        )  # fmt: skip
        made.append(dpfl.load_dataset(config).train)
    write_store(whole, tmp_path / "saved")
    made.append(open_store(tmp_path / "saved"))
    assert {store.fingerprint for store in made} == {whole.fingerprint}
    assert all(isinstance(store, SharedStore) for store in made)


def test_one_owner_each_is_todays_store_to_the_last_bit(tmp_path):
    """A list of one is that one."""
    single = [(owners[0], text) for owners, text in MAILS]
    plain = dpfl.from_texts(single)
    assert isinstance(plain, dpfl.ArrayStore)
    listed = dpfl.from_texts([([name], text) for name, text in single])
    assert isinstance(listed, dpfl.ArrayStore)
    assert listed.fingerprint == plain.fingerprint
    write_store(plain, tmp_path / "plain")
    write_store(dpfl.from_texts(MAILS), tmp_path / "shared")
    assert Manifest.read(tmp_path / "plain").shared is False
    assert Manifest.read(tmp_path / "shared").shared is True


def test_what_treats_records_as_one_users_is_refused(files, tmp_path, capsys):
    whole = dpfl.from_texts(MAILS)
    for name in ("user_offsets", "examples_per_user"):
        with pytest.raises(BadInputError, match=r"several owners.*mechanism\.kind=els"):
            getattr(whole, name)
    bounded = whole.bounded(2)
    for mechanism in (dpfl.uls, dpfl.allocation, dpfl.bandmf):
        for data in (
            whole,
            bounded,
            grouped_by_owner_set(whole),
            UserView(grouped_by_owner_set(whole), np.arange(2)),
        ):
            with pytest.raises(BadInputError, match=r"several owners, which this mechanism"):
                mechanism(group_size=1, cohort_size=1).plan(data, steps=2, epsilon=8.0, delta=1e-3)
    with pytest.raises(BadInputError, match=r"every record of the data has one: use mech.*=uls"):
        dpfl.owner_sets(group_size=1, cohort_size=1, sets_per_user=1).plan(
            dpfl.from_texts([("ann", "Hello")]), steps=2, epsilon=8.0, delta=1e-3
        )
    assert build(files[0], tmp_path / "first", "--max-examples-per-user", "1") == 2
    assert "first records are not defined: leave out max_examples" in " ".join(
        capsys.readouterr().err.split()
    )
    common = {"source": "jsonl", "path": str(files[0]), "user_column": "authors"}
    common |= {"text_column": "body", "validation_fraction": 0.0, "test_fraction": 0.0}
    for setting in ({"max_users": 1}, {"max_examples_per_user": 1}, {"records_per_user": 2}):
        with pytest.raises(BadInputError, match=f"leave out data.{next(iter(setting))}"):
            dpfl.load_dataset(dpfl.DataConfig(**common, **setting))
    with pytest.raises(BadInputError, match=r"set data\.split=by_user"):
        dpfl.load_dataset(dpfl.DataConfig(**common, split="within_user"))
    with pytest.raises(BadInputError, match="a list where one name is needed"):
        dpfl.from_rows(ROWS, user="{authors}/x", text="body")


def test_canaries_and_a_choice_by_people_who_are_trained_on_are_refused():
    whole = dpfl.from_texts(MAILS)
    els = dpfl.els(group_size=1, batch_size=1)
    with pytest.raises(BadInputError, match="several owners: remove the section audit"):
        check_fit(noised(els, 1.0), whole.bounded(1), dpfl.AuditConfig(canaries=100))
    # Ann is trained on with Bob, and would choose with Cat and Dan.
    train = dpfl.from_texts(MAILS[:2])
    held_out = dpfl.from_texts(MAILS[3:])
    plan = els.plan(train, steps=1, noise_multiplier=1.0, delta=1e-3)
    assert owner_ids(plan.data) & owner_ids(held_out) == {"ann"}
    with pytest.raises(BadInputError, match="1 users of validation are trained on, too"):
        dpfl.fit(
            lambda params, example: jnp.sum(params["w"]) * 0.0,
            {"w": jnp.zeros(1)}, plan, optax.sgd(0.1),
            validation=held_out, loop=dpfl.LoopConfig(keep_best=True, eval_every=1),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("owners", "words"),
    [
        ([], "row 0: the list of owners is empty"),
        (["ann", None], "a user id is None"),
        (["ann", ["bob"]], "a list where one name is needed"),
        (["ann", "b\x1fob"], r"U\+001F"),
        ("b\x1fob", r"U\+001F"),
        (["ann", 1.0], "floating-point"),
    ],
)
def test_bad_owners_are_one_sentence(owners, words):
    with pytest.raises(BadInputError, match=words):
        dpfl.from_rows([{"to": owners, "body": "Hi"}], user="to", text="body")


def test_a_name_with_the_separator_never_makes_a_set_of_strangers():
    with pytest.raises(BadInputError, match=r"U\+001F"):
        dpfl.ArrayStore.from_users([("ann\x1fbob", {"x": np.zeros((1, 2))})])


def test_a_split_leaves_out_what_lies_on_both_sides():
    rng = np.random.default_rng(0)
    names = [f"p{i:02d}" for i in range(40)]
    mails = [(rng.choice(names, rng.integers(1, 4), replace=False), "Hello") for _ in range(300)]
    whole = dpfl.from_texts([(list(owners), text) for owners, text in mails])
    parts = split_by_user(whole, {"validation": 0.3}, seed=1)
    train, validation = owner_ids(parts["train"]), owner_ids(parts["validation"])
    assert train & validation == set()
    assert parts["train"].num_examples + parts["validation"].num_examples < 300
    for owners, _ in mails:  # every record of owner_ids who are all on one side is there
        assert (set(owners) <= train) + (set(owners) <= validation) <= 1
    one_sided = sum(set(owners) <= train or set(owners) <= validation for owners, _ in mails)
    assert sum(part.num_examples for part in parts.values()) == one_sided


def test_the_statistics_count_what_is_left_out():
    bounded = dpfl.from_texts(MAILS).bounded(1)
    assert isinstance(bounded, BoundedStore)
    found = bounded.bounding
    # Cat's note is first; then one of the two mails of Ann and Bob. Dan is left without.
    assert (found.examples, found.examples_kept) == (4, 2)
    assert (found.users, found.users_left_out) == (4, 1)
    assert found.by_owners == {1: (1, 1), 2: (1, 2), 3: (0, 1)}
    kept = bounded.read(np.arange(2))
    assert found.tokens_kept == kept["mask"].sum()
    whole = dpfl.from_texts(MAILS)
    assert found.tokens == whole.read(np.arange(4))["mask"].sum()
    assert str(found).startswith("contribution bounding at 1: kept 2 of 4 records, ")
    assert str(found).endswith("1 of 4 users are left without any")
    json.dumps(found.to_json())
    assert whole.bounded(3).bounding.examples_kept == 4
    assert whole.bounded(1).fingerprint != whole.bounded(2).fingerprint


def test_a_table_of_shared_rows(tmp_path):
    rows = [
        {"authors": [f"p{i}", f"p{(i + 1) % 5}"], "a": i / 5, "b": float(i % 2)} for i in range(5)
    ]
    file = tmp_path / "table.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = dpfl.DataConfig(
        source="jsonl", path=str(file), user_column="authors", target_column="b",
        input_columns=("a",), validation_fraction=0.0, test_fraction=0.0,
    )  # fmt: skip
    train = dpfl.load_dataset(config).train
    assert isinstance(train, SharedStore)
    assert (train.num_users, train.num_examples) == (5, 5)
    made = dpfl.from_pandas(pd.DataFrame(rows), user="authors", target="b", inputs=["a"])
    assert made.fingerprint == train.fingerprint


def test_a_bounded_part_on_disk_is_no_store_of_people(tmp_path):
    """Who owns what decided what is kept, also where each record that is left has one owner."""
    rows = np.arange(40.0)[:, None]
    owners = [["a"]] * 6 + [["b"]] * 6 + [["a", "b"]] * 4 + [["c"]] * 6 + ["d"] * 18
    part = dpfl.from_arrays({"x": rows}, owners).bounded(2)
    assert not any("\x1f" in name for name in part.user_ids(range(part.num_users)))
    write_store(part, tmp_path / "part", format="arrow")
    again = open_store(tmp_path / "part")
    assert isinstance(again, SharedStore)
    mechanism = dpfl.uls(group_size=1, cohort_size=2)
    for data in (part, again):
        with pytest.raises(BadInputError, match="several owners"):
            mechanism.plan(data, steps=3, noise_multiplier=1.0, delta=1e-3)


def test_names_of_sets_are_seen_by_the_constructor():
    sets = grouped_by_owner_set(dpfl.from_texts(MAILS))
    names, offsets = sets.user_ids(range(sets.num_users)), np.asarray(sets.user_offsets)
    again = dpfl.ArrayStore(sets.schema, names, offsets, sets.records(np.arange(sets.num_examples)))
    with pytest.raises(BadInputError, match="several owners"):
        dpfl.uls(group_size=1, cohort_size=1).plan(again, steps=1, noise_multiplier=1.0, delta=0.1)


def test_a_shared_population_has_no_guarantee_of_single_users():
    shared = Population(num_users=30, num_examples=90, num_units=30, shared=True)
    mechanism = dpfl.uls(group_size=1, cohort_size=3)
    with pytest.raises(BadInputError, match=r"several owners, of whom mechanism\.kind=uls"):
        Calibrated(mechanism, 1.0, shared, 3, 1e-3).guarantee()
    with pytest.raises(BadInputError, match=r"several owners, of whom mechanism\.kind=uls"):
        mechanism.calibrate(shared, 3, epsilon=1.0, delta=1e-3)
    els = dpfl.els(group_size=2, batch_size=3)
    assert "co-owns" in Calibrated(els, 1.0, shared, 3, 1e-3).guarantee().adjacency
