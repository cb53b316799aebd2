"""What a federated run's guarantee says: numbers with their units, and what it rests on."""

import math

import pytest
from fed_zoo import MECHANISMS, make_data, make_federation

from dpfl_jax.accounting import IDEALISED
from dpfl_jax.federation.guarantee import federated_guarantee
from dpfl_jax.federation.recipes import Claim

pytestmark = pytest.mark.privacy
GIVEN = Claim("given", math.inf, 1e-5, math.inf, math.inf, 2, 2)


def test_every_guarantee_says_what_is_idealised():
    data = make_data()
    for kind in ("hi_grad_avg", "local_item"):
        federation = make_federation(data, MECHANISMS[kind], uneven=False)
        guarantee = federated_guarantee(federation, GIVEN, 1e-5, 2)
        assert guarantee.assumptions.count(IDEALISED) == 1
