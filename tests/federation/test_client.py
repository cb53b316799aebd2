"""A client of somebody else's federation: what it sends, what it counts, and what it refuses."""

import json
import os
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import statement
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation import PrivateClient
from dpfl_jax.randomness import RootKey
from tests.statements import SOUND

BUDGET = {"epsilon": 8.0, "delta": 1e-5, "rounds": 3, "clip_norm": 0.5}
UPDATE = {"w": np.full((4, 2), 3.0), "b": np.zeros(2, np.float32)}


def client(folder, **changed):
    return PrivateClient(folder / "dp", **{**BUDGET, **changed})


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))


def test_noise_is_that_of_the_budget_and_new_every_time(tmp_path):
    one, zero = client(tmp_path), np.zeros(40_000, np.float32)
    first, second = (one.release(zero, request=f"round {i}") for i in range(2))
    stddev = one.guarantee.noise_multiplier * BUDGET["clip_norm"]
    for sent in (first, second, (first - second) / np.sqrt(2)):
        assert stats.kstest(sent / stddev, "norm").pvalue > 1e-6
    event = accounting.events.gaussian(one.guarantee.noise_multiplier, 3)
    assert accounting.epsilon(event, 1e-5, relation=accounting.REPLACE) <= 8.0
    # Replacing moves the sum by 2C: as the mechanism's textbook curve says for mu = 2 / sigma.
    mu = 2.0 / one.guarantee.noise_multiplier * np.sqrt(3)
    curve = stats.norm.cdf(mu / 2 - 8 / mu) - np.exp(8) * stats.norm.cdf(-mu / 2 - 8 / mu)
    assert 0.99e-5 < curve <= 1e-5


@pytest.mark.parametrize(
    ("update", "becomes"),
    [
        ([3.0, 4.0], 0.5),
        ([1e-3, 0.0], 1e-3),
        ([1e150, -1e150], 0.5),
        ([1e308, 1e308], 0.0),
        ([np.nan, 1.0], 0.0),
        ([np.inf, -np.inf], 0.0),
        ([1e-320, 0.0], 0.0),
        (np.array([250.0, 250.0], np.float16), 0.5),
        (np.array([3e38, 3e38], np.float32), 0.5),
        (np.array([3.0, 4.0], ml_dtypes.bfloat16), 0.5),
    ],
    ids=str,
)
def test_whatever_the_data_an_update_moves_what_is_sent_by_the_clip_norm(
    tmp_path, monkeypatch, update, becomes
):
    """Under one noise, what is sent of neighbours differs by their clipped updates."""
    monkeypatch.setattr(RootKey, "generate", classmethod(lambda cls: cls.from_seed(0)))
    pair = [np.asarray(update), np.zeros(2)], [np.zeros(2), np.zeros(2)]
    # As little noise as there may be, so that float32 shows the difference.
    sent = [
        client(tmp_path / str(i), epsilon=500.0, rounds=1).release(one, "a")
        for i, one in enumerate(pair)
    ]
    moved = norm(jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, *sent))
    assert moved == pytest.approx(becomes, abs=1e-5)
    assert moved <= BUDGET["clip_norm"] + 1e-5


def test_the_norm_is_over_all_arrays_and_never_rounded_up(tmp_path):
    from dpfl_jax.federation.client import clipped

    rng = np.random.default_rng(0)
    for scale in (1e-30, 1.0, 1e30):
        leaves = [rng.normal(size=shape) * scale for shape in [(), (7,), (300, 10)]]
        for clip in (1e-12, 0.3, 1e12):
            done = clipped(leaves, clip)
            assert norm(done) <= clip
            if norm(leaves) > clip:
                assert norm(done) > 0.99999 * clip


def test_a_retry_gets_the_same_and_costs_nothing(tmp_path):
    first = client(tmp_path).release(UPDATE, "round 1")
    again = client(tmp_path)  # as after a restart
    for other in (UPDATE, jax.tree.map(lambda x: x + 100, UPDATE)):
        np.testing.assert_array_equal(again.release(other, "round 1")["w"], first["w"])
    assert again.rounds_left == 2
    assert not np.array_equal(again.release(UPDATE, "round 2")["w"], first["w"])
    # Only the last answer is kept: an older request is a new one, with new noise, and is charged.
    assert not np.array_equal(again.release(UPDATE, "round 1")["w"], first["w"])
    assert again.rounds_left == 0


def test_a_round_beyond_the_budget_is_refused_in_a_sentence(tmp_path):
    one = client(tmp_path)
    for i in range(3):
        one.release(UPDATE, f"round {i}")
    for again in (one, client(tmp_path)):
        with pytest.raises(accounting.BudgetExceededError, match="the 3 updates of its budget"):
            again.release(UPDATE, "round 3")
    assert len((tmp_path / "dp/rounds.jsonl").read_text().splitlines()) == 3
    one.release(UPDATE, "round 2")  # what was sent may be sent again


def test_a_crash_costs_a_round_and_nothing_was_sent(tmp_path, monkeypatch):
    one = client(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("dpfl_jax.federation.client.write_atomically", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one.release(UPDATE, "round 1")
    assert client(tmp_path).rounds_left == 2
    with (tmp_path / "dp/rounds.jsonl").open("ab") as file:
        file.write(b'{"time"')  # a line that a crash cut off
    assert client(tmp_path).rounds_left == 1
    client(tmp_path).release(UPDATE, "round 1")
    assert client(tmp_path).rounds_left == 0


@pytest.mark.parametrize(("requests", "rounds"), [(8, 3), (2, 2)])
def test_clients_at_once_spend_no_more_than_the_budget(tmp_path, requests, rounds):
    """Each request is counted once, and has one answer."""
    made = [client(tmp_path) for _ in range(8)]
    sent, refused = [], []

    def work(one, i):
        try:
            sent.append(one.release(UPDATE, f"round {i // (8 // requests)}"))
        except accounting.BudgetExceededError:
            refused.append(i)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(made, range(8))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert client(tmp_path).rounds_left == 3 - rounds
    assert len({one["w"].tobytes() for one in sent}) == rounds
    assert len(sent) + len(refused) == 8


@pytest.mark.parametrize(
    "changed",
    [{"epsilon": 9.0}, {"delta": 1e-4}, {"rounds": 4}, {"clip_norm": 1.0}, {"unit": "device"}],
    ids=str,
)
def test_a_budget_does_not_change(tmp_path, changed):
    client(tmp_path)
    with pytest.raises(BadInputError, match=f"was begun with {next(iter(changed))}="):
        client(tmp_path, **changed)
    client(tmp_path)


def test_a_folder_of_another_run_is_left_alone(tmp_path):
    (tmp_path / "dp").mkdir()
    (tmp_path / "dp/guarantee.json").write_text(SOUND["uls"]().dumps())
    with pytest.raises(BadInputError, match="guarantee of something else"):
        client(tmp_path)
    assert [path.name for path in (tmp_path / "dp").iterdir()] == ["guarantee.json"]


def test_a_folder_that_misses_a_file_sends_nothing(tmp_path):
    one = client(tmp_path)
    one.release(UPDATE, "round 1")
    for name in ("ledger.jsonl", "rounds.jsonl"):
        path = tmp_path / "dp" / name
        kept = path.read_bytes()
        path.unlink()
        with pytest.raises(BadInputError, match=f"{name} is missing"):
            client(tmp_path)
        path.write_bytes(kept)
    folder = tmp_path / "dp"
    kept = {path: path.read_bytes() for path in folder.glob("*.jsonl")}
    for path in kept:
        path.unlink()
    with pytest.raises(BadInputError, match="is missing"):
        client(tmp_path)
    for path, content in kept.items():
        path.write_bytes(content)
    (folder / "rounds.jsonl").write_text("")  # as some rotate logs
    with pytest.raises(BadInputError, match="has lost lines"):
        client(tmp_path)
    (folder / "rounds.jsonl").write_bytes(kept[folder / "rounds.jsonl"])
    (tmp_path / "dp/guarantee.json").unlink()
    with pytest.raises(BadInputError, match="already reserved a different event"):
        client(tmp_path, epsilon=80.0)
    assert client(tmp_path).rounds_left == 2
    assert os.stat(tmp_path / "dp").st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": 2.5}, "rounds is 2.5"),
        ({"clip_norm": 1e-20}, "clip_norm is 1e-20"),
        ({"clip_norm": np.nan}, "clip_norm is nan"),
        ({"unit": None}, "unit is 'None'"),
        ({"unit": "patient"}, "unit is 'patient', but it must be one of silo, device"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(tmp_path, changed, words):
    with pytest.raises(BadInputError, match=words):
        client(tmp_path, **changed)
    assert not (tmp_path / "dp").exists()


@pytest.mark.parametrize("update", [{}, {"n": np.arange(3)}, {"z": np.ones(2, complex)}], ids=str)
def test_what_is_no_floating_point_number_is_not_sent(tmp_path, update):
    one = client(tmp_path)
    with pytest.raises(BadInputError, match="arrays of floating-point numbers"):
        one.release(update, "round 1")
    assert one.rounds_left == 3


def test_a_request_has_one_shape(tmp_path):
    one = client(tmp_path)
    one.release(UPDATE, "round 1")
    with pytest.raises(BadInputError, match="'round 1' was answered with arrays of other shapes"):
        one.release({"w": np.zeros(3)}, "round 1")


def test_its_guarantee_is_verified_and_says_who_is_protected(tmp_path, capsys):
    client(tmp_path, unit="device")
    stated = statement.read(tmp_path / "dp/guarantee.json")
    privacy = stated.privacy
    assert (privacy.unit, privacy.trust, privacy.steps) == ("device", "local", 3)
    assert privacy.adjacency == "replace one device: all of its data, by any other data"
    assert main(["verify", str(tmp_path / "dp"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["holds"]
    # A smaller epsilon, or another number of rounds, is seen.
    for forge in (
        lambda v: v["privacy"].update(epsilon=1.0),
        lambda v: v["basis"].update(rounds=30),
        lambda v: v["basis"].update(unit="silo"),
        lambda v: v["basis"].update(epsilon=0.5),
        lambda v: v["privacy"].update(unit_key="one visit of a patient"),
        lambda v: v["privacy"].update(public_inputs=[]),
    ):
        values = stated.to_json()
        forge(values)
        (tmp_path / "forged.json").write_text(json.dumps(values))
        assert main(["verify", str(tmp_path / "forged.json")]) == 3
