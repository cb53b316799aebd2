"""``dpfl bench federation``: a round of many silos, against no privacy and a loop over silos."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

HELP = "time of a federated round, against no privacy and a Python loop over silos"
DESCRIPTION = """\
Times one round of a federation of silos with a small CNN on images of 28 x 28: every silo takes its
local steps of private SGD on Poisson batches of its own records. In the same process, in turn:

  MECHANISM      the engine, with each --mechanism
  ..., no noise  the same without its noise
  no privacy     the same engine, as many records, plain gradients by the same convolutions
  python loop    the first mechanism's local step compiled once, called from Python for each silo
                 and step, as a simulator does that handles one client after the other (on
                 --loop-silos of the silos, scaled up)
  host           drawing, reading and padding the round's batches (a thread does it during a round)

With --convex: rounds of ISRL-DP minibatch SGD of a logistic regression instead, all of them in one
compiled loop, silos vmapped, and trials too; against the same without privacy, and a NumPy loop
over silos (in float32, on the drawn records only). Seconds are of --rounds rounds of one trial.

Images are random: only the time is of interest. Seconds are wall time; ratios are of the CPU
seconds beside them.

examples:
  dpfl bench federation
  dpfl bench federation --silos 100 --mechanism subject_uls --json
  dpfl bench federation --silos 4 --local-steps 1 --records 1024 --batch-size 256 \\
    --microbatch-size 1 --loop-silos 0 \\
    --mechanism user_ldp hi_grad_avg local_group local_item subject_uls rpdp
  dpfl bench federation --convex --silos 1000 --rounds 100
  dpfl bench federation --convex --silos 25 --records 1238 --batch-size 443 --rounds 35  # MNIST's
"""


_SILENT = ", no noise"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from dpfl_jax.cli.options import Options, add_options

    parser.add_argument("--silos", type=int, default=1000)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--records", type=int, default=64, help="records of each silo")
    parser.add_argument("--batch-size", type=float, default=8.0, help="expected records per step")
    parser.add_argument("--channels", type=int, nargs="*", default=[8, 16], help="of the CNN")
    parser.add_argument("--hidden", type=int, default=32, help="dense units of the CNN")
    parser.add_argument("--mechanism", nargs="+", default=["hi_grad_avg"], help="of the silos")
    parser.add_argument("--width", type=int, default=1, help="silos of a device that are vmapped")
    parser.add_argument("--devices", type=int, default=1, help="devices the silos are split over")
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="of each; the median is printed")
    parser.add_argument("--loop-silos", type=int, default=50, help="silos the Python loop runs")
    parser.add_argument("--convex", action="store_true", help="ISRL-DP logistic regression instead")
    parser.add_argument("--dim", type=int, default=50, help="features, with --convex")
    parser.add_argument("--trials", type=int, default=10, help="vmapped trials, with --convex")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=args.json)
    if args.convex:
        from benchmarks._isrl import measure_convex

        rows, one = measure_convex(args), "no privacy"
        table = Table("what", "seconds a trial", "CPU seconds", f"x {one}", "records/s")
    else:
        rows, one = measure(args), "no privacy"
        table = Table("what", "seconds a round", "CPU seconds", "x no privacy", "records/s")
    base = next(r["cpu_seconds"] for r in rows if r["what"] == one)
    for row in rows:
        row["ratio"] = row["cpu_seconds"] / base
        table.add_row(
            row["what"],
            f"{row['seconds']:.3f}",
            f"{row['cpu_seconds']:.3f}",
            f"{row['ratio']:.2f}",
            f"{row['records'] / row['seconds']:,.0f}",
        )
    console.print(table)
    settings = {k: v for k, v in vars(args).items() if isinstance(v, int | float | str | list)}
    return {
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "settings": settings,
        "rows": rows,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row per variant."""
    import jax
    import optax

    from dpfl_jax.config.kinds import SILOS
    from dpfl_jax.errors import BadInputError
    from dpfl_jax.federation.data import ArrayRecords, FederatedData
    from dpfl_jax.federation.engine import make_release
    from dpfl_jax.federation.federation import Federation, SiloPlan
    from dpfl_jax.federation.mechanisms import fed_avg
    from dpfl_jax.federation.participation import SiloFacts
    from dpfl_jax.federation.rounds import RoundBuilder
    from dpfl_jax.mesh import data_parallel_mesh
    from dpfl_jax.models import LeafCNN
    from dpfl_jax.randomness import RootKey

    rng = np.random.default_rng(0)
    total = args.silos * args.records
    records = ArrayRecords(
        {
            "x": rng.random((total, 28, 28), dtype=np.float32),
            "label": rng.integers(0, 10, total).astype(np.int32),
        }
    )
    silos = np.repeat(np.arange(args.silos), args.records)
    subjects = np.arange(total) // 2  # two records each
    data = FederatedData.from_assignment(records, subjects, silos, args.silos)
    plain = fed_avg(batch_size=args.batch_size, max_records_per_subject=2)
    model = LeafCNN(10, tuple(args.channels), args.hidden)
    params = model.init(jax.random.key(0))
    mesh = data_parallel_mesh(jax.devices()[: args.devices])
    optimizer = optax.sgd(0.1)

    def made(kind: str) -> Any:
        if kind == "rpdp":
            options = {"expected_batch": args.batch_size}
        else:
            more = {"group_size": 2} if kind == "subject_uls" else {}
            options = {"batch_size": args.batch_size, "max_records_per_subject": 2, **more}
        return SILOS[kind](**options)

    for kind in args.mechanism:
        if not made(kind).private:
            raise BadInputError(f"--mechanism {kind} is without privacy: it is the baseline")

    def federation(mechanism: Any) -> Federation:
        facts = SiloFacts(args.records, args.records // 2)
        plans = (SiloPlan(mechanism, facts, args.local_steps, noise_multiplier=1.0),)
        return Federation(plans * args.silos, args.rounds + 1, 1)

    # Half of the records at a third of the others' rate.
    rate, odd = args.batch_size / args.records, np.arange(total) % 2
    held = data.with_rates(np.minimum(np.where(odd, 1.5 * rate, 0.5 * rate), 1.0))
    key = RootKey.from_seed(0)
    variants: dict[str, tuple[Any, Any]] = {}
    mechanisms = {**{kind: made(kind) for kind in args.mechanism}, "no privacy": plain}
    for name, mechanism in mechanisms.items():
        builder = RoundBuilder(
            federation(mechanism),
            held if name == "rpdp" else data,
            key,
            mesh,
            args.width,
            args.microbatch_size,
        )
        release = make_release(
            mechanism,
            model.loss,
            optimizer,
            mesh,
            width=args.width,
            examples_at_once=args.microbatch_size,
        )
        variants[name] = (builder, release)
        if mechanism.private:
            variants[f"{name}{_SILENT}"] = variants[name]
    found: dict[str, list[tuple[float, float, int]]] = {}
    first = args.mechanism[0]
    for r in range(args.rounds + 1):  # the first one compiles
        for name, (builder, release) in variants.items():
            host, taken, drawn = (0.0, 0.0), (0.0, 0.0), 0
            for part in builder.chunks(r):
                start = _clock()
                piece = builder.build(r, part)
                jax.block_until_ready(piece.chunk)
                host = _plus(host, _since(start))
                if name.endswith(_SILENT):
                    still = piece.chunk.stddev * 0.0
                    piece = dataclasses.replace(
                        piece, chunk=dataclasses.replace(piece.chunk, stddev=still)
                    )
                start = _clock()
                jax.block_until_ready(release(params, None, piece.chunk))
                taken = _plus(taken, _since(start))
                drawn += piece.num_records
            if r:
                found.setdefault(name, []).append((*taken, drawn))
                if name == first:
                    found.setdefault("host", []).append((*host, drawn))
        if args.loop_silos:
            builder, mechanism = variants[first][0], mechanisms[first]
            loop = _python_loop(builder, mechanism, model, params, optimizer, args, r)
            if r:
                found.setdefault("python loop", []).append(loop)
    rows = []
    for name in (*variants, "python loop", "host"):
        if name in found:
            seconds, cpu, count = (float(np.median(x)) for x in zip(*found[name]))
            rows.append({"what": name, "seconds": seconds, "cpu_seconds": cpu, "records": count})
    return rows


def _python_loop(
    builder: Any,
    mechanism: Any,
    model: Any,
    params: Any,
    optimizer: Any,
    args: argparse.Namespace,
    round_index: int,
) -> tuple[float, float, int]:
    """Silos one after the other, each local step a call of one compiled function; scaled up."""
    import jax
    import optax

    from dpfl_jax.federation.engine import clipped_sum
    from dpfl_jax.noise import Noise

    if "step" not in _COMPILED:
        summed = clipped_sum(mechanism, model.loss, examples_at_once=args.microbatch_size)

        def step(local: Any, state: Any, x: Any, rows: Any, scale: Any) -> Any:
            units, mask, group, noise_key = x
            stddev, divisor, clip_norm = scale
            total, _ = summed(local, units, mask, group, rows, clip_norm)
            noised = Noise(stddev, clip_norm, mechanism.noise.arithmetic).add(noise_key, total)
            gradient = jax.tree.map(lambda g: g / divisor, noised)
            updates, state = optimizer.update(gradient, state, local)
            return optax.apply_updates(local, updates), state

        _COMPILED["step"] = jax.jit(step)
    step = _COMPILED["step"]
    count = min(args.loop_silos, args.silos, builder.size)
    piece = builder.build(round_index, np.arange(count))
    host = jax.tree.map(np.asarray, piece.chunk)
    start = _clock()
    total = jax.tree.map(np.zeros_like, params)
    for s in range(count):
        local, state = params, optimizer.init(params)
        for t in range(args.local_steps):
            units = jax.tree.map(lambda u: u[s, t], host.units)  # noqa: B023
            x = (units, host.mask[s, t], host.unit_weight[s, t], host.noise_key[s, t])
            scale = (host.stddev[s, t], host.divisor[s, t], host.clip_norm[s])
            local, state = step(local, state, x, host.microbatches[s, t], scale)
        total = jax.tree.map(
            lambda a, b, c: a + (np.asarray(b) - np.asarray(c)), total, local, params
        )
    seconds, cpu = _since(start)
    scale_up = args.silos / count
    return seconds * scale_up, cpu * scale_up, int(piece.num_records * scale_up)


_COMPILED: dict[str, Callable[..., Any]] = {}


def _clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _plus(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] + b[0], a[1] + b[1]


def _since(start: tuple[float, float]) -> tuple[float, float]:
    now = _clock()
    return now[0] - start[0], now[1] - start[1]
