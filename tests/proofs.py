"""Proofs of docs/theory and the functions that they name, each with a hash of its code.

    python -m tests.proofs

writes the place and the hash of every function as it is now, and says which have changed: for who
has read these proofs again.
"""

import ast
import functools
import hashlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
THEORY = ROOT / "docs" / "theory"
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted((ROOT / "dpfl_jax").rglob("*.py"))
}
ANCHOR = re.compile(r"^\s*# proof: (\S+)$")
LINK = re.compile(r'^\[(\S+)\]: \.\./\.\./(\S+) "(\S+) (\S+)"$', re.MULTILINE)
PAGES = {
    path.name: path.read_text()
    for path in sorted(THEORY.glob("*.md"))
    if LINK.search(path.read_text())
}


def function_at(tree, line, names=()):
    """Dotted name of the innermost class or function that holds a line, and its node."""
    for node in ast.iter_child_nodes(tree):
        if not getattr(node, "lineno", line + 1) <= line <= getattr(node, "end_lineno", line):
            continue
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner, found = function_at(node, line, (*names, node.name))
            return inner, found or node
        return function_at(node, line, names)
    return ".".join(names), None


def canonical(node):
    """The code as nested lists: without comments, docstrings and the words of what is raised."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return ["Raise", canonical(node.exc.func)]
    if isinstance(node, ast.AST):
        # Left out is what differs between versions of Python.
        fields = {n: v for n, v in ast.iter_fields(node) if v is not None and v != []}
        for name in ("kind", "type_comment", "type_params"):
            fields.pop(name, None)
        return [type(node).__name__, *([n, canonical(v)] for n, v in fields.items())]
    if isinstance(node, list):
        return [canonical(part) for part in node if not _is_docstring(part)]
    return repr(node)


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def hash_of(node):
    """Eight hex digits of a function's code."""
    return hashlib.sha256(repr(canonical(node)).encode()).hexdigest()[:8]


@functools.cache
def anchors_of(text):
    """(anchor, function, hash) of a file."""
    lines = [(n, m[1]) for n, x in enumerate(text.splitlines(), 1) if (m := ANCHOR.match(x))]
    tree, found = ast.parse(text) if lines else None, []
    for number, anchor in lines:
        # The statement that follows: a comment itself belongs to no node.
        name, node = function_at(tree, number + 1)
        found.append((anchor, name, hash_of(node or tree)))
    return found


def anchors(sources):
    """Anchor -> places (file, function, hash) where it stands in the code."""
    found = {}
    for file, text in sources.items():
        for name, *place in anchors_of(text):
            found.setdefault(name, []).append((file, *place))
    return found


def main():
    """Writes all hashes; prints what has changed."""
    places = anchors(SOURCES)

    def written(link):
        name, *known, old = link.groups()
        (file, function, new), *_ = places.get(name, [(*known, old)])
        if old != new:
            sys.stdout.write(f"{page}: {function} ({file}), of {name}: {old} is now {new}\n")
        return f'[{name}]: ../../{file} "{function} {new}"'

    for page, text in PAGES.items():
        (THEORY / page).write_text(LINK.sub(written, text))


if __name__ == "__main__":
    main()
