#!/usr/bin/env bash
# One run on all workers of a Cloud TPU slice, by ssh, over interruptions.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: launch/tpu_pod.sh --tpu NAME --zone ZONE [options] CONFIG RUN_DIR [key=value ...]

Runs `dpfl train CONFIG key=value ... --run-dir RUN_DIR` on every worker of the slice NAME at once.
The workers find each other by the slice's own metadata; each reads its share of every batch; worker
0 writes the report. CONFIG, the data and RUN_DIR are paths on the workers: RUN_DIR (and
pretrain.cache_dir) must be on storage that all of them share, such as a Filestore mount. Compiled
programs are kept in ~/.cache/dpfl_jax/compiled of each worker for later starts, or where
JAX_COMPILATION_CACHE_DIR says (a folder of your own that all share saves the most). If a worker is
lost the job ends on all of them; it is started again, at most --restarts times.

  --tpu NAME          the TPU VM (also a queued resource's node)
  --zone ZONE         its zone
  --project PROJECT   default: gcloud's
  --workdir DIR       where dpfl_jax lies on the workers (default: ~/dpfl_jax)
  --install           first copy what this checkout has committed there, and install it with its extra `tpu`
  --restarts N        default 20
  --dry-run           print the commands and stop

Exit status: 0 the run is finished; 2 bad input (never repeated); 1 given up.
TEXT
}

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
compiled='$HOME/.cache/dpfl_jax/compiled'
if [ -n "${JAX_COMPILATION_CACHE_DIR:-}" ]; then printf -v compiled '%q' "$JAX_COMPILATION_CACHE_DIR"; fi
# The tilde and $HOME must reach the workers' shell.
remote="cd $workdir && export PATH=\$HOME/.local/bin:\$PATH DPFL_PROCESSES=detect \
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
  unpack="mkdir -p $workdir && tar -xf /tmp/dpfl_jax.tar -C $workdir"
  do_it "${vm[@]}" ssh "$tpu" "${where[@]}" --command "$unpack && cd $workdir && pip install '.[tpu]'" || exit 1
fi
for attempt in $(seq 0 "$restarts"); do
  do_it "${vm[@]}" ssh "$tpu" "${where[@]}" --command "$remote"
  status=$?
  if [ "$dry_run" = 1 ]; then exit 0; fi
  if [ "$status" = 0 ] || [ "$status" = 2 ]; then exit "$status"; fi
  echo "tpu_pod: stopped with status $status (attempt $attempt); going on from the last checkpoint" >&2
  sleep "${DPFL_RESTART_WAIT:-10}"
done
echo "tpu_pod: given up after $restarts restarts" >&2
exit 1
