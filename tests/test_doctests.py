"""Every public name has a short example in its docstring, and all of them run."""

import doctest
import importlib
import inspect
import pathlib

import pytest

# What has no docstring of its own, or no example of a few lines, and why.
WITHOUT = {
    "dpfl_jax.flower.run_study": "needs silos: docs/guides/hospitals.md runs one",
    "dpfl_jax.synthesis.synthesize": "needs a finished run: docs/guides/synthesize.md makes one",
    "dpfl_jax.experimental": "its names have",
}
ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in (ROOT / "dpfl_jax").rglob("__init__.py")
    if "__all__ = " in path.read_text()
)


def documented(package):
    """(name, object) of what a package makes public and can hold a docstring, without constants."""
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        wrapped = inspect.unwrap(value) if callable(value) else value
        if inspect.isclass(value) or inspect.ismodule(value) or inspect.isfunction(wrapped):
            yield name, value


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_of_public_names_run(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what examples write, and configurations from the package
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    below = [other for other in PACKAGES if other.startswith(f"{package}.")]
    run_there = [value for other in below for _, value in documented(other)]
    missing = set()
    for name, value in documented(package):
        [found] = finder.find(value, f"{package}.{name}", globs={}) or [None]
        if found is None or not found.examples:
            missing.add(f"{package}.{name}")
        elif value not in run_there:
            runner.run(found)
    assert missing == {name for name in WITHOUT if name.rpartition(".")[0] == package}
    assert runner.summarize(verbose=False).failed == 0
