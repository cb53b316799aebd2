"""For tests of users with budgets of their own: gradients of known norms, and a run's steps."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpfl_jax.config.execution import Execution
from dpfl_jax.data import ArrayStore
from dpfl_jax.experimental import individual, individual_els
from dpfl_jax.mechanisms.plan.batches import step_arguments
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import PoissonWithDropout
from dpfl_jax.training.filtered import Filtered, FilteredSteps, Spending

SIZES = np.array([0.02, 0.1, 0.3, 0.6, 0.95, 5.0])  # of gradients, over the clip norm


def loss_fn(params, example):
    """Its gradient is the example, whatever the parameters are."""
    return jnp.sum(params["w"] * example["x"])


def curved(params, example):
    return loss_fn(params, example) + 0.5 * jnp.sum(params["w"] ** 2)


def of_sizes(users, sizes=SIZES):
    """Users of one example, whose gradients have these norms in turns; and the norms, in order."""
    own = np.resize(sizes, users)
    rows = {f"u{u:03d}": {"x": np.float32([[own[u], 0.0]])} for u in range(users)}
    store = ArrayStore.from_users(rows.items())
    order = [int(name[1:]) for name in store.user_ids(np.arange(users))]
    return store, own[order]


def made(data, steps=40, key=0, execution=None, loss=loss_fn, width=2, kind=individual, **fields):
    """The steps of a run, and its plan; nothing is taken."""
    size = {"cohort_size": len(data.user_offsets) / 4}
    if kind is individual_els:
        size = {"batch_size": data.user_offsets[-1] / 4}
    fields = {"group_size": 2, "refresh": 5} | size | fields
    sigma = fields.pop("noise_multiplier", 1.0)
    mechanism = kind(**{"least_steps": 6} | fields)
    execution = execution or Execution(microbatch_size=8)
    plan = mechanism.plan(
        data, steps=steps, noise_multiplier=sigma, delta=1e-3, execution=execution
    )
    run = Filtered(loss, {"w": jnp.zeros(width)}, plan, optax.set_to_zero())
    run.begin(RootKey.from_seed(key), 0)
    return FilteredSteps(run, RootKey.from_seed(key), 0), plan


def taken(steps):
    """Of a run whose model stays as it is: (users drawn, levels, clipped sum) of each step."""
    drawn, indices, found = {}, PoissonWithDropout.indices, []

    def noted(self, key, step, population):
        drawn[step] = indices(self, key, step, population)
        return drawn[step]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoissonWithDropout, "indices", noted)
        for number, batch in steps.inputs():
            arguments = step_arguments(steps.run.mechanism, batch)
            total, _ = steps.compiled.sum(steps.params, *arguments, steps.run.frozen)
            levels = Spending.decrypt(
                steps.encrypted, steps.key, (number - 1) // steps.run.every
            ).levels
            found.append((drawn[number - 1], levels, np.asarray(total["w"])))
    return found
