#!/usr/bin/env bash
# Runs the notebooks as a stranger would: each first cell installs the wheel, in a clean environment
# of Python 3.12 with the newest JAX. What Colab has beside (pandas, Jupyter) is installed before.
# Colab itself is not tried.
#   tests/notebooks.sh [NOTEBOOK...]      default: all
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- notebooks/*.ipynb
for python in "$HOME"/.pyenv/versions/3.12.*/bin; do PATH=$PATH:$python; done
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
uv build --quiet --wheel --out-dir "$out"
uv venv --quiet --seed --python 3.12 "$out/env"
uv pip install --quiet --python "$out/env/bin/python" nbclient ipykernel pandas
"$out/env/bin/python" - "$out" "$@" <<'END'
import glob, importlib.metadata, sys, time
import nbclient, nbformat

out, *notebooks = sys.argv[1:]
failed = []
wheel = f"file://{glob.glob(out + '/*.whl')[0]}"
for path in notebooks:
    notebook, began = nbformat.read(path, 4), time.monotonic()
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    changed = first.source.replace('INSTALL = ""', f'INSTALL = "{wheel}"')
    assert changed != first.source
    first.source = changed
    try:
        nbclient.NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": out}}).execute()
    except nbclient.exceptions.CellExecutionError as error:
        failed.append(path)
        print(error)
    how = f"{time.monotonic() - began:.0f} s with JAX {importlib.metadata.version('jax')}"
    print(f"{path}: {'FAILED' if path in failed else 'ran'}, {how}", flush=True)
sys.exit(bool(failed))
END
