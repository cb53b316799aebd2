"""The terms of a run: what its guarantee follows from, and what its draws are made for.

Two runs that shared a key would add the same noise to different sums, and the difference of what
they release would be somebody's gradient. So draws come from the root key *and* the terms: only a
run with equal terms draws the same noise again. A resumed run is compared with the terms that it
began with, as its guarantee would not cover others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax import __version__
from dpfl_jax.clipping import join
from dpfl_jax.clipping.isolation import refuse_opaque
from dpfl_jax.clipping.jaxprs import every_program
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.state import content_digest

# Terms of which only a digest is kept. Refusals name them last: they differ if another one does.
_UNSPOKEN = {
    "data": "the training data are",
    "frozen": "the parameters that are not trained are",
    "plan": "what the silos do is",
    "code": "the code of the mechanism's own parts (package.module:NAME) is",
    "execution": "how steps are computed (execution, devices) is",
    "computation": "the loss, the set of trained parameters or the optimiser is",
}
PUBLIC_KEY_CAVEAT = (
    "sampling and noise come from a seed written in the configuration: the guarantee holds only "
    "against those who do not know it, and for one run alone, as two runs with one seed add the "
    "same noise (leave seed unset for a release)"
)


@dataclasses.dataclass(frozen=True)
class Terms:
    """What identifies a run.

    Attributes:
      stated: name -> plain JSON: mechanism, population, delta, steps. The report has them, too.
      secret: name -> digest of what may depend on the data, or a function from the root key to
        such a digest; only a digest under the key is written.
    """

    stated: Mapping[str, Any]
    secret: Mapping[str, str | Callable[[RootKey], str]]

    def sealed(self, root: RootKey) -> dict[str, Any]:
        """The terms as plain JSON, with digests under the key for what is secret."""
        made = {name: v(root) if callable(v) else v for name, v in self.secret.items()}
        secret = {name: root.keyed_digest(name, value) for name, value in made.items()}
        return json.loads(json.dumps({**self.stated, **secret}, sort_keys=True))


def secret_of_code(digests: Sequence[str]) -> dict[str, str]:
    """The secret term of parts outside of the library (from ``code_outside``); {} without any.

    Changed code under the same name is another mechanism: it must not draw the same noise, nor
    resume the run.
    """
    return {"code": value_digest(list(digests))} if digests else {}


def begin(
    terms: Terms,
    root: RootKey,
    run_dir: RunDirectory | None,
    hardware: str | None,
    done: int | None,
    start: Callable[[], str],
    layout: Any = None,
) -> tuple[RootKey, dict[str, Any]]:
    """Compares a run with what it began with; returns the key of its draws, and its sealed terms.

    Args:
      terms: the terms of this run.
      root: its root key.
      run_dir: its directory, if it has one.
      hardware: what the run is computed with. On other hardware a loss may trace to another
        computation; the rest of the run then draws anew, unless it would repeat steps that may
        have been released. None: another computation is refused.
      done: step of the checkpoint to resume from; None if there is no checkpoint.
      start: returns a digest of the parameters before the first step.
      layout: settings that change only rounding (strategy, devices): two runs with one key that
        differ only in them draw independently, too. A resumed run keeps its first layout.

    Raises:
      BadInputError: the run began with other terms (the sentence names the first that differs), or
        steps that it may have released would be taken again with other draws.
    """
    sealed, streams = terms.sealed(root), random_streams()
    known: dict[str, Any] = {} if run_dir is None else run_dir.facts
    if "terms" in known:
        moved = hardware is not None and hardware not in known.get("hardware", [hardware])
        refuse_other(
            known["terms"],
            sealed,
            f"the run in {run_dir.path}",  # type: ignore[union-attr]
            moved,
        )
    first: dict[str, Any] = known.get("start", {})
    if done is None or "start" not in known:
        params = root.keyed_digest("start", start())
        if first.get("params") != params:
            first = {"params": params, "layout": root.keyed_digest("layout", repr(layout))}
    if run_dir is not None and "terms" in known:
        started = known.get("start") != first
        traced = not root.public and known["terms"] != sealed  # a public key draws the same
        other = known.get("streams", streams) != streams
        if (started or traced or other) and (
            run_dir.released is None or run_dir.released > (done or 0)
        ):
            _refuse_to_draw_anew(run_dir, done or 0, started, streams if other else None)
    if run_dir is not None:
        run_dir.note("terms", sealed)
        run_dir.note("start", first)
        run_dir.note("streams", streams)
    # A public key hides nothing, and whoever compares runs under one seed wants equal draws.
    if root.public:
        return root, sealed
    text = json.dumps([sealed, first, streams], sort_keys=True)
    return root.child("run:" + hashlib.sha256(text.encode()).hexdigest()), sealed


def random_streams() -> str:
    """What draws depend on besides keys: the versions of this package and NumPy, JAX's threefry.

    Another version of this package may also sum or clip differently: the difference of two releases
    with the same noise would then show data.
    """
    partitionable = jax.config.jax_threefry_partitionable
    numpy = f"numpy {np.__version__} with jax_threefry_partitionable={partitionable}"
    return f"dpfl_jax {__version__} and {numpy}"


def _refuse_to_draw_anew(
    run_dir: RunDirectory, done: int, params: bool, streams: str | None
) -> NoReturn:
    """A guarantee counts each step once, so a released step is only repeated with equal draws."""
    cause = (
        "the first parameters are not those that it began with: give the same again (with a model "
        "whose init has a fixed seed)"
    )
    if streams is not None:
        cause = f"random numbers are those of {streams} here: go on with {run_dir.facts['streams']}"
    elif not params:
        used = " or ".join(run_dir.facts.get("hardware", ["what it began with"]))
        cause = f"the loss or the optimiser traces to another computation here: go on with {used}"
    most = "an unknown number of" if run_dir.released is None else f"up to {run_dir.released}"
    raise BadInputError(
        f"the run in {run_dir.path} resumes after {done} steps, was killed after {most} steps, "
        "and what it released between would be released a second time, by other steps, and counted "
        f"once, since {cause}, or start another run in another run directory (what two runs spend "
        "adds up)"
    )


def refuse_other(
    began: Mapping[str, Any], now: Mapping[str, Any], what: str, moved: bool = False
) -> None:
    """Raises BadInputError if two sealed terms differ.

    Args:
      began: the terms that a run or checkpoint began with.
      now: the terms of the run that is asked for.
      what: the run or checkpoint that has ``began``, in words.
      moved: whether to ignore a change of the computation, which may trace to something else on
        other hardware or with another JAX.
    """
    for name in sorted({*began, *now}, key=lambda name: (name in _UNSPOKEN, name)):
        if began.get(name) == now.get(name) or (moved and name == "computation"):
            continue
        before, after = began.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            part = next(k for k in sorted({*before, *after}) if before.get(k) != after.get(k))
            name, before, after = f"{name}.{part}", before.get(part), after.get(part)
        shown = f"{name} is {after}, but {what} began with {before}"
        if name in _UNSPOKEN:
            shown = f"{_UNSPOKEN[name]} not what {what} began with"
        raise BadInputError(
            f"{shown}: its guarantee would not be that of what ran; give the same again, or start "
            "another run in another run directory (what two runs spend adds up)"
        )


def value_digest(value: Any) -> str:
    """Returns a digest of a value made of dataclasses, containers, arrays, strings, numbers."""
    if dataclasses.is_dataclass(value):
        parts: list[Any] = [type(value).__name__]
        for field in dataclasses.fields(value):
            parts += [field.name, value_digest(getattr(value, field.name))]
    elif isinstance(value, Mapping):
        parts = ["{}", *(f"{k!r}: {value_digest(v)}" for k, v in value.items())]
    elif isinstance(value, (list, tuple)):
        parts = ["[]", *map(value_digest, value)]
    elif isinstance(value, jax.Array) and not value.is_fully_addressable:
        parts = [content_digest(value)]
    elif isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        parts = [repr(value.dtype), value_digest(jax.random.key_data(value))]
    elif isinstance(value, (np.ndarray, jax.Array)):
        array = np.ascontiguousarray(value)
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        parts = [str(array.dtype), repr(array.shape), hashlib.sha256(content).hexdigest()]
    else:
        parts = [repr(value)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def computation_digest(function: Callable[..., Any], *args: Any) -> str:
    """Returns a digest of what a function traces to: operations, and values of constants.

    Args:
      function: it is traced, not run.
      *args: pytrees of arrays or ShapeDtypeStructs, of which only shapes and dtypes count.
    """
    text, constants = traced_parts(function, *args)
    result = hashlib.sha256(text.encode())
    for constant in constants:
        if isinstance(constant, jax.core.Tracer):  # under a transformation: it has no value yet
            constant = repr(constant.aval)
        result.update(value_digest(constant).encode())
    return result.hexdigest()


def traced_parts(function: Callable[..., Any], *args: Any) -> tuple[str, list[Any]]:
    """What a function traces to: its operations as text, and the arrays it has captured.

    Raises:
      BadInputError: part of it cannot be traced (``clipping.isolation.refuse_opaque``).
    """
    traced = jax.make_jaxpr(function)(*jax.tree.map(shape_of, args))
    # Without addresses of functions, and without the colours of terminals and notebooks.
    text = re.sub(r" at 0x[0-9a-f]+", "", traced.jaxpr.pretty_print(use_color=False))
    programs = list(every_program(traced))
    refuse_opaque(traced, "the loss (or the optimiser)")
    return text, [constant for program in programs for constant in getattr(program, "consts", ())]


def training_digest(
    loss_fn: Callable[..., Any], trained: Any, frozen: Any, example: Any, optimizer: Any
) -> str:
    """Returns a digest of loss, gradient (which may have custom rules) and optimiser.

    Args:
      loss_fn: ``(params, example) -> scalar``.
      trained: pytree of arrays or ShapeDtypeStructs (see ``clipping.split``).
      frozen: pytree of arrays or ShapeDtypeStructs.
      example: pytree of arrays or ShapeDtypeStructs: one example.
      optimizer: an Optax transformation.

    Raises:
      BadInputError: part of it cannot be traced (``traced_parts``).
    """
    update = optax.with_extra_args_support(optimizer).update

    def trains(trained: Any, frozen: Any, example: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda p: loss_fn(join(p, frozen), example))(trained)
        state = optimizer.init(trained)
        return value, update(gradient, state, trained, noise_stddev=0.0)

    return computation_digest(trains, trained, frozen, example)


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array or a number."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
