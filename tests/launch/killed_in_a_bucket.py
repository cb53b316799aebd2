#!/usr/bin/env python3
"""A job in a bucket is killed at random moments, resumed, and ends as one that was not.

Builds a store of heavy-tailed users, puts it into a bucket, trains on it with 2 processes of 4
devices, and again: with 2 x 4 and 4 x 2 processes in turn, all of which are killed (SIGKILL) at
random moments. Prints the digest of both last checkpoints; exit status 1 if they differ.

  tests/launch/killed_in_a_bucket.py FOLDER --users 30000 --examples 1000000 --kills 10
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import yaml

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import google_storage

ROOT = pathlib.Path(__file__).parents[2]
LAYOUTS = ((2, 4), (4, 2))
BUCKET = "gs://bucket"
say = functools.partial(print, flush=True)


def config(steps):
    """A small language model on the store; a public seed, so that two runs draw the same."""
    tiny = {"embed_dim": 16, "num_layers": 1, "num_heads": 2, "mlp_dim": 16}
    return {
        "name": "killed",
        "seed": 1,
        "data": {
            "source": "store", "path": f"{BUCKET}/store", "tokenizer": "bytes", "seq_len": 64,
            "validation_fraction": 0.01, "test_fraction": 0.0,
        },
        "model": {"overrides": tiny},
        "mechanism": {"kind": "uls", "group_size": 4, "cohort_size": 64, "clip_norm": 1.0},
        "privacy": {"epsilon": 8.0, "delta": 1e-6},
        "optimizer": {"name": "adam", "learning_rate": 0.01},
        "train": {"steps": steps, "checkpoint_every": 4, "log_every": 1, "eval_every": 0},
        "execution": {"microbatch_size": 8, "packing": 2},
        "eval": {"baseline": False, "max_users": 64, "max_examples_per_user": 2},
    }  # fmt: skip


SERVER = "import sys, google_storage; google_storage.Server(int(sys.argv[1])).serve_forever()"


@contextlib.contextmanager
def server():
    """A server like Google's with an empty bucket; its address is in the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port)]
    running = subprocess.Popen(command, cwd=pathlib.Path(google_storage.__file__).parent)
    os.environ |= google_storage.environment(port)
    try:
        while True:
            with contextlib.suppress(ConnectionError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.2)
        yield
    finally:
        running.kill()


def start(file, run_dir, layout, log):
    """The job of that many processes and devices."""
    processes, devices = map(str, layout)
    command = [sys.executable, ROOT / "launch/local.py", file, run_dir, "--processes", processes]
    command += ["--cpu-devices", devices]
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def kill(job, log):
    """All its processes at once; the launcher names them."""
    job.kill()
    named = re.findall(r"local: \d+ processes: (.*)", pathlib.Path(log.name).read_text())
    for pid in map(int, named[-1].split(", ") if named else ()):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    job.wait()


def saved(run_dir):
    """The steps of its checkpoints."""
    from dpfl_jax import buckets

    names = buckets.sizes(f"{run_dir}/checkpoints")
    return sorted(int(n.split("/")[0]) for n in names if n.endswith("commit_success.txt"))


def digest(run_dir):
    """Of all arrays of the last checkpoint."""
    import jax
    import numpy as np

    from dpfl_jax import buckets
    from dpfl_jax.run import checkpoint

    folder, step = buckets.folder(run_dir) / "checkpoints", saved(run_dir)[-1]
    state = checkpoint._read_on_host(folder, step, None)
    made = hashlib.sha256()
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        array = np.asarray(array)
        made.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        made.update(array.tobytes())
    return made.hexdigest()


def main(argv=None):
    """Returns whether both runs ended with the same checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path, help="for store, log and cache")
    parser.add_argument("--users", type=int, default=30_000)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    from benchmarks.data import build_synthetic
    from dpfl_jax import buckets

    os.environ["DPFL_CACHE_DIR"] = str(args.folder.absolute() / "cache")
    file, rng = args.folder / "job.yaml", random.Random(args.seed)
    file.write_text(yaml.safe_dump(config(args.steps)))
    store = args.folder / "store"  # one that is there is used again
    if not store.exists():
        say(build_synthetic(store, args.users, args.examples, 64, "arrow"))
    say(f"seed {args.seed}")
    with server(), (args.folder / "log").open("a") as log:
        with buckets.output(f"{BUCKET}/store") as place:
            shutil.copytree(store, place)
        begun = time.monotonic()
        whole = start(file, f"{BUCKET}/whole", LAYOUTS[0], log).wait()
        seconds = time.monotonic() - begun
        say(f"uninterrupted: exit status {whole}, {seconds:.0f} s")
        for number in range(args.kills):
            layout, before = LAYOUTS[number % 2], saved(f"{BUCKET}/killed")
            job = start(file, f"{BUCKET}/killed", layout, log)
            if number % 2 == 0:  # at any moment, also before the first step
                time.sleep(rng.uniform(0, seconds))
            else:  # around a checkpoint
                while job.poll() is None and saved(f"{BUCKET}/killed") == before:
                    time.sleep(0.2)
                time.sleep(rng.uniform(0, 4))
            alive = job.poll() is None
            kill(job, log)
            said = "killed" if alive else f"ended with {job.returncode}"
            where = f"checkpoints {before[-1:]} -> {saved(f'{BUCKET}/killed')[-1:]}"
            say(f"{number + 1}: {layout[0]} x {layout[1]}, {said}, {where}")
        status = start(file, f"{BUCKET}/killed", LAYOUTS[args.kills % 2], log).wait()
        say(f"resumed to the end: exit status {status}")
        digests = [digest(f"{BUCKET}/{name}") for name in ("whole", "killed")]
        say(json.dumps(dict(zip(("whole", "killed"), digests))))
    return digests[0] == digests[1] and (whole, status) == (0, 0)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
