#!/usr/bin/env python3
"""One run in several processes on this machine, over interruptions.

Starts N times `dpfl train CONFIG key=value ... --run-dir RUN_DIR`, which find each other on a local
port; prints what they print, each line with its process. If one of them is lost, the others are
stopped and one sentence says so; with --restarts the run then goes on from its last checkpoint.
Use it to try out what will run on many machines, or to give each GPU of this one its own process.

Ctrl-C (or SIGTERM) is passed on once: the processes agree on a step, save it and stop, and the run
is not started again. A second one kills them.

examples:
  launch/local.py configs/quickstart.yaml runs/two --processes 2 --cpu-devices 2
  launch/local.py configs/quickstart.yaml runs/gpus --processes 8 --gpus-per-process 1
  launch/local.py configs/quickstart.yaml runs/two --dry-run

Exit status: 0 the run is finished; 2 bad input (never repeated); 1 stopped or a process was lost.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

_CACHE = "JAX_COMPILATION_CACHE_DIR"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--processes", type=int, default=2, help="how many (default 2)")
    parser.add_argument(
        "--cpu-devices", type=int, metavar="D", help="train on the CPU, D devices a process"
    )
    parser.add_argument(
        "--gpus-per-process", type=int, metavar="G", help="process i gets GPUs i*G to i*G+G-1"
    )
    parser.add_argument("--port", type=int, help="of process 0 (default: a free one)")
    parser.add_argument(
        "--restarts", type=int, default=0, help="go on after interruptions, at most so often"
    )
    parser.add_argument(
        "--grace", type=float, default=60.0, help="seconds before a stopped process is killed"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    args = parser.parse_intermixed_args(argv)
    if args.processes < 1:
        parser.error("--processes must be at least 1")
    return args


def environment(args: argparse.Namespace, process: int, port: int) -> dict[str, str]:
    """What process number ``process`` finds in its environment beyond ours."""
    variables = {
        "DPFL_COORDINATOR": f"127.0.0.1:{port}",
        "DPFL_NUM_PROCESSES": str(args.processes),
        "DPFL_PROCESS_ID": str(process),
        # A start after an interruption finds the programs that the first one compiled: in a folder
        # of our own, as they are run, and RUN_DIR may come from somebody.
        _CACHE: os.environ.get(_CACHE, os.path.expanduser("~/.cache/dpfl_jax/compiled")),
    }
    if args.cpu_devices:
        variables["JAX_PLATFORMS"] = "cpu"
        variables["JAX_NUM_CPU_DEVICES"] = str(args.cpu_devices)
    if args.gpus_per_process:
        first = process * args.gpus_per_process
        chosen = range(first, first + args.gpus_per_process)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, chosen))
    return variables


def command(args: argparse.Namespace) -> list[str]:
    """The same for every process."""
    return ["dpfl", "train", args.config, *args.overrides, "--run-dir", args.run_dir]


def _say(text: str) -> None:
    print(f"local: {text}", file=sys.stderr, flush=True)


def _relay(stream: IO[str], process: int) -> None:
    for line in stream:
        sys.stdout.write(f"[{process}] {line}")
        sys.stdout.flush()


class Stop:
    """What signals ask for: the first is passed on to every process, a second one kills them."""

    def __init__(self) -> None:
        """Listens: before the first process is there, so that none is left alone."""
        self.heard: list[int] = []
        self._told = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.heard.append(number))

    def pass_on(self, running: list[subprocess.Popen[str]]) -> None:
        """Sends what was heard since the last call, once."""
        while self._told < len(self.heard):
            passed = signal.SIGKILL if self._told else self.heard[0]
            self._told += 1
            for child in running:
                if child.poll() is None:
                    child.send_signal(passed)


def run_once(args: argparse.Namespace, stop: Stop) -> int:
    """Runs all processes to their end, or to the loss of one."""
    port = args.port or _free_port()
    executable = [sys.executable, "-P", "-m", "dpfl_jax.cli.main", *command(args)[1:]]
    running: list[subprocess.Popen[str]] = []
    for process in range(args.processes):
        if stop.heard:
            break
        child = subprocess.Popen(
            executable,
            env=os.environ | environment(args, process, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A terminal sends Ctrl-C to all of our session: they shall hear it from us, and once.
            start_new_session=True,
        )
        assert child.stdout is not None
        threading.Thread(target=_relay, args=(child.stdout, process), daemon=True).start()
        running.append(child)
    _say(f"{args.processes} processes: " + ", ".join(str(child.pid) for child in running))
    first = None  # who was lost before the others followed
    while any(child.poll() is None for child in running):
        stop.pass_on(running)
        lost = [i for i, child in enumerate(running) if child.poll() not in (None, 0)]
        if lost:
            first = lost[0]
            _end(running, args.grace, stop)
            break
        time.sleep(0.1)
    ended = [child.wait() for child in running]
    return _stopped(ended, args.run_dir) if stop.heard else _verdict(ended, first, args.run_dir)


def _end(running: list[subprocess.Popen[str]], grace: float, stop: Stop) -> None:
    """Lets the others notice by themselves for a while, then stops them."""
    deadline = time.monotonic() + grace
    asked = False
    while any(child.poll() is None for child in running):
        stop.pass_on(running)
        left = deadline - time.monotonic()
        for child in running:
            if child.poll() is None and (left < 0 or (left < grace / 2 and not asked)):
                child.send_signal(signal.SIGKILL if left < 0 else signal.SIGTERM)
        asked = asked or left < grace / 2
        time.sleep(0.1)


def _stopped(codes: list[int], run_dir: str) -> int:
    if codes and not any(codes):
        return 0  # it was just finished
    _say(f"stopped; the same command goes on in {run_dir} from its last checkpoint")
    return 1


def _verdict(codes: list[int], first: int | None, run_dir: str) -> int:
    if not any(codes):
        return 0
    if 2 in codes:
        return 2
    killed = [i for i, code in enumerate(codes) if code < 0]
    if killed:  # else each has said why it ended
        lost = killed[0] if first is None else first
        code = codes[lost]
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        _say(
            f"process {lost} was lost ({how}) and the others were stopped; the same command goes "
            f"on in {run_dir} from its last checkpoint, and counts nothing twice"
        )
    return 1


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(argv: list[str] | None = None) -> int:
    """Runs, and runs again."""
    args = parse(argv)
    if args.dry_run:
        for process in range(args.processes):
            found = environment(args, process, args.port or 8476).items()
            words = [f"{name}={value}" for name, value in found] + command(args)
            print(" ".join(map(shlex.quote, words)))
        return 0
    stop = Stop()
    for attempt in range(args.restarts + 1):
        status = run_once(args, stop)
        if status in (0, 2) or attempt == args.restarts or stop.heard:
            return status
        _say(f"going on ({attempt + 1} of at most {args.restarts} restarts)")
        time.sleep(1.0)
    return 1


if __name__ == "__main__":
    sys.exit(main())
