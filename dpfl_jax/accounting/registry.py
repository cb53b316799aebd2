"""A draft of an entry for a registry of deployments, made from a guarantee.

The fields are those of Nanayakkara, Ghazi and Vadhan (arXiv 2509.13509), with their names in
https://github.com/opendp/deployments-registry-data (deployments-schema.yaml, 2026).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from typing import Any

import yaml

from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.errors import BadInputError

OPEN = "TO FILL IN: "  # prefix of entries that a guarantee does not determine
# Trust model -> its name in the registry.
_MODELS = {"central": "Central", "silo-local": "Federated", "local": "Local", "shuffle": "Shuffle"}
_NOISE = {
    "exact": "Noise is drawn and added in integers, against attacks on floating point.",
    "float": "Noise is drawn in floating point: its low bits are not protected.",
}


class _Dumper(yaml.SafeDumper):
    """``yaml.SafeDumper`` that writes texts of several lines as blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def write_record(record: dict[str, Any]) -> str:
    """Returns a record as YAML for the registry."""
    return yaml.dump(record, Dumper=_Dumper, sort_keys=False, width=100)


def registry_record(stated: Statement, name: str, today: datetime.date) -> dict[str, Any]:
    """Returns a model's entry from its guarantee, with ``OPEN`` where people must fill it in.

    Args:
      stated: the guarantee.
      name: name of the model.
      today: preliminary date of publication.

    Raises:
      BadInputError: the model has no guarantee.
    """
    privacy = stated.privacy
    if not privacy.private:
        raise BadInputError("the model has no guarantee, so a registry has no entry for it")
    epsilon, delta = rounded_up(privacy.epsilon, 6), rounded_up(privacy.delta, 6)
    groups = [
        f"epsilon {rounded_up(group.epsilon, 6)} for {group.of}, at the same delta"
        for group in stated.groups
    ]
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": [OPEN + "who publishes the model"],
                "intended_use": OPEN + "what the model is for",
                "data_product_type": "Machine learning model",
                "data_product_region": OPEN + "whose data these are, or whose laws apply",
                "description": OPEN + "what the model learned, of what data, in a few sentences",
                "publication_date": today.isoformat(),
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": OPEN + "which data sets were possible",
                "unprotected_quantities": _items(privacy.public_inputs) or OPEN + "what was public",
            },
            "privacy_loss": {
                "privacy_unit": privacy.whose,
                "privacy_unit_details": f"Neighbouring data sets differ by: {privacy.adjacency}.",
                "privacy_parameters": {"epsilon": float(epsilon), "delta": float(delta)},
                "privacy_parameters_details": _items(
                    [f"{privacy.status}, computed by: {privacy.accountant}", *groups]
                ),
            },
            "deployment_model": {
                "model_name": _MODELS.get(privacy.trust, "Varies"),
                "model_name_details": f"Trust model: {privacy.trust}.",
                "actors": OPEN + "who sees what, and who is trusted with it",
                "release_type": "One release",
                "release_type_details": f"The guarantee covers {privacy.released}.",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": OPEN + "what was done with the model after training",
                "composition": f"{privacy.steps or 'All'} steps together. Sampling: "
                f"{privacy.sampling}.",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": OPEN
                + "what was done with the data before, how settings were chosen, and whether that "
                "is in epsilon",
                "mechanisms": _items(
                    [
                        f"Gaussian noise, noise multiplier {privacy.noise_multiplier:.7g}, on "
                        "clipped gradients or updates",
                        _NOISE[stated.noise.drawn],
                        f"{stated.library}; `dpfl verify guarantee.json` recomputes the guarantee",
                        *privacy.assumptions,
                        OPEN + "how the data are secured, and who has access",
                    ]
                ),
                "justification": OPEN + "why these parameters, and this unit",
            },
            "administrative": {
                "sources": OPEN + "where the model and its guarantee.json are",
                "notes": _items(privacy.caveats),
                "registry_authors": [OPEN + "who filled in this entry"],
            },
        },
    }


def _items(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
