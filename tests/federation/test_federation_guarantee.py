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


@pytest.mark.parametrize(("kind", "given"), [("hi_grad_avg", 30), ("hi_grad_avg", None),
                                             ("local_item", 30)])  # fmt: skip
def test_a_large_delta_is_named(kind, given):
    data = make_data()
    federation = make_federation(data, MECHANISMS[kind], uneven=False)
    fewest = max(silo.num_subjects for silo in data.silos)  # more than all silos' over H
    what = f"{data.num_records} records" if kind == "local_item" else f"{given or fewest} subjects"
    for delta, said in ((0.5, True), (1e-3, False)):
        guarantee = federated_guarantee(federation, GIVEN, delta, 2, num_subjects=given)
        assert any(f"not below one over the {what}" in c for c in guarantee.caveats) is said
