#!/usr/bin/env bash
# Runs tests with other versions than the development environment's.
#   tests/versions.sh CASE... [-- PYTEST ARGUMENTS]     no case: all of them
#     3.11, 3.12, 3.13   that Python, with what uv.lock has for it
#     lowest             the lowest versions that pyproject.toml allows, on the lowest Python
#     newest             the newest that there are, on the newest Python
set -uo pipefail
cd "$(dirname "$0")/.."
cases=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do cases+=("$1") && shift; done
[ $# -gt 0 ] && shift
[ ${#cases[@]} -gt 0 ] || cases=(3.11 3.12 3.13 lowest newest)
failed=()
for case in "${cases[@]}"; do
  run=(uv run --quiet --isolated) free=(--no-project --with-editable ".[dev]")
  case $case in
  lowest) run+=(--python 3.11 --resolution lowest-direct "${free[@]}") ;;
  newest) run+=(--python 3.13 --upgrade "${free[@]}") ;;
  *) run+=(--frozen --python "$case") ;;
  esac
  "${run[@]}" python -c 'import importlib.metadata as m, platform; print("Python",
    platform.python_version(), *(f"{n} {m.version(n)}" for n in ("jax", "flax", "optax", "dp-accounting")))'
  "${run[@]}" pytest "$@" || failed+=("$case")
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" && exit 1; }
