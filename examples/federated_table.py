"""Hospitals train one model on their tables; a patient may be in several of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax import federation as fl

PATIENTS, HOSPITALS, CAP = 600, 4, 3
SLOPE = np.array([1.0, -1.0, 0.5], np.float32)


def loss(params: dict[str, jax.Array], record: dict[str, jax.Array]) -> jax.Array:
    """Of one visit: squared error of a linear model."""
    return 0.5 * (record["x"] @ params["w"] - record["y"]) ** 2


def visits(seed: int = 0) -> fl.FederatedData:
    """Of a patient, at most ``CAP`` visits in each hospital are used."""
    rng = np.random.default_rng(seed)
    patient = rng.integers(PATIENTS, size=3000)
    hospital = (patient + rng.integers(2, size=3000)) % HOSPITALS  # one of two
    x = rng.normal(size=(3000, 3)).astype(np.float32)
    keep = fl.cap_per_subject(patient, hospital, np.arange(PATIENTS, dtype=np.uint64), CAP)
    records = fl.ArrayRecords({"x": x, "y": x @ SLOPE})
    return fl.FederatedData.from_assignment(records, patient, hospital, HOSPITALS, keep)


def main(rounds: int = 15) -> Any:
    """Calibrates, trains, and prints what was learnt and what it cost a patient."""
    data, delta = visits(), 1e-4
    mechanism = fl.hi_grad_avg(sampling_prob=0.2, max_records_per_subject=CAP, clip_norm=1.0)
    silos = tuple(
        fl.SiloPlan(mechanism, fl.SiloFacts.of(silo), local_steps=2) for silo in data.silos
    )
    federation = fl.calibrate_federation(
        fl.Federation(silos, rounds, max_silos_per_subject=2), epsilon=8.0, delta=delta
    )
    start = {"w": jnp.zeros(3)}
    result = fl.run_rounds(
        loss_fn=loss, params=start, data=data, federation=federation,
        local_optimizer=optax.sgd(0.3), delta=delta, show_spent=False,
    )  # fmt: skip
    print(f"learnt {np.round(result.params['w'], 2)}, of {SLOPE}")
    print(f"epsilon of a patient: {fl.federated_epsilon(federation, delta, rounds):.3f}")
    return result


if __name__ == "__main__":
    main()
