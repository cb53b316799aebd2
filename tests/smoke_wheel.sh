#!/usr/bin/env bash
# Builds wheel and sdist, installs them in empty environments, and trains there, outside of the
# checkout: on a table, and on the bundled plays from the bundled checkpoint.
#   tests/smoke_wheel.sh            the wheel on every Python, the sdist, the lowest versions allowed
#   tests/smoke_wheel.sh PYTHON...  the wheel on these
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
uv build --quiet --out-dir "$out/dist"
cd "$out"
awk 'BEGIN { print "patient,age,dose,days" } END { for (i = 0; i < 200; i++)
  printf "p%d,%f,%f,%f\n", i % 80, i % 7 / 7, i % 5 / 5, i % 7 / 14 + i % 5 / 10 }' </dev/null >visits.csv

smoke() { # name, Python, archive
  uv venv --quiet --python "$2" "$1"
  case $1 in
  lowest)
    uv pip install --quiet --python "$1/bin/python" --resolution lowest-direct -r "$root/pyproject.toml"
    uv pip install --quiet --python "$1/bin/python" --no-deps "$3" ;;
  *) uv pip install --quiet --python "$1/bin/python" "$3" ;;
  esac
  "$1/bin/dpfl" init table/uls --out "$1.yaml" >/dev/null
  "$1/bin/dpfl" train "$1.yaml" data.path=visits.csv data.user_column=patient privacy.account=patients \
    data.target_column=days train.steps=5 --run-dir "$1-run" --json | grep -q '"finished"'
  "$1/bin/dpfl" export "$1-run" "$1-exported" >/dev/null
  "$1/bin/dpfl" predict "$1-exported" visits.csv --out "$1-predicted.csv" >/dev/null
  "$1/bin/dpfl" init --out "$1-quickstart.yaml" >/dev/null  # its data and model are in the archive
  "$1/bin/dpfl" train "$1-quickstart.yaml" train.steps=1 eval.baseline=false --run-dir "$1-plays" \
    --json | grep -q '"finished"'
  echo "$1: $("$1/bin/python" -c 'import jax, sys; print(f"Python {sys.version.split()[0]}, jax {jax.__version__}")'): trained"
}

for version in ${*:-3.11 3.12 3.13}; do
  smoke "wheel-$version" "$version" "$(echo dist/*.whl)"
done
[ $# = 0 ] || exit 0
smoke sdist 3.13 "$(echo dist/*.tar.gz)"
smoke lowest 3.11 "$(echo dist/*.whl)"
