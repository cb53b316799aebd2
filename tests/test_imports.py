"""Imports go one way: docs/extending.md shows the house, floor by floor."""

import ast
import graphlib
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1] / "dpfl_jax"
# From the ground up: whoever is in a line imports from lines above it alone.
FLOORS = (
    ("errors", "task"),
    ("files",),
    ("buckets", "varying"),
    ("randomness", "clipping", "models"),
    ("sampling", "mesh"),
    ("accounting",),
    ("matrices",),
    ("noise", "audit"),
    ("data",),
    ("config",),
    ("run",),
    ("mechanisms",),
    ("training", "experimental"),
    ("federation", "planning", "synthesis"),
    ("audit.attacks", "flower"),
    ("cli",),
    ("__main__",),
)
PAGE = (ROOT.parent / "docs" / "extending.md").read_text()
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
MODULES = {
    ".".join(("dpfl_jax", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}


def imported(path, everywhere):
    """Modules of the package that a file imports; ``everywhere``: within functions, too."""
    found, left = set(), [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
            continue
        if not everywhere and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpfl_jax"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("dpfl_jax")}
        left += ast.iter_child_nodes(node)
    return found


def package(module):
    """The part with a floor of its own that a module is in."""
    names = module.split(".")[1:]
    inner = ".".join(names[:2])
    return inner if inner in FLOOR else names[0] if names else None


def test_every_package_has_a_floor():
    assert {package(module) for module in MODULES} - {None} == set(FLOOR)


def test_nothing_runs_upward():
    """Also where a function imports: late imports hide no circle."""
    wrong = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in imported(path, everywhere=True)
        if package(module) and package(other) not in (None, package(module))
        if FLOOR[package(other)] >= FLOOR[package(module)]
    ]
    assert not wrong


def test_modules_import_each_other_in_no_circle():
    """Nor with the imports within functions, which would hide one."""
    graph = {
        module: imported(path, everywhere=True) - {"dpfl_jax", module}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_what_needs_no_jax_imports_none():
    for module, path in MODULES.items():
        if package(module) in ("accounting", "config", "errors", "matrices", "sampling"):
            names = {n.name for x in ast.walk(ast.parse(path.read_text()))
                     if isinstance(x, ast.Import) for n in x.names}  # fmt: skip
            assert not any(n.split(".")[0] in ("jax", "flax", "optax") for n in names), module


def test_the_page_shows_these_floors():
    told = [set(re.findall(r"`([\w.]+)`", row)) for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M)]
    *floors, last, top = map(set, FLOORS)
    assert told == [*floors, last | top]


def test_three_walks_have_ten_stops_at_most():
    """Files that are there; one named alone lies beside the one before it."""
    section = PAGE.split("## Three paths through the code\n\n")[1].split("\n## ")[0]
    walks = section.strip().split("\n\n")
    assert len(walks) == 3
    for walk in walks:
        folder, stops = ROOT, re.findall(r"`([\w/]+\.py)`", walk)
        assert 5 < len(stops) <= 10
        for stop in stops:
            path = ROOT / stop if "/" in stop else folder / stop
            assert path.is_file(), stop
            folder = path.parent
