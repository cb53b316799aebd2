"""Which keys go with which kind of mechanism, and which defaults depend on it.

``mechanism.kind`` selects the variant of a run: ``central``, ``silos`` (which train locally), or
``isrl`` (silos that trust no server). A key that is not named here belongs to all three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel

from dpfl_jax.config.kinds import CENTRAL, ISRL, PARTICIPATIONS, SILO_PARTICIPATIONS, SILOS, Kinds
from dpfl_jax.data.sections import DataConfig
from dpfl_jax.errors import BadInputError, nearest

Variant = Literal["central", "silos", "isrl"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

# In the order in which they are searched, so that a central run imports no federation.
MECHANISMS: dict[Variant, Kinds] = {"central": CENTRAL, "isrl": ISRL, "silos": SILOS}
_PARTICIPATIONS: dict[Variant, Kinds] = {"central": PARTICIPATIONS, "silos": SILO_PARTICIPATIONS}

_KEYS = {
    ("central",): """
        population pretrain optimizer sweep audit
        data.test_fraction data.held_out_max data.public
        model.size model.checkpoint model.overrides model.lora model.trainable model.last_layers
        model.frozen_dtype model.dpo
        train.steps train.log_every
        execution.attention execution.group_buckets execution.packing execution.examples_at_once
        execution.split_users execution.sum_over_fsdp execution.mesh
        eval.split eval.personalize eval.prompt
    """,
    ("silos",): """
        federation.alpha federation.partition_seed federation.local_steps
        federation.participation_prob federation.max_silos_per_subject federation.local_optimizer
        federation.local_state federation.server_optimizer
        privacy.budgets privacy.policy privacy.unreachable
        execution.width execution.chunk_silos
    """,
    ("isrl",): """
        data.public_fraction data.max_norm data.max_target
        model.loss model.regularization model.radius model.smoothing
        federation.silos_law
        execution.rounds_per_block
    """,
    ("central", "silos"): """
        init_seed data.split privacy.noise_multiplier model.kind model.module model.options
        model.augmentation
        execution.microbatch_size execution.strategy
        eval.batch_size eval.max_users eval.max_examples_per_user
        train.average train.ema_decay
    """,
    ("silos", "isrl"): "federation",
}
_OWNERS = {key: variants for variants, keys in _KEYS.items() for key in keys.split()}

# Defaults of a variant that differ from the section's class.
_DEFAULTS: dict[Variant, dict[str, Any]] = {
    "central": {},
    "silos": {
        "data.validation_fraction": 0.2,
        "model.kind": "mlp",
        "train.checkpoint_every": 5,
        "execution.microbatch_size": 32,
        "eval.batch_size": 256,
    },
    "isrl": {
        "data.source": "digits",
        "data.validation_fraction": 0.2,
        "data.public_fraction": 0.1,
        "federation.silos": 5,
        "privacy.epsilon": 3.0,
        "train.checkpoint_every": 2,
    },
}
REQUIRED: dict[Variant, tuple[str, ...]] = {
    "central": ("data", "train.steps"),
    "silos": ("federation.rounds", "federation.local_steps"),
    "isrl": (),
}
# Allowed values that depend on the variant.
VALUES: dict[str, dict[Variant, tuple[str, ...]]] = {
    "federation.partition": {
        "silos": ("uniform", "power", "confined", "natural", "labels"),
        "isrl": ("uniform", "sorted", "natural", "pairs"),
    }
}
_WORDS: dict[str, str] = {
    "central": "data in one place (mechanism.kind=uls or els, for example)",
    "silos": "silos that train locally (mechanism.kind=hi_grad_avg, for example)",
    "isrl": "silos that trust no server (mechanism.kind=minibatch_sgd, for example)",
}


def variant_of(mechanism: Any) -> Variant:
    """The variant of a mechanism, or of the section that describes one.

    Raises:
      BadInputError: neither its kind nor that of its participation is known.
    """
    for variant, kinds in MECHANISMS.items():
        if kinds.has_made(mechanism):
            return variant
    if not isinstance(mechanism, Mapping):
        raise BadInputError(f"mechanism is {mechanism!r}, but it must hold kind and its fields")
    key, kind, tables = "mechanism.kind", mechanism.get("kind"), MECHANISMS
    part = mechanism.get("participation")
    if kind is None and isinstance(part, Mapping):
        key, kind, tables = "mechanism.participation.kind", part.get("kind"), _PARTICIPATIONS
    for variant, kinds in tables.items():
        if kind in kinds:
            return variant
    names = {name for kinds in tables.values() for name in kinds.names()}
    if kind is None:
        raise BadInputError(f"{key} is missing: give one of {', '.join(sorted(names))}")
    if ":" in str(kind):
        raise BadInputError(f"{key} is {kind!r}, which is not a mechanism, or was not imported")
    raise BadInputError(f"{key} is {kind!r}: {nearest(str(kind), names)}")


def parse_mechanism(section: Any) -> Any:
    """The mechanism, of any variant, that a section describes."""
    return MECHANISMS[variant_of(section)].parse(section)


def takes(variant: Variant, key: str) -> bool:
    """Whether ``key``, a section or ``section.name``, goes with a variant."""
    section = key.partition(".")[0]
    return all(variant in _OWNERS.get(name, VARIANTS) for name in (section, key))


def complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a configuration with the defaults of its variant.

    Raises:
      BadInputError: a key of another variant, or a value that this one does not have.
    """
    raw = {section: _as_mapping(value) for section, value in raw.items()}
    variant, named = variant_of(raw["mechanism"]), _named(raw["mechanism"])
    for key in _keys(raw):
        if not takes(variant, key):
            whole = key.partition(".")[0]
            owners = _OWNERS[key if takes(variant, whole) else whole]
            raise BadInputError(
                f"{key} is for {' and for '.join(_WORDS[one] for one in owners)}, but {named}: "
                "remove it, or take another mechanism"
            )
    result = {**raw}
    for key, known in VALUES.items():
        section, _, name = key.partition(".")
        inside = result.get(section)
        value = inside.get(name) if isinstance(inside, Mapping) else None
        everywhere = [one for values in known.values() for one in values]
        if value in everywhere and value not in known[variant]:
            raise BadInputError(
                f"{key} is {value!r}, but {named}: take one of {', '.join(known[variant])}"
            )
    defaults = dict(_DEFAULTS[variant])
    data, model = raw.get("data"), raw.get("model", {})
    table = isinstance(data, Mapping) and data.get("target_column") is not None
    if table and variant == "central" and "model" not in raw:
        defaults["model.kind"] = "linear"
    if isinstance(model, Mapping) and model.get("module") is not None:
        defaults.pop("model.kind", None)
    for key, value in defaults.items():
        section, _, name = key.partition(".")
        inside = result.get(section, {})
        if isinstance(inside, Mapping):
            result[section] = {name: value, **inside}
    return result


def _as_mapping(section: Any) -> Any:
    """The keys that were set of a section object, as a dict; other values are returned as is."""
    if isinstance(section, BaseModel):
        return {name: getattr(section, name) for name in section.model_fields_set}
    if isinstance(section, DataConfig):
        usual = {f.name: f.default for f in dataclasses.fields(section)}
        values = {name: getattr(section, name) for name in usual}
        return {name: value for name, value in values.items() if value != usual[name]}
    return section


def keys_of_variant(raw: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """The keys of a whole configuration that a variant takes."""
    result: dict[str, Any] = {}
    for section, values in raw.items():
        if not takes(variant, section):
            continue
        if isinstance(values, Mapping):
            kept = {name: v for name, v in values.items() if takes(variant, f"{section}.{name}")}
            result[section] = kept
        else:
            result[section] = values
    return result


def _keys(raw: Mapping[str, Any]) -> Iterator[str]:
    for section, values in raw.items():
        yield str(section)
        for name in values if isinstance(values, Mapping) else ():
            yield f"{section}.{name}"


def _named(mechanism: Any) -> str:
    """The key that selects the variant, in words."""
    if not isinstance(mechanism, Mapping):
        return f"mechanism is {mechanism.kind}"
    if (kind := mechanism.get("kind")) is not None:
        return f"mechanism.kind is {kind}"
    return f"mechanism.participation.kind is {mechanism['participation'].get('kind')}"
