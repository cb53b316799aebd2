"""Small studies: three silos' tables, folders of silos, a transport without a network, and the
simulation of the same with the silos' own keys."""

import csv
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from rich.console import Console

from dpfl_jax.config import load_config, validate_config
from dpfl_jax.config.load import config_to_dict
from dpfl_jax.federation.federated import FederatedAlgorithm, FederatedSteps
from dpfl_jax.federation.isrl.rounds import IsrlAlgorithm, IsrlSteps
from dpfl_jax.federation.isrl.schedule import make_schedule
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.flower.federated import one_device, one_silo_at_a_time, round_key, round_optimizers
from dpfl_jax.flower.isrl import round_words
from dpfl_jax.flower.silo import SiloClient, drawn_key
from dpfl_jax.flower.silo_folder import make_key
from dpfl_jax.flower.wire import unpack
from dpfl_jax.run.pipeline import prepare

QUIET = Console(quiet=True)
NAMES = ("aarau", "bern", "chur")
FEDERATED = {
    "name": "study",
    "data": {
        "source": "csv", "user_column": "person", "silo_column": "hospital",
        "target_column": "sick", "classes": 2, "scale": {"age": [50, 25], "dose": [1, 2]},
    },
    "federation": {
        "silos": 3, "partition": "natural", "rounds": 4, "local_steps": 2,
        "max_silos_per_subject": 1,
    },
    "model": {"kind": "mlp", "options": {"hidden": [4]}},
    "mechanism": {
        "kind": "hi_grad_avg", "sampling_prob": 0.4, "max_records_per_subject": 2, "clip_norm": 1.0,
    },
    "privacy": {"epsilon": 8.0, "delta": 1e-3},
    "train": {"checkpoint_every": 1},
}  # fmt: skip
ISRL = {
    "name": "study",
    "data": {
        "source": "csv", "user_column": None, "silo_column": "hospital",
        "input_columns": ["age", "dose"], "target_column": "sick", "classes": 2,
        "scale": {"age": [50, 25], "dose": [1, 2]},
    },
    "federation": {"silos": 3, "partition": "natural", "rounds": 6},
    "model": {"loss": "logistic", "radius": 3.0},
    "mechanism": {"kind": "minibatch_sgd", "step_size": 0.5},
    "privacy": {"epsilon": 5.0, "delta": 1e-3},
    "train": {"checkpoint_every": 1},
    "execution": {"rounds_per_block": 2},
}  # fmt: skip
POLICY = {
    "epsilon": 8.0, "delta": 1e-3, "total_epsilon": None, "least_noise_multiplier": 0.3,
    "most_rounds": 10, "mechanisms": ["hi_grad_avg"],
}  # fmt: skip


def study(like=FEDERATED, **sections):
    """A study with sections updated."""
    merged = {k: dict(v) if isinstance(v, dict) else v for k, v in like.items()}
    for name, section in sections.items():
        kind = name == "mechanism" and "kind" in section
        if kind or not isinstance(section, dict):
            merged[name] = section
        else:
            merged[name] = {**merged.get(name, {}), **section}
    return merged


def write_tables(folder, sizes=(23, 17, 30), seed=0):
    """A table for each silo, and all of them in one; persons have one to three rows."""
    rng = np.random.default_rng(seed)
    rows = []
    for name, people in zip(NAMES, sizes):
        for i in range(people):
            for _ in range(rng.integers(1, 4)):
                age, dose = rng.uniform(25, 75), rng.uniform(0, 3)
                sick = int(rng.random() < 1 / (1 + np.exp(-(age - 50) / 10)))
                values = [f"{age:.1f}", f"{dose:.2f}", sick]
                rows.append({"hospital": name, "person": f"{name}-{i}", "age": values[0],
                             "dose": values[1], "sick": sick})  # fmt: skip
    for name in (*NAMES, "all"):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(r for r in rows if name in ("all", r["hospital"]))


def make_silos(folder, raw, policy=POLICY, names=NAMES):
    """Writes tables, the study and a folder for each silo; returns the folders by name."""
    folder = pathlib.Path(folder)
    write_tables(folder)
    (folder / "study.yaml").write_text(yaml.safe_dump(raw))
    found = {}
    for name in names:
        found[name] = folder / f"silo-{name}"
        found[name].mkdir()
        make_key(found[name])
        own = {"name": name, "config": "../study.yaml", "data": {"path": f"../{name}.csv"},
               "policy": policy}  # fmt: skip
        (found[name] / "silo.yaml").write_text(yaml.safe_dump(own))
    return found


class Here:
    """A transport to silos in this process; ``seen`` is what crossed it."""

    def __init__(self, silos):
        self.silos, self.seen = silos, []

    def hello(self, request, count, most_s=None):
        return self.ask(dict.fromkeys(self.silos, request))

    def ask(self, requests, most_s=None):
        replies = {}
        for name, request in requests.items():
            if self.silos[name] is None:
                continue
            replies[name] = self.silos[name].answer(request)
            self.seen.append((name, request, replies[name]))
        return replies


def opened(folders):
    """Silos of folders."""
    return {name: SiloClient(folder) for name, folder in folders.items()}


def config_of(folder):
    return load_config(folder / "study.yaml")


def drawn(silo):
    """The key of each round that the silo's only run was asked for."""
    run = next(iter(silo.runs.values()))
    asked = [row for row in silo.log.rows if row["kind"] == "asked"]
    return {row["round"]: drawn_key(run.work.key, row["nonce"]) for row in asked}


def simulated(folder, silos, noise, names=NAMES):
    """The simulation's final parameters, drawn from the silos' keys.

    Args:
      folder: of ``make_silos``.
      silos: by name, after their run.
      noise: of the plan.
    """
    raw = config_to_dict(config_of(folder))
    raw["data"]["path"] = str(folder / "all.csv")
    config = validate_config(raw)
    ready = prepare(config, QUIET)
    if ready.personal is None:
        ready = dataclasses.replace(ready, federation=ready.federation.with_noise(noise))
    keys = [drawn(silos[name]) for name in names]

    class Builder(RoundBuilder):
        def silo_key(self, silo, round_index):
            return round_key(keys[silo][round_index], round_index)

    local, server = round_optimizers(config)
    run = FederatedAlgorithm(
        loss_fn=ready.model.loss,
        params=ready.model.init(jax.random.key(config.init_seed)),
        data=ready.data, federation=ready.federation, local_optimizer=local, delta=ready.delta,
        mesh=one_device(), server=server,
        keep_local_state=config.federation.local_state == "keep",
        execution=one_silo_at_a_time(config),
    )  # fmt: skip
    steps, state = FederatedSteps(run, keys[0][0], 0, builder=Builder), run.init()
    for _, inputs in steps.inputs():
        state, _ = steps.step(state, inputs)
    return jax.device_get(state.params)


def simulated_messages(folder, silos, names=NAMES):
    """The same for a study without a trusted server."""
    raw = config_to_dict(config_of(folder))
    raw["data"]["path"] = str(folder / "all.csv")
    config = validate_config(raw)
    ready = prepare(config, QUIET)
    run = next(iter(silos[names[0]].runs.values()))
    parameters, data = run.work.parameters, ready.records.train
    keys = [next(iter(silos[name].runs.values())).work.key for name in names]
    one_pass = parameters.batches if config.mechanism.sampling == "disjoint" else None
    schedule = make_schedule(
        keys[0], parameters.rounds, np.asarray(data.sizes), one_pass_batch=one_pass,
        most_rounds=config.mechanism.most_rounds, silo_key=lambda i: keys[i],
    )  # fmt: skip
    rounds = [[round_words(key) for key in drawn(silos[name]).values()] for name in names]
    schedule = dataclasses.replace(schedule, keys=jnp.asarray(np.stack(rounds, axis=1)))
    mesh = one_device()
    steps = IsrlSteps(IsrlAlgorithm(config, ready.loss, data, parameters, mesh), keys[0], 0)
    steps.schedule, state = schedule, steps.run.init()
    for _, inputs in steps.inputs():
        state, _ = steps.step(state, inputs)
    return jax.device_get(state.params)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def kind_of(reply):
    return unpack(reply)[0]["kind"]


def why(reply):
    return unpack(reply)[0].get("why", "")
