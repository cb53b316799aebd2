#!/usr/bin/env bash
# A stranger's first minutes, timed: install, first command, a CSV file of one's own, a model of
# one's own (README's), export. In a fresh clone and a fresh environment, nothing compiled before.
#   tests/strangers_walk.sh uv|PIP_VERSION PYTHON...       e.g. tests/strangers_walk.sh 23.2 python3.12
set -euo pipefail
how=$1 && shift
root=$(cd "$(dirname "$0")/.." && pwd)
for python in "$@"; do
  folder=$(mktemp -d)
  git clone --quiet "$root" "$folder/dpfl_jax"
  cd "$folder/dpfl_jax"
  unset JAX_COMPILATION_CACHE_DIR
  export XDG_CACHE_HOME="$folder/cache"
  step() { # name, command...
    local began=$SECONDS name=$1
    shift
    if ! "$@" >"$folder/out" 2>&1; then
      cat "$folder/out" && echo "$how $python: $name failed" && exit 1
    fi
    printf '%-6s %-10s %-12s %4d s   %s\n' "$how" "$version" "$name" $((SECONDS - began)) \
      "$(grep -s -v -e "^$" -e "^WARNING" "$folder/out" | tail -1 | cut -c1-110)"
  }
  version=$("$python" -c 'import sys; print(sys.version.split()[0])')
  "$python" -m venv "$folder/env"
  if [ "$how" = uv ]; then
    run=(uv run --frozen --python "$python" --quiet)
    step install uv sync --frozen --no-dev --python "$python"
  else
    run=("$folder/env/bin/python" -m)
    "${run[@]}" pip install --quiet "pip==$how"
    step install "${run[@]}" pip install --quiet .
  fi
  dpfl=("${run[@]}" dpfl_jax)
  [ "$how" = uv ] && dpfl=("${run[@]}" --no-dev dpfl)
  step first "${dpfl[@]}" train configs/quickstart.yaml --run-dir runs/first
  test -s runs/first/report.json
  awk 'BEGIN { print "author,body"; for (i = 0; i < 3000; i++)
    printf "a%d,\"the %dth thing that I, a%d, have to say\"\n", i % 600, i, i % 600 }' >posts.csv
  step csv "${dpfl[@]}" train configs/quickstart.yaml data.source=csv data.path=posts.csv \
    data.user_column=author data.text_column=body eval.baseline=false train.steps=10 \
    mechanism.cohort_size=64 privacy.delta=1e-4 --run-dir runs/posts
  awk '/^```python$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' README.md >own_model.py
  if [ "$how" = uv ]; then own=("${run[@]}" --no-dev python); else own=("$folder/env/bin/python"); fi
  step model "${own[@]}" own_model.py
  step export "${dpfl[@]}" export runs/first exported
  test -s exported/model.safetensors
  cd "$root" && rm -rf "$folder"
done
