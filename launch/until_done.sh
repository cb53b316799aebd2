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
Ctrl-C, SIGTERM and SIGHUP are passed on to the run, which saves a checkpoint; it is not repeated.

  --dry-run   print the command and stop

Exit status: 0 the run is finished; 2 bad input (never repeated); 1 given up, or stopped.
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

# The run has a process group of its own, so that it hears Ctrl-C from us alone, and once.
set -m
child='' stopped=''
# shellcheck disable=SC2329  # called by the traps
stop() {
  stopped=$1
  if [ -n "$child" ]; then kill -s "$1" "$child" 2>/dev/null; fi
}
trap 'stop INT' INT
trap 'stop TERM' TERM
trap 'stop TERM' HUP

# Runs a command and returns its status, also if signals come meanwhile.
attend() {
  "$@" </dev/null &
  child=$!
  if [ -n "$stopped" ]; then kill -s "$stopped" "$child"; fi
  wait "$child"
  local status=$?
  while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    status=$?
  done
  child=''
  return "$status"
}

for attempt in $(seq 0 "${DPFL_MAX_RESTARTS:-100}"); do
  attend "${command[@]}"
  status=$?
  if [ "$status" = 0 ] || [ "$status" = 2 ]; then exit "$status"; fi
  if [ -z "$stopped" ]; then
    echo "until_done: stopped with status $status (attempt $attempt); resuming" >&2
    sleep "${DPFL_RESTART_WAIT:-10}" &
    pause=$!
    wait "$pause"  # a signal ends the waiting
    kill "$pause" 2>/dev/null
  fi
  if [ -n "$stopped" ]; then
    echo "until_done: stopped; the same command resumes from the last checkpoint" >&2
    exit 1
  fi
done
echo "until_done: given up after ${DPFL_MAX_RESTARTS:-100} restarts" >&2
exit 1
