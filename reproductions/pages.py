"""The numbers of ``docs/``: written from the archived manifest, and from nothing else.

``python -m reproductions.pages [MANIFEST ...]`` takes experiments into
``reproductions/manifest.json`` (a later one in the place of the same figure, form and replication)
and fills what stands between ``<!-- generated: NAME -->`` and ``<!-- end -->`` in the pages. A test
compares.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from dpfl_jax.run.directory import write_atomically
from reproductions import registry
from reproductions.headlines import HEADLINES
from reproductions.quotes import quoted
from reproductions.runner import ARCHIVE, ROOT, is_random, manifest

Rows = Sequence[Mapping[str, Any]]
PAGES = (
    *(
        f"docs/results/{name}.md"
        for name in ("claims", "index", "subjects", "personal", "untrusted")
    ),
    "docs/internals/personal.md",
)
PICTURES = {"userlevel-budgets.png": "docs/pictures/group_size.png"}
_BLOCK = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(<!-- end -->)", re.S)
MISSING = "`dpfl reproduce {}` is not in the archived manifest: it was not run for it."
_LONG = ("curve", "curves", "histogram_z", "tuned", "files")


# ---- the archive --------------------------------------------------------------------------------


def archived() -> dict[str, Any]:
    """The manifest that is committed."""
    return dict(json.loads(ARCHIVE.read_text()))


def archive(files: Iterable[pathlib.Path]) -> None:
    """Takes finished experiments into the committed manifest, and their pictures into the docs."""
    entries = archived()["experiments"] if ARCHIVE.exists() else []
    known = {_key(entry): entry for entry in entries}
    for file in files:
        for entry in json.loads(file.read_text())["experiments"]:
            # Where nothing is drawn, other seeds are no second run.
            if "error" in entry or (entry["replication"] and not is_random(entry["figure"])):
                continue
            known[_key(entry)] = _lean(entry)
            for name, place in PICTURES.items():
                if name in entry["files"] and not entry["replication"]:
                    shutil.copy(file.parent / name, ROOT / place)
    made = manifest([known[key] for key in sorted(known)])
    # One experiment a line: a change of one is a change of one line.
    lines = ",\n".join(json.dumps(e, sort_keys=True) for e in made.pop("experiments"))
    rest = json.dumps(made, sort_keys=True)
    write_atomically(ARCHIVE, f'{{"experiments": [\n{lines}\n], {rest[1:]}\n')


def _key(entry: Mapping[str, Any]) -> tuple[str, str, int]:
    return entry["figure"], entry["form"], entry["replication"]


def _lean(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Without long curves; of another replication the verdicts are enough."""
    made = {k: v for k, v in entry.items() if k not in _LONG}
    made["rows"] = [] if entry["replication"] else _rounded(entry["rows"])
    made["claims"] = _rounded(entry["claims"])
    return made


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items() if k not in _LONG}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- blocks -------------------------------------------------------------------------------------


class Found:
    """The experiments of a manifest, the longest form of each figure first."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        """Sorts them."""
        self.entries: dict[str, Mapping[str, Any]] = {}
        self.again: dict[str, Mapping[str, str]] = {}
        for entry in sorted(made["experiments"], key=lambda e: e["form"] == "full"):
            if entry["replication"]:
                self.again[entry["figure"]] = {c["claim"]: c["verdict"] for c in entry["claims"]}
            else:
                self.entries[entry["figure"]] = entry

    def claims(self, figure: str, pattern: str = ".") -> list[Mapping[str, Any]]:
        """Of one figure, those whose words match."""
        found = self.entries.get(figure, {"claims": []})["claims"]
        return [claim for claim in found if re.search(pattern, claim["claim"])]


def filled(text: str, made: Mapping[str, Any]) -> str:
    """A page with its blocks as the manifest has them."""
    found = Found(made)

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{_content(match[2], found)}\n{match[4]}"

    return _BLOCK.sub(block, text)


def without_blocks(text: str) -> str:
    """What people wrote."""
    return _BLOCK.sub("", text)


def _content(name: str, found: Found) -> str:
    kind, _, rest = name.partition(" ")
    if kind == "claims":
        return _claims(found, rest) if rest in found.entries else MISSING.format(rest)
    plain = {
        "tally": _tally,
        "replication": _replication,
        "headlines": _headlines,
        "details": _details,
        "runs": _runs,
    }
    if kind in plain:
        return plain[kind](found)
    figure, make = TABLES[name]
    if figure not in found.entries:
        return MISSING.format(figure)
    entry = found.entries[figure]
    return f"{make(entry['rows'])}\n\n{_provenance(entry)}"


def _provenance(entry: Mapping[str, Any]) -> str:
    option = "" if entry["form"] == "full" else " --quick"
    option += f" --seeds {entry['seeds']}" if entry["seeds"] else ""
    return (
        f"`dpfl reproduce {entry['figure']}{option}`: {_time(entry['cpu_seconds'])} of a "
        f"processor, commit {entry['commit'][:9]}. {_tried(entry)}"
    )


def _tried(entry: Mapping[str, Any]) -> str:
    """At which size, and what was tuned."""
    tried = entry["tried"]
    if tried is None:
        return "Nothing is trained or tuned."
    size = "the paper's" if tried["is_papers_size"] else "not the paper's"
    text = f"Size ({size}): {tried['size']}. Tuned: {tried['tuned'] or 'nothing'}."
    if tried["unfair"]:
        text += f" No comparison counts: {tried['unfair']}."
    data = ", ".join(f"{name} {digest[:12]}" for name, digest in tried["data"].items())
    return f"{text} Data: {data}." if data else text


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *([_text(v) for v in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_text(v)}" for k, v in value.items())
    return str(value).replace("|", "\\|")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _tally(found: Found) -> str:
    counts = registry.tally(c for e in found.entries.values() for c in e["claims"])
    rows = [[source, *of.values()] for source, of in counts.items()]
    return _table(["source of the claim", *registry.VERDICTS.values()], rows)


def _replication(found: Found) -> str:
    """How often a second run says the same, and every claim of which it says the opposite."""
    pairs = [
        (figure, claim["claim"], claim["verdict"], again[claim["claim"]])
        for figure, again in sorted(found.again.items())
        for claim in found.claims(figure)
        if claim["claim"] in again
    ]
    same = sum(first == second for *_, first, second in pairs)
    decided = {registry.VERDICTS[True], registry.VERDICTS[False]}
    opposite = [p for p in pairs if p[2] != p[3] and {p[2], p[3]} == decided]
    head = (
        f"Of {len(pairs)} verdicts of {len(found.again)} experiments, {same} are the same with "
        f"other seeds, {len(pairs) - same - len(opposite)} are undecided with one of the two, and "
        f"{len(opposite)} are contradicted"
    )
    lines = [f"* `{figure}`, {claim}: {a}, then {b}" for figure, claim, a, b in opposite]
    return "\n".join([head + (":" if lines else "."), *([""] if lines else []), *lines])


def _headlines(found: Found) -> str:
    out = []
    for paper, lines in HEADLINES.items():
        rows = []
        for line in lines:
            verdicts, sizes = [], set()
            for figure, pattern in line.figures.items():
                claims = found.claims(figure, pattern)
                if claims:
                    sizes.add(_size(found.entries[figure]))
                    verdicts.append(f"[{figure}](#{_anchor(figure)}): {_summary(claims)}")
            form = " and ".join(sorted(sizes))
            if not verdicts:
                form, _, why = (line.instead or "not run: not yet").partition(": ")
                verdicts = [why]
            rows.append([line.claim, line.where, form, "; ".join(verdicts)])
        out.append(f"### {paper}\n\n" + _table(["claim", "where", "size", "verdict"], rows))
    return "\n\n".join(out)


def _size(entry: Mapping[str, Any]) -> str:
    tried = entry["tried"]
    if tried is None:
        return "computed"
    return "the paper's" if tried["is_papers_size"] else "not the paper's"


def _anchor(figure: str) -> str:
    return figure.replace("/", "").replace(" ", "-").lower()


def _summary(claims: Sequence[Mapping[str, Any]]) -> str:
    if len(claims) == 1:
        claim = claims[0]
        return f"{claim['verdict']} ({_text(claim['measured'])}; {_text(claim['expected'])})"
    counts = dict.fromkeys(registry.VERDICTS.values(), 0)
    for claim in claims:
        counts[claim["verdict"]] += 1
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n)


def _claims(found: Found, figure: str) -> str:
    again = found.again.get(figure)
    header = ["claim", "source", "measured", "expected", "verdict"]
    header += [] if again is None else ["other seeds"]
    rows = [
        [
            c["claim"],
            _source(figure, c),
            c["measured"],
            c["expected"],
            c["verdict"],
            *([] if again is None else [again.get(c["claim"], "")]),
            c["note"],
        ]
        for c in found.claims(figure)
    ]
    header.append("how, and why")
    return f"{_table(header, rows)}\n\n{_provenance(found.entries[figure])}"


def _source(figure: str, claim: Mapping[str, Any]) -> str:
    """Who says so: of a paper where, and in which words."""
    said = quoted(figure, claim["claim"]) if claim["source"] == "paper" else {}
    if not said:
        return str(claim["source"])
    words = f': "{said["quote"]}"' if said["quote"] else ""
    return f"paper, {said['where']}{words}"


def _details(found: Found) -> str:
    out = []
    for figure, entry in sorted(found.entries.items()):
        module = registry.load(figure)
        title = f"### {figure}\n\n{module.TITLE[0].upper()}{module.TITLE[1:]}. {module.SOURCE}."
        notes = "\n".join(f"- {note}" for note in entry["notes"])
        body = _claims(found, figure) if entry["claims"] else _provenance(entry)
        out.append("\n\n".join(filter(None, [title, body, notes])))
    return "\n\n".join(out)


def _runs(found: Found) -> str:
    rows = [
        [figure, e["form"], _time(e["wall_seconds"]), _time(e["cpu_seconds"]), e["commit"][:9]]
        for figure, e in sorted(found.entries.items())
    ]
    first = next(iter(found.entries.values()))
    versions = ", ".join(f"{k} {v}" for k, v in first["versions"].items())
    machine = f"{first['hardware']['cores']} cores of {first['hardware']['processor']}"
    total = _time(sum(e["cpu_seconds"] for e in found.entries.values()))
    said = f"{total} of a processor in all, on {machine}, shared with other work; {versions}."
    missing = [f"`{name}`" for name in registry.figures() if name not in found.entries]
    if missing:
        said += f"\n\nNot yet run for these pages: {', '.join(missing)}."
    return _table(["figure", "size", "wall", "processor", "commit"], rows) + f"\n\n{said}"


# ---- tables of numbers --------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> str:
    """Mean and half of its 95 % interval over seeds."""
    found = np.asarray(values, float)
    if len(found) < 2:
        return f"{found.mean():.3f}"
    half = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / math.sqrt(len(found))
    return f"{found.mean():.3f} ± {half:.3f}"


def _pivot(rows: Rows, index: Sequence[str], column: str, value: str, **only: Any) -> str:
    """One line per values of ``index``, one column per value of ``column``."""
    some = [
        r for r in rows if value in r and all(r.get(k) in np.atleast_1d(v) for k, v in only.items())
    ]
    names = list(dict.fromkeys(r[column] for r in some))
    lines: dict[tuple[Any, ...], dict[Any, str]] = {}
    for r in some:
        shown = _mean(r[value]) if isinstance(r[value], list) else _text(r[value])
        lines.setdefault(tuple(r[k] for k in index), {})[r[column]] = shown
    header = [*index, *(f"{column} {n}" if isinstance(n, int | float) else n for n in names)]
    header = [str(name).replace("_", " ") for name in header]
    return _table(header, ([*key, *(of.get(n, "") for n in names)] for key, of in lines.items()))


def _plain(rows: Rows, *names: str, **only: Any) -> str:
    some = [r for r in rows if all(r.get(k) == v for k, v in only.items()) and names[0] in r]
    return _table([n.replace("_", " ") for n in names], ([r[n] for n in names] for r in some))


def _published(rows: Rows) -> str:
    from reproductions.rpdp.published import PUBLISHED

    def told(row: Mapping[str, Any]) -> str:
        theirs, _ = PUBLISHED[row["data"]].line(row["run"], row["budgets"])
        return f"{row['accuracy']:.3f} ({theirs:.3f})"

    told_rows = [{**r, "told": told(r)} for r in rows]
    return _pivot(told_rows, ["data", "budgets"], "run", "told")


SOUND = ["certified", "curve fit (paper)", "dropout", "minimum (a)", "minimum (b)", "non-private"]
TABLES: dict[str, tuple[str, Any]] = {
    "figure-1 mixture": (
        "userlevel/figure-1",
        lambda rows: _pivot(rows, ["sigma"], "group_size", "mixture"),
    ),
    "figure-1 black box": (
        "userlevel/figure-1",
        lambda rows: _pivot(rows, ["sigma"], "group_size", "black_box"),
    ),
    "language model": (
        "correlated/language-model",
        lambda rows: _pivot(rows, ["epsilon", "optimizer"], "algorithm", "losses"),
    ),
    "budgets": (
        "userlevel/budgets",
        lambda rows: _pivot(rows, ["set", "kind", "group_size"], "budget", "losses"),
    ),
    "recipes": (
        "subject/audit",
        lambda rows: _plain(
            rows, "mechanism", "claimed", "one_silo", "16_silos_fewer_rounds",
            "16_silos_more_noise", local_steps=62,
        ),
    ),
    "subjects": (
        "subject/curves",
        lambda rows: _plain(rows, "run", "unit", "claimed_epsilon", "real_epsilon", "accuracy"),
    ),
    "heart": (
        "rpdp/heart",
        lambda rows: _pivot(rows, ["tau", "budgets"], "run", "by_seed", run=SOUND),
    ),
    "heart as the paper": (
        "rpdp/heart",
        lambda rows: _pivot(
            [{**r, "run": r["run"].removesuffix(", realized batch")} for r in rows
             if r["run"].endswith("realized batch")],
            ["tau", "budgets"], "run", "by_seed",
        ),
    ),
    "centralised": (
        "rpdp/centralised",
        lambda rows: _pivot(rows, ["budgets"], "run", "by_seed"),
    ),
    "personal budgets": (
        "rpdp/budgets",
        lambda rows: _pivot(rows, ["budgets"], "run", "by_seed"),
    ),
    "personal mnist": (
        "rpdp/mnist",
        lambda rows: _pivot(rows, ["split", "budgets"], "run", "by_seed"),
    ),
    "published": ("rpdp/published", _published),
    "fitted curve": (
        "rpdp/curve",
        lambda rows: _plain(
            rows, "preset", "budgets", "renyi_overruns", "renyi_worst", "tight_overruns",
            "tight_worst",
        ),
    ),
    "isrl mnist": (
        "isrl/mnist",
        lambda rows: _pivot(rows, ["cohort", "arm", "algorithm"], "epsilon", "by_trial"),
    ),
    "isrl insurance": (
        "isrl/insurance",
        lambda rows: _pivot(rows, ["silos", "arm", "algorithm"], "epsilon", "by_trial"),
    ),
    "isrl obesity": (
        "isrl/obesity",
        lambda rows: _pivot(rows, ["arm"], "epsilon", "by_trial"),
    ),
    "isrl noise": (
        "isrl/closed-forms",
        lambda rows: _plain(
            rows, "epsilon", "theorem", "one_pass_theorem", "local_sgd_at_most",
            "local_sgd_on_mnist_at_most", "sound",
        ),
    ),
    "isrl experiments": (
        "isrl/closed-forms",
        lambda rows: _plain(rows, "experiment", "K of", "stated", "K", "at_least", "at_most"),
    ),
    "isrl audit": (
        "isrl/audit",
        lambda rows: _plain(rows, "silo", "target", "claimed", "attack"),
    ),
}  # fmt: skip


def main(files: Sequence[str]) -> None:
    """Archives, and writes the pages."""
    if files:
        archive(map(pathlib.Path, files))
    made = archived()
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text(), made))


if __name__ == "__main__":
    main(sys.argv[1:])
