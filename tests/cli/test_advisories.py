"""Advisories of guarantees: `dpfl verify` and a run that resumes name those they meet."""

import copy
import json
import random
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.accounting import advisories, statement, versions
from dpfl_jax.cli.main import main
from dpfl_jax.mechanisms import uls
from dpfl_jax.run import directory, pipeline
from tests.runs import DiedError
from tests.statements import SOUND

LATER = "dpfl_jax 9.0.0"  # than all that has advisories


def planted(**values):
    """An advisory of a version, which nobody published."""
    return {
        "id": "PLANTED-1",
        "date": "2030-01-01",
        "concerns": "run",
        "condition": "A planted condition",
        "stated": "epsilon 1",
        "true": "epsilon 2",
        "what_to_do": "Train again",
        "introduced": "2029-01-01",
        "fixed": "2030-01-01",
        "since": "1.0.0",
        "before": "1.1.0",
        "certain": True,
    } | values


def file_of(folder, *entries, **more):
    file = folder / "advisories.json"
    file.write_text(json.dumps({"version": 1, "advisories": entries} | more))
    return file


def verify(file, capsys, *options):
    """(exit code, what --json printed, or the error)."""
    capsys.readouterr()
    code = main(["verify", str(file), "--json", *map(str, options)])
    printed = capsys.readouterr()
    return code, printed.err if code == 2 else json.loads(printed.out.splitlines()[-1])


def write(folder, values):
    file = folder / "guarantee.json"
    file.write_text(json.dumps(values))
    return file


def names(output, applies):
    return [one["id"] for one in output["advisories"] if one["applies"] == applies]


# ---- three that are planted ----------------------------------------------------------------------


def test_a_private_sweep_whose_cells_had_the_noise_of_the_first_is_named(tmp_path, capsys):
    """Of a version before 1.0.0: the file shows that cells have different numbers of examples."""
    values = SOUND["selection"]().to_json() | {"library": "dpfl_jax 0.1.0"}
    code, output = verify(write(tmp_path, values), capsys)
    assert (code, names(output, "certain")) == (0, [])
    values["basis"]["cells"][1]["population"]["num_examples"] += 1
    code, output = verify(write(tmp_path, values), capsys)
    assert (code, output["holds"], names(output, "certain")) == (3, False, ["DPFL-2026-001"])
    [said] = [one for one in output["failures"] if "DPFL-2026-001" in one]
    assert "Stated: epsilon 4. True: up to 8.5" in said
    values["library"] = LATER
    assert verify(write(tmp_path, values), capsys)[1]["advisories"] == []


def test_what_a_file_cannot_show_is_named_and_does_not_fail(tmp_path, capsys):
    """Individual budgets of a version-1 file, and what may have happened to any run of then."""
    values = SOUND["individual"]().to_json() | {"library": "dpfl_jax 0.1.0", "version": 1}
    for name in ("unit_key", "public_inputs"):
        del values["privacy"][name]
    del values["digests"]
    file = write(tmp_path, values)
    code, output = verify(file, capsys)
    assert (code, output["holds"], names(output, "certain")) == (0, True, [])
    assert {"DPFL-2026-002", "DPFL-2026-023"} <= set(names(output, "possible"))
    assert main(["verify", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "made by dpfl_jax 0.1.0, to which advisories may apply" in said
    assert "DPFL-2026-023 may be about this guarantee. Individual budgets" in said
    values["library"] = LATER
    assert verify(write(tmp_path, values), capsys)[1]["advisories"] == []


def test_a_file_of_advisories_takes_none_back_and_a_newer_library_is_named(tmp_path, capsys):
    values = SOUND["selection"]().to_json() | {"library": "dpfl_jax 0.1.0"}
    values["basis"]["cells"][1]["population"]["num_examples"] += 1
    none = file_of(tmp_path)
    code, output = verify(write(tmp_path, values), capsys, "--advisories", none)
    assert (code, names(output, "certain")) == (3, ["DPFL-2026-001"])
    assert not output["library_is_newer"]
    file = write(tmp_path, SOUND["uls"]().to_json() | {"library": "dpfl_jax 99.0.0"})
    assert verify(file, capsys)[1]["library_is_newer"]
    assert main(["verify", str(file)]) == 0
    assert "which is newer than the" in capsys.readouterr().out


def test_a_commit_of_a_newer_file_of_advisories_is_named(tmp_path, capsys):
    commit = "0123456789ab" + "c" * 28
    known = file_of(tmp_path, planted(commits=[commit, "f" * 40]))
    for of, is_affected in (
        (f"1.0.0.dev3+g{commit[:12]}", True),
        (f"1.0.0.dev3+g{commit[:12]}.dirty", True),
        ("1.0.0.dev3+g" + "e" * 12, False),
        ("9.9.9+g" + "e" * 12, False),
        ("1.0.5", True),  # without a commit the version decides
        ("1.1.0", False),
        ("9.0.0, 1.0.0", True),  # a run that one version began and another ended
    ):
        values = SOUND["uls"]().to_json() | {"library": f"dpfl_jax {of}"}
        code, output = verify(write(tmp_path, values), capsys, "--advisories", known)
        assert (code, names(output, "certain")) == (
            (3, ["PLANTED-1"]) if is_affected else (0, [])
        ), of


# ---- which versions ------------------------------------------------------------------------------


def test_versions_are_ordered_as_releases_are():
    order = ["0.1.0", "1.0.0.dev0", "1.0.0.dev7", "1.0.0a1", "1.0.0rc2", "1.0.0", "1.0.10", "1.2.0"]
    made = [versions.version_of(text).order for text in order]
    assert made == sorted(made)
    assert versions.version_of("1.0.0+g0123456789ab.dirty").commit == "0123456789ab"


@pytest.mark.parametrize("text", ["", "1.0", "v1.0.0", "1.0.0.dev", "1.0.0+gxyz", "x" * 999])
def test_a_version_that_cannot_be_read_may_be_any(text, tmp_path, capsys):
    assert versions.version_of(text) is versions.version_of(f"{text}\n") is None
    values = SOUND["uls"]().to_json() | {"library": f"dpfl_jax {text}"}
    known = file_of(tmp_path, planted())
    code, output = verify(write(tmp_path, values), capsys, "--advisories", known)
    assert code == 0
    assert "PLANTED-1" in names(output, "possible")


def test_the_commit_is_that_of_the_checkout_of_the_package(tmp_path, monkeypatch):
    """And of no repository that a copy of the package lies in, nor one that a variable names."""
    made = versions.this_version()
    assert re.fullmatch(rf"{re.escape(dpfl.__version__)}(\+g[0-9a-f]{{12}}(\.dirty)?)?", made)
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    versions.this_version.cache_clear()
    assert versions.this_version() == made
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "of_somebody"\n')
    monkeypatch.setattr(versions, "_ROOT", tmp_path)
    for name in ("of_somebody", "dpfl_jax"):  # the second time a folder that git does not know
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
        versions.this_version.cache_clear()
        assert versions.this_version() == dpfl.__version__
    versions.this_version.cache_clear()


# ---- files of somebody else ----------------------------------------------------------------------


def test_the_advisories_of_the_package_are_complete():
    known = advisories.known()
    assert len({one.id for one in known}) == len(known) > 30
    for one in known:
        texts = (one.condition, one.stated, one.true, one.what_to_do)
        assert all(text and not text.endswith(".") for text in texts), one.id
        assert one.introduced <= (one.fixed or one.date)


BAD = {
    "an unknown key": ({"run": "os.system"}, "Extra inputs"),
    "no id": ({"id": "../x"}, "id: String should match"),
    "code in place of values": ({"where": {"basis": "__import__('os')"}}, "where.basis"),
    "a value that is a table": ({"where": {"basis": [{"a": 1}]}}, "where.basis"),
    "another version": ({"before": "latest"}, "before"),
    "a commit that is none": ({"commits": [".*"]}, "commits.0"),
    "another date": ({"date": 10**18}, "date"),
    "a line break": ({"condition": "x\nholds: all of it"}, "line break"),
    "no text": ({"true": None}, "true: Input should be a valid string"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_advisory_gets_one_sentence(name, tmp_path, capsys):
    change, words = BAD[name]
    known = file_of(tmp_path, planted(**change))
    file = write(tmp_path, SOUND["uls"]().to_json())
    code, output = verify(file, capsys, "--advisories", known)
    assert code == 2
    assert words in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 10**5, '{"version": 2, "advisories": []}'])
def test_what_is_no_file_of_advisories_gets_one_sentence(text, tmp_path, capsys):
    (tmp_path / "advisories.json").write_text(text)
    file = write(tmp_path, SOUND["uls"]().to_json())
    code, output = verify(file, capsys, "--advisories", tmp_path / "advisories.json")
    assert code == 2
    assert output.startswith("dpfl: error: ")
    assert output.count("\n") == 1
    code, output = verify(file, capsys, "--advisories", tmp_path)
    assert code == 2


def test_places_that_are_not_there_and_other_types_are_no_match(tmp_path, capsys):
    file = write(tmp_path, SOUND["uls"]().to_json() | {"library": "dpfl_jax 1.0.0"})
    for place, wanted, fits in (
        ("privacy.unit", ["user"], True),
        ("privacy.unit", ["record", "user"], True),
        ("basis.steps", [30.0], True),
        ("basis.steps", [True], False),
        ("basis.steps", ["30"], False),
        ("basis.steps.*", [30], False),
        ("events.*.*.type", ["SelfComposedDpEvent"], True),
        ("events.*.*.type", "differ", False),
        ("privacy.assumptions.*", "differ", True),
        ("privacy", [None], False),
        ("__class__", [None], False),
        ("basis.mechanism.__class__.__name__", ["dict"], False),
        ("", [None], False),
        (".".join("*" * 1000), "differ", False),
        ("digests", [None], True),
    ):
        known = file_of(tmp_path, planted(where={place: wanted}))
        code, output = verify(file, capsys, "--advisories", known)
        assert (code, bool(output["advisories"])) == ((3, True) if fits else (0, False)), place


@pytest.mark.parametrize("seed", range(3))
def test_no_change_of_a_guarantee_ends_in_a_traceback(seed, tmp_path, capsys):
    """Whatever stands in place of any value, with advisories that look everywhere."""
    values, draw = SOUND["uls"]().to_json() | {"library": "dpfl_jax 0.1.0"}, random.Random(seed)
    anything = [None, True, -1, 1e308, "", "x", [], {}, [[]], {"a": None}, 2**62]
    wheres = [{".".join("*" * n): "differ"} for n in range(1, 6)]
    wheres += [{f"basis.{name}": [1, None, "x"]} for name in values["basis"]]
    known = file_of(tmp_path, *(planted(id=f"P-{i}", where=w) for i, w in enumerate(wheres)))

    def places(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield node, key
            if isinstance(node[key], (dict, list)) and node[key]:
                yield from places(node[key])

    for _ in range(10):
        changed = copy.deepcopy(values)
        node, key = draw.choice(list(places(changed)))
        node[key] = draw.choice(anything)
        file = write(tmp_path, changed)
        assert verify(file, capsys, "--advisories", known)[0] in (0, 2, 3)
        assert verify(file, capsys)[0] in (0, 2, 3)


# ---- runs that resume ----------------------------------------------------------------------------


def a_run(folder, console=None, steps=3, die_at=None):
    """Trains on sixteen people, in seconds; dies after a step if it is to."""
    store = dpfl.from_arrays({"x": np.ones((16, 1), "float32")}, users=np.arange(16))
    plan = uls(group_size=1, cohort_size=4).plan(store, steps=steps, epsilon=8.0, delta=1e-2)

    def on_step(*_, **__):
        if die_at is not None:
            raise DiedError

    return dpfl.fit(
        lambda params, example: jnp.sum(example["x"] * params),
        jnp.zeros(1),
        plan,
        optax.sgd(0.1),
        run_dir=folder,
        loop=dpfl.LoopConfig(log_every=1, checkpoint_every=1),
        hooks=dpfl.Hooks(on_step=on_step),
        console=console,
    )


@pytest.mark.parametrize("is_affected", [True, False])
def test_a_resumed_run_names_the_advisories_of_the_version_that_began_it(
    is_affected, tmp_path, monkeypatch, capsys
):
    from rich.console import Console

    known = file_of(tmp_path, planted(before="1.1.0" if is_affected else "1.0.0"))
    read = advisories.known
    monkeypatch.setattr(pipeline.advisories, "known", lambda path=known: read(path))
    with monkeypatch.context() as patch:
        patch.setattr(directory, "this_version", lambda: "1.0.0")
        with pytest.raises(DiedError):
            a_run(tmp_path / "run", die_at=1)
    capsys.readouterr()
    result = a_run(tmp_path / "run", Console(width=500))
    output = capsys.readouterr().out
    assert ("warning: PLANTED-1 is about this guarantee" in output) is is_affected
    assert any("PLANTED-1" in one for one in result.guarantee.caveats) is is_affected
    made = statement.read(tmp_path / "run" / "guarantee.json")
    assert made.library == f"dpfl_jax 1.0.0, {versions.this_version()}"
    code, output = verify(tmp_path / "run", capsys, "--advisories", known)
    assert (code, bool(output["advisories"])) == ((3, True) if is_affected else (0, False))
