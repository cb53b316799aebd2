"""Privacy accounting: what a mechanism guarantees, and how much noise a guarantee needs. No JAX.

``events`` says what a mechanism does to one privacy unit. ``epsilon``, ``delta`` and
``epsilon_curve`` bound what that costs, by privacy-loss distributions. ``calibrate_*`` find the
parameters for a target. ``Guarantee`` is the answer with everything needed to judge it.

Examples:
  >>> from dpfl_jax import accounting
  >>> event = accounting.events.uls(noise_multiplier=1.0, sampling_prob=0.01, steps=1000)
  >>> round(accounting.epsilon(event, delta=1e-5), 3)
  1.828
"""

from dpfl_jax.accounting import events
from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    REPLACE,
    accountant_of,
    check_delta,
    delta,
    delta_curve,
    epsilon,
    epsilon_curve,
    epsilon_table,
    epsilons_midway,
)
from dpfl_jax.accounting.attacks import Meaning, meaning, plot_attacks
from dpfl_jax.accounting.calibrate import (
    calibrate_group_size,
    calibrate_noise_multiplier,
    calibrate_sampling_prob,
    calibrate_steps,
)
from dpfl_jax.accounting.drawn import (
    IDEALISED,
    IDEALISED_FLOAT,
    MOST_COORDINATES,
    NoiseLaw,
    noise_assumptions,
)
from dpfl_jax.accounting.guarantee import Guarantee, delta_caveats
from dpfl_jax.accounting.ledger import (
    Account,
    BudgetExceededError,
    Ledger,
    LedgerError,
    Reservation,
)

__all__ = [
    "epsilon",
    "delta",
    "Guarantee",
    "events",
    "epsilon_curve",
    "delta_curve",
    "epsilon_table",
    "epsilons_midway",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "calibrate_sampling_prob",
    "calibrate_group_size",
    "meaning",
    "Meaning",
    "plot_attacks",
    "Ledger",
    "Account",
    "Reservation",
    "LedgerError",
    "BudgetExceededError",
    "accountant_of",
    "check_delta",
    "delta_caveats",
    "noise_assumptions",
    "NoiseLaw",
    "ADD_OR_REMOVE",
    "REPLACE",
    "IDEALISED",
    "IDEALISED_FLOAT",
    "MOST_COORDINATES",
]
