"""A run that is attacked: what can be proved of its epsilon, beside what it promises.

Canaries are users who are nobody, in or out by coins. An attacker who sees every release guesses
which were in. The model and the guarantee for people are the same without them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import dpfl_jax as dpfl


def loss(params: Any, example: Any) -> Any:
    """Half the squared error of a line."""
    return 0.5 * (example["x"] @ params["w"] - example["y"]) ** 2


def main(
    people: int = 400, steps: int = 20, canaries: int = 1000, key: dpfl.RootKey | None = None
) -> list[Any]:
    """Trains on three rows of each person, and prints what the attack found."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3 * people, 4)).astype("float32")
    y = x @ np.array([1.0, -2.0, 0.5, 0.0], "float32")
    data = dpfl.from_arrays({"x": x, "y": y}, users=np.arange(3 * people) % people)
    mechanism = dpfl.uls(group_size=3, cohort_size=people / 5)
    plan = mechanism.plan(data, steps=steps, epsilon=4.0, delta=1e-4)
    result = dpfl.fit(
        loss,
        {"w": jnp.zeros(4)},
        plan,
        optax.sgd(0.3),
        audit=dpfl.AuditConfig(canaries=canaries),
        key=key,
    )
    print(result.guarantee)
    if result.audit is None:
        raise SystemExit("interrupted")
    audits = result.audit.audits(plan.statement(result.guarantee, result.accounted))
    for found in audits:
        print(f"promised: epsilon {found.claimed:.2f} at most; proved: {found.proved:.2f} at least")
        print("the promise is broken" if found.exceeds else "the promise stands")
    return audits


if __name__ == "__main__":
    main()
