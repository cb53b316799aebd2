"""What mkdocs does beyond its plugins.

API pages of all public packages, notebooks with their outputs, the lines of code that proofs name,
advisories, and folders in the navigation: no page has to be written for a new package, notebook or
advisory, and none listed for a new proof in ``theory/``.
"""

from __future__ import annotations

import ast
import base64
import json
import pathlib
import re
import textwrap
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]


def public_packages() -> dict[str, list[str]]:
    """The packages (and ``errors``, ``randomness``) that say in ``__all__`` what is public."""
    found = {}
    for path in sorted((ROOT / "dpfl_jax").rglob("__init__.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                name = ".".join(path.parent.relative_to(ROOT).parts)
                found[name] = ast.literal_eval(node.value)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the API pages, then replaces ``FOLDER/*`` in the navigation by the folder's pages."""
    for package, names in public_packages().items():
        path = "api/index.md" if package == "dpfl_jax" else f"api/{package.split('.', 1)[1]}.md"
        files.append(File.generated(config, path, content=_api_page(package, names)))
    files.append(File.generated(config, "theory/lines.md", content=_lines_of_proofs()))
    files.append(File.generated(config, "advisories.md", content=_advisories()))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name, content in _notebook_files(path).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    pages = [file.src_uri for file in files.documentation_pages()]
    config.nav = _expanded(config.nav, pages, _named(config.nav))
    return files


_LINE = re.compile(r'^\[(\S+)\]: \.\./\.\./(dpfl_jax/\S+) "(\S+) \w+"$', re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A step of a proof leads to its lines of code; lists begin as GitHub lets them."""
    markdown = re.sub(r"^(\S.*)\n(?=1\. )", r"\1\n\n", markdown, flags=re.M)
    return _LINE.sub(r'[\1]: lines.md#\1 "\2: \3"', markdown)


def _lines_of_proofs() -> str:
    """All that proofs name: a heading each, with the definition that it is in."""
    found = {}
    for page in sorted((ROOT / "docs" / "theory").glob("*.md")):
        for name, path, place in _LINE.findall(page.read_text()):
            found[name] = (path, place)
    out = ["# The lines that proofs name"]
    for name, (path, place) in sorted(found.items()):
        source = (ROOT / path).read_text()
        node: ast.AST = ast.parse(source)
        for part in place.split("."):
            node = next(n for n in ast.walk(node) if getattr(n, "name", None) == part)
        text = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
        out += [f"## {name}", f"`{path}`, `{place}`:", f"```python\n{text}\n```"]
    return "\n\n".join(out) + "\n"


def _advisories() -> str:
    """A table of dpfl_jax/advisories.json."""
    out = [
        "# Advisories\n\nWhat versions of dpfl_jax stated and should not have. `dpfl verify` and "
        "a run that resumes name those that they meet ([how](stability.md#advisories)).\n",
        "| | Condition | Stated | True | What to do | Wrong |\n|---|---|---|---|---|---|",
    ]
    for one in json.loads((ROOT / "dpfl_jax" / "advisories.json").read_text())["advisories"]:
        cells = [one[name] for name in ("id", "condition", "stated", "true", "what_to_do")]
        cells.append(f"{one['introduced']} to {one['fixed'] or 'now'}")
        out.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(out) + "\n"


def _notebook_files(path: pathlib.Path) -> dict[str, str | bytes]:
    """The page of a notebook, its pictures, and itself to download."""
    text = path.read_text()
    page: list[str] = []
    found: dict[str, str | bytes] = {path.name: text}
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            page.append(re.sub(r"\((\w+)\.ipynb\)", r"(\1.md)", source))
            continue
        if not cell["metadata"].get("jupyter", {}).get("source_hidden"):
            page.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                page.append(f"```text\n{''.join(output['text'])}```")
            elif (picture := output["data"].get("image/png")) is not None:
                name = f"{path.stem}-{len(found)}.png"
                found[name] = base64.b64decode(picture)
                page.append(f"![]({name})")
            else:
                page.append("".join(output["data"]["text/html"]))
    page.insert(1, f"[Download this notebook]({path.name})")
    return {f"{path.stem}.md": "\n\n".join(page), **found}


def on_page_content(html: str, **_: Any) -> str:
    """``:meth:`x``` of a docstring is ``x``."""
    return re.sub(r":(?:meth|func|class|data|mod|attr|exc):(?=<code>)", "", html)


def _api_page(package: str, names: list[str]) -> str:
    """Modules and constants among the names, and functions called like their file, come last."""
    folder = ROOT.joinpath(*package.split("."))
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    values = [name for name in names if re.search(rf"^{name}\b[^(\n]*= ", code, re.M)]
    files = [name for name in names if _is_module(folder / name) and package != "dpfl_jax"]
    first = f"---\ntitle: {package}\n---\n\n::: {package}\n    options: {{heading_level: 1}}\n"
    return first + "".join(f"\n::: {package}.{name}\n" for name in files + values)


def _is_module(path: pathlib.Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _named(nav: Any) -> set[str]:
    """All pages that the navigation names."""
    if isinstance(nav, str):
        return {nav}
    return set().union(*(map(_named, nav.values() if isinstance(nav, dict) else nav)))


def _expanded(nav: Any, pages: list[str], named: set[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(value, pages, named) for title, value in nav.items()}
    if not isinstance(nav, list):
        return nav
    out: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/*"):
            folder = entry[:-2].removeprefix(".")
            inside = {page for page in pages if page.rpartition("/")[0] == folder} - named
            out += sorted(inside, key=lambda page: (not page.endswith("index.md"), page[:-3]))
        else:
            out.append(_expanded(entry, pages, named))
    return out
