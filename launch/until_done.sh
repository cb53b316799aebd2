#!/usr/bin/env bash
# Runs a configuration to its end on this machine, over interruptions: each time the process is
# stopped (preemption, out of memory, kill), the same run directory is resumed from its last
# checkpoint. All local accelerators are used.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: launch/until_done.sh [--dry-run] CONFIG RUN_DIR [key=value ...]

Runs `dpfl train CONFIG key=value ... --run-dir RUN_DIR` and repeats it after every interruption,
up to DPFL_MAX_RESTARTS times (default 100), waiting DPFL_RESTART_WAIT seconds (default 10) between.

  --dry-run   print the command and stop

Exit status: 0 the run is finished; 2 bad input (never repeated); 1 given up.
TEXT
}

dry_run=0
case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  --dry-run) dry_run=1; shift ;;
  --*) echo "until_done: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
if [ $# -lt 2 ]; then usage >&2; exit 2; fi
command=(dpfl train "$1" "${@:3}" --run-dir "$2")
if [ "$dry_run" = 1 ]; then printf '%q ' "${command[@]}"; echo; exit 0; fi

# A start after an interruption finds the programs that the first one compiled: in a folder of our
# own, as they are run, and RUN_DIR may come from somebody.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/dpfl_jax/compiled}"
for attempt in $(seq 0 "${DPFL_MAX_RESTARTS:-100}"); do
  "${command[@]}"
  status=$?
  [ "$status" = 0 ] || [ "$status" = 2 ] && exit "$status"
  echo "until_done: stopped with status $status (attempt $attempt); resuming" >&2
  sleep "${DPFL_RESTART_WAIT:-10}"
done
echo "until_done: given up after ${DPFL_MAX_RESTARTS:-100} restarts" >&2
exit 1
