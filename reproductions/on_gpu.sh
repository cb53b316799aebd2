#!/usr/bin/env bash
# The papers' trained figures that are undecided for lack of size, on one GPU, for twelve minutes.
set -euo pipefail
usage="usage: reproductions/on_gpu.sh OUT [dpfl reproduce's options]

Runs the --full forms of five figures side by side, and ends them after 11.5 minutes. What finished
is in OUT/manifest.json (python -m reproductions.pages OUT/manifest.json takes it into the pages);
the same command continues with the others. DPFL_DATA_DIR must name the folder of the data sets."
case ${1:---help} in -h | --help) echo "$usage" && exit ;; esac
cd "$(dirname "$0")/.."
out=$1 && shift
figures=subject/shakespeare,userlevel/figure-4,userlevel/figure-6,userlevel/figure-8,rpdp/mnist
# They share the GPU, and kernels of such small models leave most of it idle.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}
status=0
timeout --kill-after=20 690 \
  python -m dpfl_jax reproduce "$figures" --full --minutes 10 --jobs 5 --out "$out" "$@" || status=$?
[ $status = 124 ] && echo "the time is over: what finished is in $out/manifest.json" >&2
exit $status
