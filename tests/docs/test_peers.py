"""The comparison with other libraries: every cell has its source, and our numbers are ours."""

import re

import pages
import pytest

from dpfl_jax.accounting import epsilon, events

PAGE = pages.ROOT / "docs" / "results" / "peers.md"
TEXT = PAGE.read_text()


def rows(section, columns):
    """Of the first table with as many columns below a heading, without its head."""
    text = TEXT[TEXT.index(f"# {section}\n") :]
    found = re.search(rf"^\|.*\n\|(?:-+\|){{{columns}}}\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def test_what_is_said_of_another_library_links_to_where_it_was_seen():
    refs = dict(re.findall(r"^\[(\S+)\]: (\S+)", TEXT, re.M))
    homes = ("jax_privacy", "opacus", "pfl-research", "opake")
    table = rows("Read in their files", 6)
    assert len(table) > 10
    used = set()
    for row in table:
        for home, cell in zip(homes, row[2:], strict=True):
            names = re.findall(r"\]\[([\w-]+)\]", cell)
            assert names, cell
            assert all(f"/{home}" in refs[name] for name in names), cell
            used.update(names)
    assert used == set(refs)


ROWS = {
    "ELS, 4": lambda: events.els(4.0, 0.01, 4, 1000),
    "ELS, 16": lambda: events.els(4.0, 0.01, 16, 1000),
    "Poisson: sigma 4,": lambda: events.uls(4.0, 0.01, 1000),
    "Poisson: sigma 1,": lambda: events.uls(1.0, 0.01, 1000),
    "Poisson: sigma 0.626": lambda: events.uls(0.626, 1 / 28, 28),
    "once in 28": lambda: events.allocated(0.626, 28, 28),
}


def test_our_epsilons_are_what_it_prints_and_the_others_are_as_near_as_it_says():
    table = rows("Epsilon of the same mechanism", 4)
    assert len(table) == len(ROWS)
    for (begins, event), (name, ours, *others) in zip(ROWS.items(), table, strict=True):
        assert name.startswith(begins)
        assert epsilon(event(), 1e-6) == pytest.approx(float(ours), abs=6e-6)
        for other in others:
            if re.fullmatch(r"[\d.]+", other):
                assert float(other) == pytest.approx(float(ours), rel=1e-3)


def test_costs_of_a_step_are_those_of_the_page_about_speed():
    speed = (PAGE.parent / "speed.md").read_text()
    for workload, ours, theirs in rows("A step's cost", 3):
        line = next(line for line in speed.splitlines() if line.startswith(f"| {workload} |"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert (cells[1], cells[4]) == (ours, theirs)
