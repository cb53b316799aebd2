"""What each cell of a plan costs, and whether it fits a device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dpfl_jax.errors import BadInputError
from dpfl_jax.planning.bill import GPU_BYTES, Chip, expected_rows
from dpfl_jax.planning.candidates import CANDIDATES, at_budget, draws_examples, plain
from dpfl_jax.training import slices

_COMPILED = 3  # rows of the table, from the top, that are compiled


@dataclasses.dataclass(frozen=True)
class Start:
    """Data, model and starting parameters of a configuration, read once and only if asked for."""

    config: Any
    console: Any

    @functools.cached_property
    def data(self) -> Any:
        """(data set, model)."""
        from dpfl_jax.training.central_run import read_data

        return read_data(self.config, self.console)

    @functools.cached_property
    def params(self) -> Any:
        """Parameters before the first step."""
        from dpfl_jax.mesh import make_mesh
        from dpfl_jax.training.start import starting_params

        data, model = self.data
        return starting_params(self.config, data, model, make_mesh(), self.console)[0]


def prices(
    start: Start,
    chip_name: str,
    console: Any,
    *,
    mfu: float | None = None,
    price: float | None = None,
    watts: float | None = None,
    vocab: int | None = None,
) -> Any:
    """By plain candidate, the chip and a gradient evaluation's FLOPs.

    Args:
      start: of the configuration.
      chip_name: as of ``Chip.named``, or here: this machine, timed.
      console: for people.
      mfu: as of ``Chip``.
      price: likewise.
      watts: likewise.
      vocab: size of the vocabulary, where the tokeniser is not at hand.

    Raises:
      BadInputError: this machine is to be timed, but there are no data.
    """
    config, is_here = start.config, chip_name == "here"
    if is_here and config.population is not None:
        raise BadInputError("--chip here takes steps, but this configuration has statistics alone")
    from dpfl_jax.planning.clock import this_machine  # which imports all of training

    found, chips = {}, {}
    more: dict[str, Any] = {"price": price, "watts": watts}
    if is_here:
        (data, model), params = start.data, start.params
    else:
        chip = Chip.named(chip_name, mfu=mfu, **more)
    with console.status("counting the operations of a step"):
        for kind in (plain(examples=False), plain(examples=True)):
            group = getattr(config.mechanism, "group_size", 1)
            cell = _with_cell(config, kind, group)
            found[kind] = slices.gradient_cost(cell, vocab)["flops_per_gradient"]
            if is_here:  # what is reached depends on the algorithm
                chip = this_machine(cell, data, model, params, found[kind], **more)
                console.print(
                    f"this machine, {CANDIDATES[kind].name}: {chip.peak:.3g} FLOP/s reached, and "
                    f"{chip.step_seconds:.2g} s a step beside"
                )
            chips[kind] = chip
    return chips, found


def add_bills(result: dict[str, Any], price: Any, row: int) -> None:
    """Adds ``bill`` to each option of a plan's JSON; ``row`` is the microbatch size."""
    chips, each = price
    for option in (result["best"], *result["options"]):
        kind = plain(draws_examples(option["kind"]))  # whose gradients are all the others'
        units = expected_rows(option["size"], row) * row
        flops = each[kind] * units * option["gradients"] * result["steps"]
        option["bill"] = chips[kind].bill(flops, result["steps"])


def add_memory(
    result: dict[str, Any],
    config: Any,
    topology: str,
    console: Any,
    *,
    chip_name: str | None = None,
    vocab: int | None = None,
) -> None:
    """Adds ``memory`` to the options whose programs are those of the table's first rows.

    ``peak_bytes`` of a device, its ``limit_bytes`` (None: not known) and ``fits`` (likewise).
    """
    mesh = slices.slice_mesh(topology, config.execution.mesh.axes)
    limit = slices.memory_of(topology) or GPU_BYTES.get(chip_name or "")
    wanted = dict.fromkeys(_program(option) for option in in_order(result)[:_COMPILED])
    known: dict[Any, dict[str, Any]] = {}
    for kind, group, bands in wanted:
        with console.status(f"compiling {kind} G={group}"):
            cell = _with_cell(config, kind, group, bands)
            size = slices.vocabulary(cell, vocab)
            found = slices.measure(cell, size, topology, mesh, baseline=False)
        fits = found["fits"]
        if fits is None and limit is not None:
            fits = found["peak_bytes"] <= limit
        known[kind, group, bands] = {
            "peak_bytes": found["peak_bytes"],
            "limit_bytes": limit,
            "fits": fits,
            "topology": topology,
        }
    for option in (result["best"], *result["options"]):
        if _program(option) in known:
            option["memory"] = known[_program(option)]


def in_order(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The options as they are listed: by predicted loss, else by noise."""
    by = "loss" if "prediction" in result else "noise"
    return sorted(result["options"], key=lambda option: option[by])


def _program(option: dict[str, Any]) -> tuple[str, int, int]:
    """Drawn examples compile to one program whatever the group size."""
    return option["kind"], option["gradients"], option["bands"]


def _with_cell(config: Any, kind: str, group: int, bands: int = 1) -> Any:
    budget = max(config.mechanism.compute_budget, group)
    mechanism = at_budget(config.mechanism, kind, budget, group, bands=bands)
    return config.model_copy(update={"mechanism": mechanism})
