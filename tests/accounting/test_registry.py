"""An entry for a registry of deployments has its fields, and says what guarantee.json does."""

import datetime

import pytest
import yaml

from dpfl_jax.accounting.registry import OPEN, registry_record, write_record
from dpfl_jax.errors import BadInputError
from tests.statements import SOUND

# Of deployments-schema.yaml (github.com/opendp/deployments-registry-data, 3e9c812): additional
# properties are refused there, and those with a star are required.
FIELDS = {
    "basic": "name* data_curators* description* intended_use* data_product_type* "
    "data_product_region* publication_date* data_product_sector",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name model_name_details actors release_type release_type_details "
    "data_source_type data_source_type_details access_type access_type_details",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "sources notes registry_authors*",
}
MODELS = ("Local", "Central", "Shuffle", "Federated", "Varies")


@pytest.mark.parametrize("name", [name for name in SOUND if name not in ("none", "fed_avg")])
def test_an_entry_is_one_of_the_registry(name):
    stated = SOUND[name]()
    record = registry_record(stated, "My model, 2", datetime.date(2026, 11, 27))
    assert yaml.safe_load(write_record(record)) == record
    assert set(record) == {"url_slug", "status", "tier", "deployment"}
    assert (record["url_slug"], record["status"], record["tier"]) == ("my-model-2", "Draft", 3)
    parts = record["deployment"]
    assert set(parts) == set(FIELDS)
    for part, words in FIELDS.items():
        known = {word.strip("*"): word.endswith("*") for word in words.split()}
        assert set(parts[part]) <= set(known), part
        assert {one for one, is_required in known.items() if is_required} <= set(parts[part]), part
    said = parts["privacy_loss"]["privacy_parameters"]
    assert set(said) == {"epsilon", "delta"}
    assert stated.privacy.epsilon <= said["epsilon"] <= stated.privacy.epsilon * (1 + 1e-4)
    assert stated.privacy.delta <= said["delta"] <= stated.privacy.delta * (1 + 1e-4)
    assert parts["deployment_model"]["model_name"] in MODELS
    assert stated.privacy.adjacency in parts["privacy_loss"]["privacy_unit_details"]
    assert stated.library in parts["implementation"]["mechanisms"]
    assert all(caveat in parts["administrative"]["notes"] for caveat in stated.privacy.caveats)
    assert parts["basic"]["intended_use"].startswith(OPEN)


def test_what_has_no_guarantee_has_no_entry():
    with pytest.raises(BadInputError, match="the model has no guarantee"):
        registry_record(SOUND["none"](), "a model", datetime.date(2026, 11, 27))
