"""What a mechanism guarantees, and the noise a guarantee needs. Imports no JAX.

``events`` says what a mechanism does to one privacy unit; ``epsilon``, ``delta`` and
``epsilon_curve`` bound what that costs (privacy-loss distributions); ``calibrate_*`` find the
parameters for a target; ``Guarantee`` is the answer with everything needed to judge it.
"""

from dpfl_jax.accounting import events
from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    REPLACE,
    accountant_of,
    check_delta,
    delta,
    delta_curve,
    els_epsilons,
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
    "ADD_OR_REMOVE",
    "IDEALISED",
    "IDEALISED_FLOAT",
    "MOST_COORDINATES",
    "REPLACE",
    "Account",
    "BudgetExceededError",
    "Guarantee",
    "Ledger",
    "LedgerError",
    "Meaning",
    "NoiseLaw",
    "Reservation",
    "accountant_of",
    "calibrate_group_size",
    "calibrate_noise_multiplier",
    "calibrate_sampling_prob",
    "calibrate_steps",
    "check_delta",
    "delta",
    "delta_caveats",
    "delta_curve",
    "els_epsilons",
    "epsilon",
    "epsilon_curve",
    "epsilon_table",
    "epsilons_midway",
    "events",
    "meaning",
    "noise_assumptions",
    "plot_attacks",
]
