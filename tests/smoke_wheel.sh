#!/usr/bin/env bash
# Builds wheel and sdist, installs them in empty environments, and trains there, outside of the
# checkout: on a table, up to the AUC of predictions, and on the bundled plays from the bundled
# checkpoint.
#   tests/smoke_wheel.sh [--dist DIR] [CASE...]     no case: all of them
#     --dist DIR              wheel and sdist that are there, instead of new ones
#     3.11, 3.12, 3.13        the wheel on that Python, with the newest dependencies
#     lowest-3.11, ...        the wheel on that Python, with the lowest that pyproject.toml allows
#     sdist                   the sdist on the newest Python
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
if [ "${1:-}" = --dist ]; then
  cp -r "$2" "$out/dist" && shift 2
else
  uv build --quiet --out-dir "$out/dist"
fi
cd "$out"
awk 'BEGIN { print "patient;age;dose;ill"; for (i = 0; i < 400; i++) {
  row = sprintf("p%d;%f;%f;%d", i % 160, i % 7 / 7, i % 5 / 5, i % 7 + i % 5 + i % 3 > 6)
  gsub(/\./, ",", row); print row } }' >visits.csv
cat >same_auc.py <<'END'
"""What another process predicts with the export, of those held out, scores as the report says."""
import csv, json, sys
run = sys.argv[1]
held, everybody = (
    list(csv.DictReader(open(f"{run}-{name}.csv"), delimiter=";")) for name in ("held", "predicted")
)
people = {row["patient"] for row in held}
assert [row for row in everybody if row["patient"] in people] == held
ill, well = (
    [float(row["probability_1"].replace(",", ".")) for row in held if row["ill"] == label]
    for label in "10"
)
auc = sum((a > b) + (a == b) / 2 for a in ill for b in well) / len(ill) / len(well)
said = json.load(open(f"{run}-run/report.json"))["eval"]["final"]["auc"]
assert abs(auc - said) < 1e-9, (auc, said)
END

cat >bare.py <<'END'
"""What works with the hard dependencies alone, and what each extra's absence says."""
import importlib.util, subprocess, sys
missing = {"matplotlib": "plots", "jinja2": "chat", "duckdb": "build", "sklearn": "sklearn", "flwr": "flower"}
assert not [name for name in missing if importlib.util.find_spec(name)], "not a bare environment"
import jax, jax.numpy as jnp
import dpfl_jax as dpfl
from dpfl_jax import accounting
from dpfl_jax.noise import Noise
gradient = jax.jit(dpfl.clipped_grad(lambda w, x: (x @ w - 1.0) ** 2, clip_norm=1.0))
noise, key, w = Noise(stddev=2.0, sensitivity=1.0), dpfl.RootKey.generate(), jnp.zeros(3)
for step in range(5):
    total = gradient(w, jax.random.normal(jax.random.key(step), (16, 3))).sum
    w = w - 0.1 * noise.add(jnp.asarray(key.words("noise", step)), total) / 16
assert jnp.isfinite(w).all()
assert accounting.epsilon(accounting.events.gaussian(2.0, steps=5), delta=1e-5) < 10
dpfl_ = [sys.executable, "-m", "dpfl_jax"]
account = [*dpfl_, *"account els --noise-multiplier 1 --delta 1e-6 --steps 9 --group-size 4 --sampling-prob 0.01".split()]
subprocess.run(account, check=True, capture_output=True)
for command, extra in [
    ([*account, "--plot", "x.png"], "plots"),
    ([*dpfl_, "data", "build", "--source", "shakespeare", "--out", "s"], "build"),
    ([*dpfl_, "silo", "run", "folder"], "flower"),
    ([*dpfl_, "completion", "bash"], "completion"),
]:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and f"pip install 'dpfl_jax[{extra}]'" in " ".join(done.stderr.split()), done
print("bare: a loop of one's own, dpfl account, and the sentences of what is missing")
END

smoke() { # name, Python, archive
  uv venv --quiet --python "$2" "$1"
  case $1 in
  lowest-*) # of those that have a wheel for this Python
    uv pip install --quiet --python "$1/bin/python" --no-build --resolution lowest-direct -r "$root/pyproject.toml"
    uv pip install --quiet --python "$1/bin/python" --no-deps "$3" ;;
  *) uv pip install --quiet --python "$1/bin/python" "$3" ;;
  esac
  "$1/bin/python" bare.py
  "$1/bin/dpfl" init table/uls --out "$1.yaml" >/dev/null
  "$1/bin/dpfl" train "$1.yaml" data.path=visits.csv data.user_column=patient privacy.account=patients \
    data.target_column=ill data.classes=2 'data.delimiter=";"' data.decimal=comma train.steps=5 \
    --run-dir "$1-run" --json | grep -q '"finished"'
  "$1/bin/dpfl" predict "$1-run" visits.csv --held-out --out "$1-held.csv" >/dev/null
  "$1/bin/dpfl" export "$1-run" "$1-exported" >/dev/null
  "$1/bin/dpfl" predict "$1-exported" visits.csv --delimiter ';' --out "$1-predicted.csv" >/dev/null
  "$1/bin/python" same_auc.py "$1"
  "$1/bin/dpfl" init --out "$1-quickstart.yaml" >/dev/null  # its data and model are in the archive
  "$1/bin/dpfl" train "$1-quickstart.yaml" train.steps=1 eval.baseline=false --run-dir "$1-plays" \
    --json | grep -q '"finished"'
  echo "$1: $("$1/bin/python" -c 'import jax, sys; print(f"Python {sys.version.split()[0]}, jax {jax.__version__}")'): trained"
}

[ $# -gt 0 ] || set -- 3.11 3.12 3.13 lowest-3.11 lowest-3.12 lowest-3.13 sdist
for case in "$@"; do
  case $case in
  sdist) smoke sdist 3.13 "$(echo dist/*.tar.gz)" ;;
  lowest-*) smoke "$case" "${case#lowest-}" "$(echo dist/*.whl)" ;;
  *) smoke "wheel-$case" "$case" "$(echo dist/*.whl)" ;;
  esac
done
