#!/usr/bin/env bash
# One run on all workers of a Cloud TPU slice, by ssh, over interruptions.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: launch/tpu_pod.sh --tpu NAME --zone ZONE [options] CONFIG RUN_DIR [key=value ...]

Runs `dpfl train CONFIG key=value ... --run-dir RUN_DIR` on every worker of the slice NAME at once.
The workers find each other by the slice's own metadata; each reads its share of every batch; worker
0 writes the report. CONFIG, the data and RUN_DIR are paths on the workers: RUN_DIR (and
pretrain.cache_dir) must be on storage that all of them share, such as a Filestore mount; RUN_DIR
and a store may be in a bucket. Compiled programs are kept in ~/.cache/dpfl_jax/compiled of each
worker for later starts, or where JAX_COMPILATION_CACHE_DIR says (a folder of your own that all
share saves the most). If a worker is lost the job ends on all of them; it is started again, at most
--restarts times. Ctrl-C and SIGTERM are passed on to all workers, which save a checkpoint; the run
is not started again.

  --tpu NAME          the TPU VM (also a queued resource's node)
  --zone ZONE         its zone
  --project PROJECT   default: gcloud's
  --workdir DIR       where dpfl_jax lies on the workers (default: ~/dpfl_jax)
  --install           first copy what this checkout has committed there, and install it with its
                      extra `tpu`, Python 3.13 and the versions of uv.lock, by uv
  --restarts N        default 20
  --dry-run           print the commands and stop

Exit status: 0 the run is finished; 2 bad input (never repeated); 1 given up, or stopped.
TEXT
}

# shellcheck disable=SC2088  # the tilde must reach the workers' shell
tpu='' zone='' project='' workdir='~/dpfl_jax' install=0 restarts=20 dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --dry-run) dry_run=1; shift ;;
    --install) install=1; shift ;;
    --tpu | --zone | --project | --workdir | --restarts)
      if [ $# -lt 2 ]; then echo "tpu_pod: $1 needs a value" >&2; exit 2; fi
      printf -v "${1#--}" '%s' "$2"; shift 2 ;;
    --*) echo "tpu_pod: unknown option $1 (see --help)" >&2; exit 2 ;;
    *) break ;;
  esac
done
if [ -z "$tpu" ] || [ -z "$zone" ] || [ $# -lt 2 ]; then usage >&2; exit 2; fi
case "$restarts" in '' | *[!0-9]*) echo "tpu_pod: --restarts must be a number" >&2; exit 2 ;; esac

where=(--zone "$zone" --worker=all)
if [ -n "$project" ]; then where+=(--project "$project"); fi
vm=(gcloud compute tpus tpu-vm)
printf -v train '%q ' dpfl train "$1" "${@:3}" --run-dir "$2"
# Programs are run: they are kept in a folder of our own, as RUN_DIR may come from somebody.
# shellcheck disable=SC2016  # of the workers' shell
compiled='$HOME/.cache/dpfl_jax/compiled'
if [ -n "${JAX_COMPILATION_CACHE_DIR:-}" ]; then printf -v compiled '%q' "$JAX_COMPILATION_CACHE_DIR"; fi
# What --install makes, or what was installed by hand.
remote="cd $workdir && export PATH=\$PWD/.venv/bin:\$HOME/.local/bin:\$PATH DPFL_PROCESSES=detect \
JAX_COMPILATION_CACHE_DIR=$compiled && $train"

do_it() {
  if [ "$dry_run" = 1 ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

if [ "$install" = 1 ]; then
  here=$(cd "$(dirname "$0")/.." && pwd)
  # What is committed, and nothing else: runs/ holds the secret keys of other runs.
  archive=$(mktemp -d)/dpfl_jax.tar
  do_it git -C "$here" archive --output "$archive" HEAD || exit 1
  do_it "${vm[@]}" scp "$archive" "$tpu:/tmp/dpfl_jax.tar" "${where[@]}" || exit 1
  # The standard images have Python 3.10, which is too old: uv brings its own.
  with_uv="export PATH=\$HOME/.local/bin:\$PATH && \
{ command -v uv || curl -LsSf https://astral.sh/uv/install.sh | sh; } && \
mkdir -p $workdir && tar -xf /tmp/dpfl_jax.tar -C $workdir && cd $workdir && \
uv sync --frozen --no-dev --extra tpu --python 3.13"
  do_it "${vm[@]}" ssh "$tpu" "${where[@]}" --command "$with_uv" || exit 1
fi

# ssh passes no signal on, so another call stops the workers; the first one then ends.
set -m
stopped=''
# shellcheck disable=SC2329  # called by the traps
stop() {
  stopped=1
  "${vm[@]}" ssh "$tpu" "${where[@]}" --command "pkill -TERM -f '[d]pfl train'" </dev/null &
}
trap stop INT TERM HUP

# Runs a command and returns its status, also if signals come meanwhile.
attend() {
  "$@" </dev/null &
  local child=$! status
  wait "$child"
  status=$?
  while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    status=$?
  done
  return "$status"
}

if [ "$dry_run" = 1 ]; then do_it "${vm[@]}" ssh "$tpu" "${where[@]}" --command "$remote"; exit 0; fi
for attempt in $(seq 0 "$restarts"); do
  attend "${vm[@]}" ssh "$tpu" "${where[@]}" --command "$remote"
  status=$?
  if [ "$status" = 0 ] || [ "$status" = 2 ]; then exit "$status"; fi
  if [ -z "$stopped" ]; then
    echo "tpu_pod: stopped with status $status (attempt $attempt); resuming from the last checkpoint" >&2
    sleep "${DPFL_RESTART_WAIT:-10}" &
    pause=$!
    wait "$pause"  # a signal ends the waiting
    kill "$pause" 2>/dev/null
  fi
  if [ -n "$stopped" ]; then
    echo "tpu_pod: stopped; the same command resumes from the last checkpoint" >&2
    exit 1
  fi
done
echo "tpu_pod: given up after $restarts restarts" >&2
exit 1
