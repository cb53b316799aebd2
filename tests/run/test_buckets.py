"""Runs, stores, ledgers and exports in buckets: an S3 server of moto, and one like Google's."""

import collections
import concurrent.futures
import contextlib
import json
import logging
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import threading
import time

import chex
import google_storage
import numpy as np
import pytest
import yaml
from runs import death_after_a_checkpoint

import dpfl_jax as dpfl
from benchmarks.data import heavy_tailed_counts
from benchmarks.packing import reads
from dpfl_jax import buckets
from dpfl_jax.accounting import Account, BudgetExceededError, Ledger, events
from dpfl_jax.cli.main import main
from dpfl_jax.data import ArrayStore, Schema, cached, shards
from dpfl_jax.data.build import write_store
from dpfl_jax.errors import BadInputError, UnreachableError
from dpfl_jax.mechanisms import uls
from dpfl_jax.run.checkpoint import released
from dpfl_jax.run.directory import RELEASED_STEPS, RunDirectory

AMAZON = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="session")
def gs():
    server = google_storage.Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield google_storage.environment(server.server_port)
    server.shutdown()


@pytest.fixture(scope="session")
def s3():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = pytest.importorskip("moto.server")
    started = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    yield {**AMAZON, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{started.get_host_and_port()[1]}"}
    started.stop()


@pytest.fixture(params=["gs", pytest.param("s3", marks=pytest.mark.slow)])
def bucket(request, tmp_path, monkeypatch):
    """The address of an empty folder in a bucket; caches are in the test's folder."""
    for name, value in request.getfixturevalue(request.param).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DPFL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("fsspec.config.conf", {"gcs": {"token": "anon"}})
    pytest.importorskip({"gs": "gcsfs", "s3": "s3fs"}[request.param])
    client = buckets._client(f"{request.param}://bucket")
    if request.param == "s3" and not client.exists("bucket"):
        client.mkdir("bucket")
    yield f"{request.param}://bucket/{tmp_path.name}"
    buckets._COPIES.clear()


def names(where):
    return sorted(buckets.sizes(where))


def people(users=40):
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(users), rng.integers(1, 9, users))
    return dpfl.from_arrays({"x": rng.normal(size=(len(owners), 3)).astype("float32")}, owners)


# ---- files ------------------------------------------------------------------------------------


def test_an_object_is_replaced_only_if_it_is_what_was_read(bucket):
    where = f"{bucket}/a"
    first = buckets._replace(where, b"1", None)
    with pytest.raises(buckets.ConflictError):
        buckets._replace(where, b"2", None)
    second = buckets._replace(where, b"2", first)
    with pytest.raises(buckets.ConflictError):
        buckets._replace(where, b"3", first)
    assert buckets._read(where) == (b"2", second)
    assert buckets._replace(where, b"2", first) == second  # the answer to the first try was lost
    with pytest.raises(BadInputError, match=r"there is no bucket .*no-such-bucket"):
        buckets._replace(f"{bucket[:5]}no-such-bucket/a", b"1", None)


def test_a_server_that_ignores_conditions_is_refused(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "_CONDITIONAL", set())
    real = buckets._put

    def careless(where, content, version):
        try:
            return real(where, content, version)
        except buckets.ConflictError:
            return real(where, content, buckets._read(where)[1])

    monkeypatch.setattr(buckets, "_put", careless)
    ledger = Ledger(f"{bucket}/ledger.jsonl")
    with pytest.raises(BadInputError, match="although a condition does not hold"):
        ledger.reserve(Account("people"), "run", events.uls(1.0, 0.01, steps=10), delta=1e-5)


def test_an_object_cannot_lead_out_of_its_folder(bucket, tmp_path):
    for name in (f"{tmp_path}/outside", "a/../../outside"):
        where = f"{bucket}/run"
        version = buckets._replace(f"{where}/{name}", b"1", None)
        assert version
        with pytest.raises(BadInputError, match="lead out of its folder"):
            buckets.folder(where)
        buckets._client(where).rm_file("/".join(buckets._parts(f"{where}/{name}")))
    assert not (tmp_path / "outside").exists()


def test_what_two_write_is_not_overwritten(bucket):
    mine = buckets.folder(f"{bucket}/run")
    mine.mkdir()
    (mine / "a").write_text("mine")
    buckets.publish(mine)
    theirs = buckets._Copy(f"{bucket}/run")
    theirs.fetch()
    (theirs.folder / "a").write_text("theirs")
    theirs.publish(theirs.folder)
    (mine / "a").write_text("mine again")
    with pytest.raises(BadInputError, match="was changed by somebody else"):
        buckets.publish(mine)
    assert buckets.content(f"{bucket}/run/a") == b"theirs"


def test_files_that_complete_a_folder_come_last(bucket, monkeypatch):
    copy, written = buckets.folder(f"{bucket}/run"), []
    copy.mkdir()
    for name in ("report.json", "b", "a"):
        (copy / name).write_text(name)
        time.sleep(0.01)
    real = buckets._replace
    monkeypatch.setattr(
        buckets, "_replace", lambda at, *rest: written.append(at) or real(at, *rest)
    )
    buckets.publish(copy)
    assert [at.rpartition("/")[2] for at in written] == ["b", "a", "report.json"]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(buckets, "PATIENCE_S", 3.0)
    monkeypatch.setattr(buckets, "_REACHED", set())


def test_a_bucket_that_is_gone_for_a_while_is_waited_for(bucket, impatient):
    buckets._replace(f"{bucket}/a", b"1", None)
    answers = [ConnectionError("no route"), ConnectionError("no route")]

    def fails():
        if answers:
            raise answers.pop()
        return "here"

    assert buckets._reach(bucket, fails) == "here"
    answers += [ConnectionError("no route")] * 9
    with pytest.raises(UnreachableError, match="the same command resumes from it"):
        buckets._reach(bucket, fails)


def test_a_bucket_that_was_never_reached_is_refused_at_once(bucket, impatient):
    def fails():
        raise ConnectionError("no route")

    with pytest.raises(BadInputError, match=r"cannot be reached \(no route\): check"):
        buckets._reach(bucket, fails)


@pytest.mark.parametrize(
    "argv",
    [
        ["show", "AT/run"],
        ["verify", "AT/run"],
        ["export", "AT/run", "model"],
        ["sample", "AT/run"],
        ["data", "inspect", "AT/store"],
        ["train", "configs/quickstart.yaml", "--run-dir", "AT/run"],
        ["data", "build", "--source", "shakespeare", "--out", "AT/store"],
    ],
    ids=lambda argv: argv[0] + argv[1][:2],
)
def test_a_bucket_that_does_not_exist_is_one_sentence(bucket, argv, capsys):
    at = f"{bucket[:5]}no-such-bucket"
    assert main([word.replace("AT", at) for word in argv]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"dpfl: error: there is no bucket {at}: create it, or give another address"


@pytest.mark.slow
def test_no_credentials_are_one_sentence(bucket, monkeypatch, impatient, tmp_path, capsys):
    if bucket.startswith("gs:"):
        pytest.skip("its server wants none")
    for name in AMAZON:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    client = type(buckets._client("s3://bucket"))
    client.clear_instance_cache()
    assert main(["show", "s3://bucket/run"]) == 2
    client.clear_instance_cache()
    assert re.search(r"s3://bucket/run cannot be reached \(.*credentials", capsys.readouterr().err)


# ---- the ledger -------------------------------------------------------------------------------


CHARGE = """
import sys
from dpfl_jax.accounting import Account, BudgetExceededError, Ledger, events

ledger, event = Ledger(sys.argv[1]), events.uls(1.0, 0.01, steps=100)
ledger.spent(Account("people"), 1e-5)
print("ready", flush=True)
input()
try:
    ledger.reserve(Account("people"), sys.argv[2], event, delta=1e-5, budget=0.8)
    print("won")
except BudgetExceededError:
    print("lost")
"""


@pytest.mark.slow
def test_of_six_processes_one_gets_what_is_left(bucket):
    where = f"{bucket}/ledger.jsonl"
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", CHARGE, where, f"run {i}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for i in range(6)
    ]  # fmt: skip
    assert [process.stdout.readline() for process in racing] == ["ready\n"] * 6
    for process in racing:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=300)[0] for process in racing]
    assert sorted(said) == ["lost\n"] * 5 + ["won\n"]
    ledger = Ledger(where)
    assert ledger.runs(Account("people")) == [f"run {said.index('won' + chr(10))}"]
    ledger.commit(ledger.runs(Account("people"))[0])
    assert len(ledger._records()) == 2


def test_of_six_runs_one_gets_what_is_left(bucket):
    event, start = events.uls(1.0, 0.01, steps=100), threading.Barrier(6)

    def charge(run):
        start.wait()
        with contextlib.suppress(BudgetExceededError):
            ledger.reserve(Account("people"), run, event, delta=1e-5, budget=0.8)
            return True
        return False

    ledger = Ledger(f"{bucket}/ledger.jsonl")
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        won = list(pool.map(charge, map(str, range(6))))
    assert ledger.runs(Account("people")) == [str(won.index(True))]
    assert sum(won) == 1


def test_a_charge_whose_answer_is_lost_is_made_once(bucket, monkeypatch):
    ledger, event = Ledger(f"{bucket}/ledger.jsonl"), events.uls(1.0, 0.01, steps=100)
    real, calls = buckets._replace, []

    def loses_answers(where, content, version):
        calls.append(real(where, content, version))
        if len(calls) == 1:
            raise buckets.ConflictError(where)  # what a client sees that repeats its request
        return calls[-1]

    monkeypatch.setattr(buckets, "_replace", loses_answers)
    ledger.reserve(Account("people"), "run", event, delta=1e-5, budget=0.8)
    assert len(ledger._records()) == 1


class BadNetwork:
    """Loses requests and answers, and delivers requests again later, in front of a client."""

    def __init__(self, client, seed):
        self._real, self._rng, self._late = client.call, random.Random(seed), []
        self.lost = collections.Counter()

    def call(self, method, *args, **kwargs):
        if self._late and self._rng.random() < 0.5:  # a request that was thought to be lost arrives
            with contextlib.suppress(Exception):
                self._late.pop(self._rng.randrange(len(self._late)))()
        fate = self._rng.choice(["arrives", "arrives", "is lost", "answer is lost", "comes later"])
        if method != "POST" or fate == "arrives":
            return self._real(method, *args, **kwargs)
        self.lost[fate] += 1
        if fate == "answer is lost":
            self._real(method, *args, **kwargs)
        if fate == "comes later":
            self._late.append(lambda: self._real(method, *args, **kwargs))
        raise ConnectionError(fate)


@pytest.fixture
def bad_network(bucket, monkeypatch):
    if bucket.startswith("s3:"):
        pytest.skip("one client suffices")
    client = buckets._client(bucket)
    buckets._replace(f"{bucket}/reached", b"1", None)
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 500))

    def made(seed):
        network = BadNetwork(client, seed)
        monkeypatch.setattr(client, "call", network.call)
        return network

    return made


@pytest.mark.slow
def test_a_bad_network_charges_nothing_that_is_not_left(bucket, bad_network):
    event, lost = events.uls(1.0, 0.01, steps=100), 0
    for seed in range(8):
        network, ledger = bad_network(seed), Ledger(f"{bucket}/ledger{seed}.jsonl")

        def charge(run, ledger=ledger):
            with contextlib.suppress(BudgetExceededError):
                ledger.reserve(Account("people"), run, event, delta=1e-5, budget=0.8)
                return True
            return False

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            won = list(pool.map(charge, map(str, range(6))))
        assert won.count(True) == 1
        assert ledger.runs(Account("people")) == [str(won.index(True))]
        assert len(ledger._records()) == 1
        lost += network.lost.total()
    assert lost > 20


@pytest.mark.slow
def test_in_a_bad_network_one_of_two_jobs_takes_a_step(bucket, quick, bad_network):
    """The second finds the first silent, which wakes up and does not know that it was."""
    for seed in range(6):
        where, network = f"{bucket}/run{seed}", bad_network(seed)
        paused = RunDirectory(where, {"a": 1}, None, {"data": "abc"})
        paused.record_released(1)
        copy = buckets._COPIES[paused.address]
        killed(paused)
        copy.lease._ended.clear()
        second = RunDirectory(where, {"a": 1}, None, {"data": "abc"})
        buckets._COPIES["paused"], copy.lease._beaten = copy, math.inf  # its clock stands still
        took = []
        for run in (paused, second) if seed % 2 else (second, paused):
            with contextlib.suppress(BadInputError):
                run.record_released(2)
                took.append(run)
        assert len(took) == 1
        assert took[0].root_key.secret == paused.root_key.secret
        with contextlib.suppress(BadInputError):
            second.close()
        del buckets._COPIES["paused"]
    assert network.lost


def test_a_damaged_ledger_is_refused(bucket):
    ledger = Ledger(f"{bucket}/ledger.jsonl")
    for run in ("a", "b"):
        ledger.reserve(Account("people"), run, events.uls(1.0, 0.01, steps=10), delta=1e-5)
    content, version = buckets._read(ledger.path)
    buckets._replace(ledger.path, content.split(b"\n", 1)[1], version)
    with pytest.raises(BadInputError, match="record was changed or removed"):
        ledger.reserve(Account("people"), "c", events.uls(1.0, 0.01, steps=10), delta=1e-5)


# ---- stores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["arrow", "arrayrecord"])
def test_a_store_in_a_bucket_is_the_store(bucket, form, tmp_path):
    mine = people()
    made = write_store(mine, f"{bucket}/store", form)
    assert not list((tmp_path / "cache" / "uploads").glob("*/*"))
    everything = np.arange(mine.num_examples)
    np.testing.assert_array_equal(made.records(everything), mine.records(everything))
    assert made.fingerprint == mine.fingerprint
    made.verify()
    with pytest.raises(BadInputError, match="exists"):
        write_store(mine, f"{bucket}/store", form)


@contextlib.contextmanager
def counted(monkeypatch):
    """Inside, what is downloaded of stores: (name of the file, number of bytes)."""
    real, read = buckets.part, []

    def part(where, begin, end):
        read.append((where.rpartition("/")[2], end - begin))
        return real(where, begin, end)

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "part", part)
        yield read


def wide(users=300):
    """About two MiB of examples."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(users), rng.integers(1, 9, users))
    return dpfl.from_arrays({"x": rng.normal(size=(len(owners), 400)).astype("float32")}, owners)


def test_a_store_whose_upload_was_interrupted_is_not_built_again(bucket, tmp_path, monkeypatch):
    rows = [json.dumps({"user": f"u{i // 3}", "text": f"lamp {i}"}) for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    build = ["data", "build", "--input", str(tmp_path / "rows.jsonl"), "--user-column", "user"]
    build += ["--text-column", "text", "--tokenizer", "bytes", "--seq-len", "16", "--workers", "1"]
    client, real = buckets._client(bucket), buckets._client(bucket).put_file

    def fails(path, at):
        if path.endswith("manifest.json"):
            raise ConnectionError("no route")
        real(path, at)

    with monkeypatch.context() as patch:
        patch.setattr(client, "put_file", fails)
        patch.setattr(buckets, "PATIENCE_S", 0.0)
        assert main([*build, "--out", f"{bucket}/store"]) == 1
    assert ".uploading" in names(f"{bucket}/store")
    assert main(["data", "inspect", f"{bucket}/store"]) == 2
    monkeypatch.setattr("dpfl_jax.data.build.group_rows", None)
    assert main([*build, "--out", f"{bucket}/store"]) == 0
    assert ".uploading" not in names(f"{bucket}/store")
    shards.open_store(f"{bucket}/store").verify()


def test_blocks_are_downloaded_when_needed_once(bucket, monkeypatch):
    monkeypatch.setattr("dpfl_jax.data.build.default_num_shards", lambda size: 4)
    mine, everything = wide(), np.arange(wide().num_examples)
    made = write_store(mine, f"{bucket}/store")
    with counted(monkeypatch) as read:
        np.testing.assert_array_equal(made.records(np.array([0])), mine.records(np.array([0])))
    assert [size for _, size in read][1:] == [cached.BLOCK]  # and first the digests of blocks
    with counted(monkeypatch) as read:
        np.testing.assert_array_equal(made.records(everything), mine.records(everything))
        np.testing.assert_array_equal(made.records(everything), mine.records(everything))
    size = sum(entry.bytes for entry in made.manifest.shards)
    assert sum(size for _, size in read) == size - cached.BLOCK
    with counted(monkeypatch) as read:
        again = shards.open_store(f"{bucket}/store")
        np.testing.assert_array_equal(again.records(everything), mine.records(everything))
    assert not read


def test_a_process_downloads_its_part_of_what_is_drawn(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(cached, "BLOCK", 1024)
    rng, schema = np.random.default_rng(0), Schema.tokens(64, 32)
    users = (
        (f"u{u}", {"tokens": rng.integers(1, 32, (n, 64)), "mask": np.ones((n, 64), bool)})
        for u, n in enumerate(heavy_tailed_counts(2000, 20_000))
    )
    write_store(ArrayStore.from_users(users, schema), f"{bucket}/store")
    mechanism = uls(group_size=4, cohort_size=64, clip_norm=1.0)
    downloaded, examples = [], []
    for processes in (1, 2, 4, 8):
        monkeypatch.setenv("DPFL_CACHE_DIR", str(tmp_path / str(processes)))
        with counted(monkeypatch) as read:
            made = reads(shards.open_store(f"{bucket}/store"), mechanism, processes)
        downloaded.append(sum(size for name, size in read if name.startswith("shard-")))
        examples.append(made["examples"])
    for number, processes in enumerate((1, 2, 4, 8)):
        assert downloaded[number] * processes < 1.5 * downloaded[0]
        assert examples[number] * processes < 1.5 * examples[0]


@pytest.mark.parametrize("damage", ["changed", "cut"])
def test_what_is_damaged_in_the_cache_is_downloaded_again(bucket, tmp_path, damage):
    mine = people()
    made = write_store(mine, f"{bucket}/store")
    made.verify()
    files = [p for p in (tmp_path / "cache" / "stores").glob("*/*") if p.name != "manifest.json"]
    assert len(files) == 4
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-9] + b"!" * 9 if damage == "changed" else data[:5])
    again = shards.open_store(f"{bucket}/store")
    everything = np.arange(mine.num_examples)
    np.testing.assert_array_equal(again.records(everything), mine.records(everything))
    again.verify()


def test_another_shard_than_the_manifest_says_is_not_read(bucket):
    made = write_store(people(), f"{bucket}/store")
    shard = made.manifest.shards[0].file
    content, version = buckets._read(f"{bucket}/store/{shard}")
    buckets._replace(f"{bucket}/store/{shard}", content[:-1] + b"!", version)
    with pytest.raises(BadInputError, match="does not have the checksum of its manifest"):
        shards.open_store(f"{bucket}/store").records(np.array([0]))
    opened = shards.open_store(f"{bucket}/store")
    buckets._client(bucket).rm_file(f"{bucket[5:]}/store/{shard}")
    with pytest.raises(BadInputError, match="is missing"):
        opened.records(np.array([0]))
    with pytest.raises(BadInputError, match="is missing"):
        shards.open_store(f"{bucket}/store")


def test_the_cache_is_bounded(bucket, tmp_path, monkeypatch):
    one, two = (write_store(people(n), f"{bucket}/store{n}") for n in (40, 50))
    one.records(np.array([0]))
    cache = tmp_path / "cache" / "stores"
    files = list(one.path.iterdir())
    full = shutil._ntuple_diskusage(0, 0, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(BadInputError, match="does not fit into the cache"):
        two.records(np.array([0]))  # what was used a moment ago stays
    for path in cache.glob("*/*"):
        os.utime(path, (0, 0))
    two.records(np.array([0]))
    assert not all(path.exists() for path in files)
    one.records(np.array([0]))  # what is open stays readable


# ---- run directories --------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(buckets, "BEAT_S", 0.2)
    monkeypatch.setattr(buckets, "LEASE_S", 2.0)


def killed(run):
    """The process of a run is gone: nothing is uploaded, nothing given back."""
    lease = buckets._COPIES.pop(run.address).lease
    lease._ended.set()
    lease._thread.join()


def test_a_key_is_in_the_bucket_before_the_run_begins(bucket, quick):
    run = RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"})
    assert names(run.address) == [
        "config.yaml",
        "private/root_key.json",
        "run.lock",
    ]
    run.record_released(3)
    run.append_metrics({"step": 1})
    killed(run)
    again = RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"})
    assert (again.resumed, again.released) == (True, 3)
    assert again.root_key.fingerprint == run.root_key.fingerprint
    assert again.run_id == run.run_id
    again.append_metrics({"step": 2})
    again.close()
    assert RELEASED_STEPS in names(run.address)
    assert buckets.content(f"{bucket}/run/metrics.jsonl") == b'{"step": 2}\n'


def test_other_data_do_not_get_the_key_of_a_run(bucket, quick):
    RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"}).close()
    with pytest.raises(BadInputError, match="training data are not those"):
        RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "other"})
    with pytest.raises(BadInputError, match="another configuration"):
        RunDirectory(f"{bucket}/run", {"a": 2}, None, {"data": "abc"})


def test_one_process_works_in_a_run_directory(bucket, quick):
    first = RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"})
    with pytest.raises(BadInputError, match=r"another process, on .*, is training in [gs]s?3?://"):
        RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"})
    first.record_released(1)
    first.close()
    began = time.monotonic()
    RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"}).close()
    assert time.monotonic() - began < buckets.LEASE_S  # it was given back


def test_a_process_that_was_silent_for_too_long_writes_nothing_more(bucket, quick):
    paused = RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"})
    paused.record_released(1)
    copy = buckets._COPIES[paused.address]
    killed(paused)
    copy.lease._ended.clear()
    second = RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"})
    buckets._COPIES["paused"] = copy  # it wakes up
    second.record_released(5)
    copy.lease._beaten = time.monotonic() + 60  # its clock stood still
    with pytest.raises(BadInputError, match="was changed by somebody else"):
        paused.record_released(2)
    copy.lease._beaten = 0.0
    with pytest.raises(BadInputError, match="has taken over"):
        paused.record_released(2)
    assert json.loads(buckets.content(f"{bucket}/run/{RELEASED_STEPS}"))["steps"] == 5
    second.close()


def test_processes_of_one_run_read_its_key_in_the_bucket(bucket, quick):
    run = RunDirectory(f"{bucket}/run", {"a": 1}, None, {"data": "abc"})
    introduction = json.loads(json.dumps(run.introduction()))
    assert introduction["path"] == f"{bucket}/run"
    assert run.root_key.secret.hex() not in json.dumps(introduction)
    joined = RunDirectory.join(introduction, {"data": "abc"}, patience_s=1)
    assert joined.root_key.secret == run.root_key.secret
    run.close()


# ---- whole runs -------------------------------------------------------------------------------

CONFIG = {
    "name": "job",
    "data": {
        "source": "store",
        "tokenizer": "bytes",
        "seq_len": 16,
        "validation_fraction": 0.1,
        "test_fraction": 0.0,
    },
    "model": {"overrides": {"embed_dim": 8, "num_layers": 1, "num_heads": 1, "mlp_dim": 8}},
    "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 16, "clip_norm": 1.0},
    "privacy": {"epsilon": 8.0, "delta": 1e-3, "account": "people"},
    "train": {"steps": 6, "checkpoint_every": 2, "eval_every": 3},
    "execution": {"microbatch_size": 8, "strategy": "vmap"},
    "eval": {"baseline": False},
}


@pytest.fixture
def job(bucket, tmp_path):
    rows = [json.dumps({"user": f"u{i // 3}", "text": f"lamp {i}"}) for i in range(300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    build = ["data", "build", "--input", str(tmp_path / "rows.jsonl"), "--user-column", "user"]
    build += ["--text-column", "text", "--tokenizer", "bytes", "--seq-len", "16", "--workers", "1"]
    assert main([*build, "--out", f"{bucket}/store"]) == 0
    config = json.loads(json.dumps(CONFIG))
    config["data"]["path"] = f"{bucket}/store"
    config["privacy"]["ledger"] = f"{bucket}/ledger.jsonl"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    return str(tmp_path / "job.yaml")


@pytest.mark.slow
def test_a_run_in_a_bucket_from_its_data_to_its_model(job, bucket, tmp_path, capsys):
    assert main(["train", job, "--run-dir", f"{bucket}/run"]) == 0
    printed = capsys.readouterr()
    assert f"{bucket}/run" in printed.out
    assert "/dpfl-" not in printed.out + printed.err
    assert main(["show", f"{bucket}/run"]) == 0
    assert main(["verify", f"{bucket}/run"]) == 0
    assert main(["export", f"{bucket}/run", f"{bucket}/model"]) == 0
    assert names(f"{bucket}/model") == sorted(
        ["README.md", "guarantee.json", "model.json", "model.safetensors", "run.json"]
    )
    assert main(["verify", f"{bucket}/model"]) == 0
    assert dpfl.load_exported(f"{bucket}/model").params
    for where in (f"{bucket}/run", f"{bucket}/model"):
        assert main(["sample", where, "--prompt", "la", "--max-tokens", "3"]) == 0
    rows = str(tmp_path / "made" / "rows.jsonl")
    assert main(["synthesize", f"{bucket}/run", "--rows", "3", "--out", rows]) == 0
    assert main(["data", "inspect", f"{bucket}/store", "--verify"]) == 0
    assert main(["train", job, "--run-dir", f"{bucket}/run"]) == 2
    assert "is finished and is not overwritten" in capsys.readouterr().err
    ledger = Ledger(f"{bucket}/ledger.jsonl")
    assert len(ledger.runs(Account("people", unit_key="column user"))) == 1


def final_params(where):
    return released(buckets.folder(where) / "checkpoints", 6)


@pytest.mark.nightly
@pytest.mark.slow("[gs]")
def test_what_is_missing_of_a_killed_run_is_noticed_or_does_not_matter(
    job, bucket, quick, monkeypatch, capsys
):
    with death_after_a_checkpoint(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "close", killed)
        main(["train", job, "--run-dir", f"{bucket}/run"])
    left = {name: buckets.content(f"{bucket}/run/{name}") for name in names(f"{bucket}/run")}
    assert "checkpoints/2/commit_success.txt" in left
    assert "metrics.jsonl" in left
    data = max((name for name in left if "/d/" in name), key=lambda name: len(left[name]))
    assert main(["train", job, "--run-dir", f"{bucket}/run"]) == 0
    whole = final_params(f"{bucket}/run")
    for number, (missing, refusal) in enumerate(
        {
            "config.yaml": "is not empty and holds no run",
            "private/root_key.json": "the root key in .*://.* cannot be read",
            data: "the checkpoint of step 2 in .*://.* cannot be restored",
            "checkpoints/2/progress/metadata": "the checkpoint of step 2 in .*://.* cannot be",
            "checkpoints/2/commit_success.txt": None,
            RELEASED_STEPS: None,
            "metrics.jsonl": None,
        }.items()
    ):
        where = f"{bucket}/copy{number}"
        for name in left.keys() - {missing}:
            buckets._replace(f"{where}/{name}", left[name], None)
        capsys.readouterr()
        code = main(["train", job, "--run-dir", where])
        printed = capsys.readouterr().err
        assert code == (0 if refusal is None else 2), (missing, printed)
        if refusal is None:
            chex.assert_trees_all_equal(final_params(where), whole)
        else:
            assert re.search(refusal, printed), (missing, printed)


@pytest.mark.nightly
def test_a_job_that_is_killed_in_a_bucket_ends_as_one_that_was_not(tmp_path):
    pytest.importorskip("gcsfs")
    script = pathlib.Path(__file__).parents[1] / "launch" / "killed_in_a_bucket.py"
    sizes = ["--users", "2000", "--examples", "20000", "--kills", "3", "--steps", "16"]
    made = subprocess.run(
        [sys.executable, script, tmp_path, *sizes], capture_output=True, text=True, timeout=1800
    )
    assert made.returncode == 0, made.stdout + made.stderr
