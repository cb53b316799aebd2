"""``dpfl audit``: what an attack proves about epsilon."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from rich.console import Console

from dpfl_jax.cli._figures import save
from dpfl_jax.cli.main import add_json_flag

DESCRIPTION = """\
Attack a mechanism, and compare what that proves with what is claimed.

With --simulate the mechanism of a configuration releases designed gradients alone: its own sampler,
clipping, noise and divisor, no training. Each canary is in or out by a fair coin, and has a
direction of its own; the attacker sees every release and decides by the likelihood ratio. The rates
of right and false alarms refute all trade-off curves below them: what is printed is the largest
epsilon of the claimed mechanism with less noise that is refuted, at the confidence asked for.

With --train the configuration is trained, with canary users in it: what it releases at every step
is attacked in the same way. With --user-inference half of its users, by fair coins, train it, with
privacy and without: can somebody who holds other texts of theirs tell who took part? Both train for
the attack alone, and keep no model.

The claim is refuted if its own curve is: a bug, but for bad luck. With --repeat the whole is done
so many times; a sound mechanism is refuted in at most a share 1 - confidence of them.

examples:
  dpfl audit --simulate configs/quickstart.yaml
  dpfl audit --simulate configs/subject/quickstart.yaml federation.rounds=5 --trials 5000
  dpfl audit --simulate configs/rpdp/quickstart.yaml --picture audit.png
  dpfl audit --simulate configs/isrl/quickstart.yaml --confidence 0.999 --json
  dpfl audit --train configs/quickstart.yaml --canaries 300 --picture audit.png
  dpfl audit --user-inference configs/quickstart.yaml

exit status: 0 the claim stands; 3 it is refuted; 2 bad input; 1 anything else.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulate", metavar="CONFIG", help="attack its mechanism alone")
    what.add_argument("--train", metavar="CONFIG", help="train it with canary users (central runs)")
    what.add_argument("--user-inference", metavar="CONFIG", help="rank its users (central runs)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override any key of it")
    parser.add_argument(
        "--trials", type=int, default=20_000, metavar="N", help="of --simulate (default 20000)"
    )
    parser.add_argument(
        "--canaries", type=int, default=500, metavar="N", help="of --train (default 500)"
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="C", help="of the proof (default 0.95)"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="independent audits (default 1)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of coins, sampling and noise (default: drawn)"
    )
    parser.add_argument("--picture", type=pathlib.Path, metavar="FILE", help="draw it (PNG)")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Audits; ``holds`` in the result is the verdict."""
    from dpfl_jax.auditing import audit
    from dpfl_jax.auditing.configured import trials_of
    from dpfl_jax.config import load_config
    from dpfl_jax.evidence.trade_off import plot_audits
    from dpfl_jax.randomness import RootKey

    console = Console(stderr=args.json)
    config = load_config(args.simulate or args.train or args.user_inference, args.overrides)
    key = RootKey.generate() if args.seed is None else RootKey.from_seed(args.seed)
    if args.user_inference is not None:
        from dpfl_jax.auditing.training import user_inference

        told = user_inference(config, key, console)
        for name, area in told["auc"].items():
            console.print(f"{name.replace('_', ' ')}: AUC {area:.3f}", highlight=False)
        console.print(
            f"{told['users_in']} users took part and {told['users_out']} did not; where nothing "
            f"can be told it is 0.500, give or take {told['chance_deviation']:.3f}",
            highlight=False,
        )
        return told
    audits, cost = [], None
    for number in range(max(1, args.repeat)):
        own = key.child("audit", number)
        if args.train is not None:
            from dpfl_jax.auditing.training import canary_run

            trained, cost = canary_run(config, args.canaries, own, console)
            found = [trained]
            console.print(
                f"{cost['inside']} canaries are {cost['share_of_users']:.1%} of the users, and as "
                "much of every step is theirs",
                highlight=False,
            )
        else:
            found = trials_of(config, own, console, args.trials)
        for trials in found:
            audits.append(audit(trials, args.confidence))
            console.print(str(audits[-1]), highlight=False, soft_wrap=True)
            if number == 0:
                console.print(f"  {trials.how}; attack: {audits[-1].attack}", highlight=False)
    refuted = sum(a.exceeds for a in audits)
    if len(audits) > 1:
        console.print(f"{refuted} of {len(audits)} audits refute their claim")
    if args.picture is not None:
        save(plot_audits(audits[:4]), args.picture, dpi=130)
        console.print(f"picture: {args.picture}")
    return {
        "holds": refuted == 0,
        "refuted": refuted,
        "cost": cost,
        "audits": [a.to_json() for a in audits],
    }
