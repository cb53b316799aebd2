"""Three silos and a server as processes over TLS: killed on the way, and equal to the bit."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from safetensors.numpy import load

from dpfl_jax.cli.main import main
from dpfl_jax.config.variants import variant_of
from dpfl_jax.flower.silo import SiloClient
from dpfl_jax.flower.silo_folder import make_key
from tests.flower.studies import ISRL, POLICY, bits, simulated, simulated_messages, study
from tests.runs import final_state

DPFL = [sys.executable, "-m", "dpfl_jax", "silo"]
NAMES = ("cleveland", "hungarian", "switzerland")
HEART = pathlib.Path(os.environ.get("DPFL_DATA_DIR", "/nowhere")) / "heart_disease"
COLUMNS = tuple(f"x{i}" for i in range(13))
DATA = {
    "user_column": "person", "silo_column": "hospital", "target_column": "sick", "classes": 2,
    "input_columns": list(COLUMNS), "scale": {"x0": [0, 1]},
}  # fmt: skip
STUDIES = {
    "hi_grad_avg": study(
        data=DATA, model={"kind": "logistic", "options": {}},
        federation={"rounds": 8, "max_silos_per_subject": 2},
    ),
    "rpdp": study(
        data=DATA, model={"kind": "logistic", "options": {}}, mechanism={"kind": "rpdp"},
        privacy={"epsilon": 10.0, "budgets": {"levels": [0.5, 2.0, 6.0]}, "unreachable": "exclude"},
        federation={"rounds": 8, "participation_prob": 0.7},
    ),
    "accelerated": study(
        ISRL, data=DATA, mechanism={"kind": "accelerated"}, federation={"rounds": 8},
        execution={"rounds_per_block": 1},
    ),
}  # fmt: skip


def heart(folder):
    """Three hospitals' own files, and all in one."""
    from dpfl_jax.data import load_examples
    from dpfl_jax.data.sections import SourceConfig

    store = load_examples(SourceConfig(source="heart_disease", path=str(HEART))).store
    rows = store.read(np.arange(store.num_examples))
    head = ",".join(["hospital", "person", *COLUMNS, "sick"])
    lines = {name: [head] for name in (*NAMES, "all")}
    for i, (x, label, silo) in enumerate(zip(rows["x"], rows["label"], rows["silo"])):
        if int(silo) < len(NAMES):
            name = NAMES[int(silo)]
            line = ",".join([name, f"p{i}", *(repr(float(v)) for v in x.ravel()), str(int(label))])
            lines[name].append(line)
            lines["all"].append(line)
    for name, found in lines.items():
        (folder / f"{name}.csv").write_text("\n".join(found) + "\n")


def hospitals(folder, addresses):
    """Tables and silos' folders of the three hospitals; each has an address of the server."""
    heart(folder)
    raw = yaml.safe_load((folder / "study.yaml").read_text())
    kind = raw["mechanism"]["kind"]
    unit = "record" if variant_of(raw["mechanism"]) == "isrl" else "subject"
    policy = {**POLICY, "mechanisms": [kind], "epsilon": 30.0, "unit": unit}
    for name, address in addresses.items():
        place = folder / f"silo-{name}"
        place.mkdir()
        make_key(place)
        own = {"name": name, "config": "../study.yaml", "data": {"path": f"../{name}.csv"},
               "server": address, "root_certificates": "../ca.pem", "policy": policy}  # fmt: skip
        (place / "silo.yaml").write_text(yaml.safe_dump(own))


WARDS = ("east", "north", "west")
STAYS = {
    "name": "stays",
    "data": {
        "source": "csv", "user_column": "patient", "silo_column": "ward", "target_column": "days",
        "scale": {"age": [50, 25], "pulse": [80, 30], "days": [8, 6]},
    },
    "federation": {
        "silos": 3, "partition": "natural", "max_silos_per_subject": 2, "rounds": 8,
        "local_steps": 3, "local_optimizer": {"name": "sgd", "learning_rate": 0.3},
    },
    "model": {"kind": "linear"},
    "mechanism": {
        "kind": "subject_uls", "group_size": 2, "sampling_prob": 0.3, "max_records_per_subject": 3,
    },
    "privacy": {"epsilon": 6.0, "delta": 1e-3},
    "train": {"checkpoint_every": 1},
}  # fmt: skip


def wards(folder, addresses):
    """A table of one's own, a number as its target; silos made and signed off by command alone.

    Every third patient has rows in two wards.
    """
    rng, lines = np.random.default_rng(26), []
    for i, home in enumerate(rng.integers(3, size=120)):
        for visit in range(rng.integers(1, 5)):
            ward = WARDS[(home + (i % 3 == 0 and visit % 2)) % 3]
            age, pulse = rng.uniform(25, 75), rng.normal(80, 12)
            days = 8 + (age - 50) / 8 + (pulse - 80) / 15 + rng.normal()
            lines.append((ward, f"patient-{i},{age:.1f},{ward},{pulse:.0f},{days:.2f}"))
    head = "patient,age,ward,pulse,days"
    for name in (*WARDS, "all"):
        kept = [line for ward, line in lines if name in (ward, "all")]
        (folder / f"{name}.csv").write_text("\n".join([head, *kept]) + "\n")
    for name, address in addresses.items():
        own = [f"{folder}/silo-{name}", "--name", name, "--data", f"{folder}/{name}.csv"]
        own += ["--config", f"{folder}/study.yaml", "--server", address]
        assert main(["silo", "init", *own, "--root-certificates", f"{folder}/ca.pem"]) == 0


def certificates(folder, addresses=("127.0.0.1",)):
    """A certificate for the server's addresses, signed by one that the silos trust."""
    names = "subjectAltName=" + ",".join(f"IP:{a}" for a in addresses)
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -keyout ca.key -out ca.pem -subj /CN=test "
        "-addext keyUsage=critical,keyCertSign,cRLSign",
        "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=localhost",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
        "-out server.pem -extfile names",
    ):
        (folder / "names").write_text(
            names + "\nbasicConstraints=CA:FALSE\nauthorityKeyIdentifier=keyid\n"
        )
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


class Processes:
    """Started with their output in files, and gone at the end."""

    def __init__(self, folder, within):
        self.folder, self.running, self.within = folder, {}, within

    def start(self, name, *args):
        log = (self.folder / f"{name}.out").open("ab")
        command = [*self.within(name), *DPFL, *args]
        self.running[name] = subprocess.Popen(
            command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
        )

    def kill(self, name):
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def told(self):
        return "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in self.folder.glob("*.out"))

    def close(self):
        for process in self.running.values():
            process.kill()
            process.wait()


def rounds_done(folder):
    path = folder / "server" / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(row)["step"] for row in rows), default=0)


def until(condition, processes, seconds=900):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail("it takes too long\n" + processes.told())
        time.sleep(0.2)


def needed(data=HEART):
    """Skips where the test cannot be run."""
    pytest.importorskip("flwr")
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates, and is not here")
    if not data.is_dir():
        pytest.skip("DPFL_DATA_DIR holds no heart_disease")


def trained(
    tmp_path, raw, made=hospitals, names=NAMES, host="127.0.0.1", servers=None,
    within=lambda name: (),
):  # fmt: skip
    """A run with a silo and the server killed on the way equals the simulation to the bit.

    Args:
      raw: the study.
      made: writes tables, and the silos' folders.
      names: of the silos.
      host: at which the server listens.
      servers: its address as each silo sees it; default: host.
      within: command that brings a process to its place.
    """
    servers = servers or dict.fromkeys(names, host)
    certificates(tmp_path, sorted(set(servers.values())))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(raw))
    made(tmp_path, {name: f"{servers[name]}:{port}" for name in names})
    tls = ["--certificate", "server.pem", "--key", "server.key"]
    serve = ["serve", "study.yaml", "--run-dir", "server", "--host", host]
    serve += ["--port", str(port), *tls]
    processes = Processes(tmp_path, within)
    try:
        processes.start("server", *serve)
        for name in names:
            processes.start(name, "run", f"silo-{name}", "--finish")
        until(lambda: rounds_done(tmp_path) >= 2, processes)
        processes.kill(names[1])
        processes.start(names[1], "run", f"silo-{names[1]}", "--finish")
        until(lambda: rounds_done(tmp_path) >= 4, processes)
        processes.kill("server")
        processes.start("server", *serve)
        until(lambda: processes.running["server"].poll() is not None, processes)
        assert processes.running["server"].returncode == 0, processes.told()
        until(lambda: all(p.poll() is not None for p in processes.running.values()), processes)
    finally:
        processes.close()
    silos = {name: SiloClient(tmp_path / f"silo-{name}") for name in names}
    for silo in silos.values():
        accepted = [row for row in silo.log.rows if row["kind"] == "accepted"]
        assert len(accepted) == 1  # one run, whoever was killed
        asked = [row["round"] for row in silo.log.rows if row["kind"] == "asked"]
        assert asked == list(range(8))  # each once
        silo.accepted_run({"run": accepted[0]["run"], "plan": accepted[0]["plan"]})
        for path in silo.folder.glob("runs/*/*.message"):
            sent = set(load(path.read_bytes()))
            assert not sent or all(name.startswith("released") for name in sent)
    plan = next(iter(silos[names[0]].runs.values())).plan
    if variant_of(raw["mechanism"]) == "isrl":
        expected = simulated_messages(tmp_path, silos, names)
    else:
        expected = simulated(tmp_path, silos, plan.noise, names)
    assert bits(final_state(tmp_path / "server")["params"]) == bits(expected)


@pytest.mark.nightly
@pytest.mark.slow("hi_grad_avg")
@pytest.mark.parametrize("kind", STUDIES)
def test_processes_over_tls_are_killed_and_equal_the_simulation(tmp_path, kind):
    needed()
    trained(tmp_path, STUDIES[kind])


@pytest.mark.nightly
def test_a_table_of_ones_own_by_commands_alone_equals_the_simulation(tmp_path):
    needed(tmp_path)
    trained(tmp_path, STAYS, wards, WARDS)


@pytest.fixture
def namespaces():
    """Networks of the server and of each silo; a silo has a cable to the server and no other."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    made = {name: f"dpfl-{os.getpid()}-{i}" for i, name in enumerate(("server", *NAMES))}

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    try:
        for space in made.values():
            if (found := ip("netns", "add", space)).returncode:
                pytest.skip(f"network namespaces are not permitted here: {found.stderr.strip()}")
            ip("-n", space, "link", "set", "lo", "up")
        for i, name in enumerate(NAMES):
            ends = (made["server"], f"s{i}"), (made[name], "wire")
            ip("-n", ends[0][0], "link", "add", ends[0][1], "type", "veth", "peer", "name", "wire",
               "netns", made[name])  # fmt: skip
            for end, (space, device) in enumerate(ends, 1):
                ip("-n", space, "addr", "add", f"10.77.{i}.{end}/24", "dev", device)
                found = ip("-n", space, "link", "set", device, "up")
                if found.returncode:
                    pytest.skip(f"no cable between namespaces here: {found.stderr.strip()}")
        yield made
    finally:
        for space in made.values():
            ip("netns", "del", space)


@pytest.mark.nightly
def test_silos_on_networks_of_their_own_equal_the_simulation(tmp_path, namespaces):
    needed()

    def within(name):
        return ("ip", "netns", "exec", namespaces[name])

    reach = "import socket; socket.create_connection(('10.77.1.2', 1), 3)"
    tried = [*within(NAMES[0]), sys.executable, "-c", reach]  # the second silo, from the first
    assert "unreachable" in subprocess.run(tried, capture_output=True, text=True).stderr
    servers = {name: f"10.77.{i}.1" for i, name in enumerate(NAMES)}
    trained(tmp_path, STUDIES["hi_grad_avg"], host="0.0.0.0", servers=servers, within=within)
