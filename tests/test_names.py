"""What tests and notebooks call by name exists: many of them are run before a release only."""

import ast
import importlib
import inspect
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = sorted({path.parent for path in (ROOT / "tests").rglob("*.py")})


def source(path):
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def found(module, name):
    """The attribute or the submodule; an AttributeError if there is none."""
    try:
        return getattr(module, name)
    except AttributeError:
        try:
            return importlib.import_module(f"{module.__name__}.{name}")
        except ImportError:
            raise AttributeError(f"{module.__name__} has no {name!r}") from None


def missing(tree):
    """Names of the package that a file imports or asks of its modules, and that are not there."""
    modules, given, wrong = {}, set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpfl_jax"):
            for alias in node.names:
                try:
                    value = found(importlib.import_module(node.module), alias.name)
                except (AttributeError, ImportError) as error:
                    wrong.append(f"line {node.lineno}: {error}")
                else:
                    if inspect.ismodule(value):
                        modules[alias.asname or alias.name] = value
        elif isinstance(node, ast.arg):
            given.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            given.add(node.id)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        name = node.value.id
        if name in modules and name not in given and not hasattr(modules[name], node.attr):
            wrong.append(f"line {node.lineno}: {modules[name].__name__} has no {node.attr!r}")
    return wrong


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_the_package_exist(folder):
    wrong = {path.name: missing(ast.parse(path.read_text())) for path in folder.glob("*.py")}
    assert not {name: lines for name, lines in wrong.items() if lines}


def test_names_of_the_package_exist_in_notebooks():
    paths = (ROOT / "notebooks").glob("*.ipynb")
    wrong = {path.name: missing(ast.parse(source(path))) for path in paths}
    assert not {name: lines for name, lines in wrong.items() if lines}


def test_a_name_that_is_gone_is_found():
    gone = "from dpfl_jax import noise\nfrom dpfl_jax.noise import gone\nnoise.gone_too()\n"
    assert len(missing(ast.parse(gone))) == 2
