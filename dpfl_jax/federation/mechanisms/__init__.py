"""What a silo does at a local step: a participation, a clip rule and noise make one value.

``presets`` has the mechanisms that have names, read like the papers' pseudo-code.
"""

from dpfl_jax.federation.mechanisms.mechanism import SiloMechanism
from dpfl_jax.federation.mechanisms.participation import (
    PersonalRecords,
    Records,
    SiloDraw,
    SiloFacts,
    SiloParticipation,
    Subjects,
    WholeBatch,
)
from dpfl_jax.federation.mechanisms.presets import (
    fed_avg,
    hi_grad_avg,
    local_group,
    local_item,
    rpdp,
    subject_uls,
    user_ldp,
)

__all__ = [
    "hi_grad_avg",
    "local_group",
    "subject_uls",
    "user_ldp",
    "local_item",
    "rpdp",
    "fed_avg",
    "SiloMechanism",
    "SiloParticipation",
    "Records",
    "Subjects",
    "WholeBatch",
    "PersonalRecords",
    "SiloFacts",
    "SiloDraw",
]
