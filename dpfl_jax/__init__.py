"""dpfl_jax: training with differential privacy for people, at datacenter speed.

    import dpfl_jax as dpfl

A *mechanism* (``els``, ``uls``, ``bandmf``, ``blt``, ``allocation``, ...) joins sampling, clipped
gradients, noise and accounting; its *plan* for a data set, a number of steps and a target is what
can be run and accounted; ``fit`` runs it; ``clipped_grad`` is useful alone; ``accounting`` needs no
JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0.dev0"

# Module -> its public names, imported on first use, so that `dpfl --help` does not start JAX.
_NAMES = {
    "accounting": "Guarantee",
    "clipping": "ClippedGradResult clipped_fun clipped_grad",
    "config": "AuditConfig",
    "config.execution": "Execution",
    "data": "ArrayStore DataConfig from_arrays from_grain from_huggingface from_pandas from_rows "
    "from_texts load_dataset",
    "errors": "BadInputError",
    "mechanisms": "Mechanism Population allocation banded_inverse bandmf blt els "
    "non_private owner_sets truncated uls",
    "mechanisms.plan": "Plan",
    "models": "LanguageModel transformer_config",
    "models.batch_norm": "without_batch_norm",
    "randomness": "RootKey",
    "run.driver": "Hooks LoopConfig",
    "training": "FitResult fit",
    "training.export": "export",
    "training.exported": "load_exported",
    "training.modules": "functional",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "clipped_grad",
    "clipped_fun",
    "ClippedGradResult",
    "uls",
    "els",
    "bandmf",
    "blt",
    "banded_inverse",
    "allocation",
    "truncated",
    "owner_sets",
    "non_private",
    "Mechanism",
    "Population",
    "Plan",
    "Guarantee",
    "fit",
    "FitResult",
    "LoopConfig",
    "Hooks",
    "Execution",
    "AuditConfig",
    "RootKey",
    "functional",
    "without_batch_norm",
    "export",
    "load_exported",
    "from_arrays",
    "from_texts",
    "from_rows",
    "from_pandas",
    "from_huggingface",
    "from_grain",
    "load_dataset",
    "DataConfig",
    "ArrayStore",
    "LanguageModel",
    "transformer_config",
    "accounting",
    "experimental",
    "BadInputError",
]

if TYPE_CHECKING:
    from dpfl_jax import accounting, experimental
    from dpfl_jax.accounting import Guarantee
    from dpfl_jax.clipping import ClippedGradResult, clipped_fun, clipped_grad
    from dpfl_jax.config import AuditConfig
    from dpfl_jax.config.execution import Execution
    from dpfl_jax.data import (
        ArrayStore,
        DataConfig,
        from_arrays,
        from_grain,
        from_huggingface,
        from_pandas,
        from_rows,
        from_texts,
        load_dataset,
    )
    from dpfl_jax.errors import BadInputError
    from dpfl_jax.mechanisms import (
        Mechanism,
        Population,
        allocation,
        banded_inverse,
        bandmf,
        blt,
        els,
        non_private,
        owner_sets,
        truncated,
        uls,
    )
    from dpfl_jax.mechanisms.plan import Plan
    from dpfl_jax.models import LanguageModel, transformer_config
    from dpfl_jax.models.batch_norm import without_batch_norm
    from dpfl_jax.randomness import RootKey
    from dpfl_jax.run.driver import Hooks, LoopConfig
    from dpfl_jax.training import FitResult, fit
    from dpfl_jax.training.export import export
    from dpfl_jax.training.exported import load_exported
    from dpfl_jax.training.modules import functional


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"dpfl_jax.{_HOMES[name]}"), name)
    if name in ("accounting", "experimental"):
        return importlib.import_module(f"dpfl_jax.{name}")
    raise AttributeError(f"module 'dpfl_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists names that are not yet imported, too, so that notebooks complete them."""
    return sorted({*globals(), *__all__})
