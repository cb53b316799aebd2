"""The release's script refuses what is no release; workflows call scripts that are there."""

import os
import pathlib
import re
import subprocess

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]


def git(*words, cwd):
    named = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    return subprocess.run(["git", *named, *words], cwd=cwd, check=True, capture_output=True)


def checked(clone, *words):
    """(exit code, what was printed)."""
    done = subprocess.run(
        [clone / "tests" / "release.sh", "--check", *words], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_what_is_no_release_is_refused(tmp_path):
    clone = tmp_path / "clone"
    git("clone", "--quiet", "--shared", str(ROOT), str(clone), cwd=tmp_path)
    code, told = checked(clone, "--dry-run")
    assert code == 0, told
    assert "version " in told
    file = clone / "dpfl_jax" / "__init__.py"
    version = re.search('__version__ = "(.*)"', file.read_text())[1]
    if "dev" in version:
        code, told = checked(clone)
        assert code == 1
        assert f"{version} is in development" in told
    file.write_text(file.read_text().replace(version, "9.9.9"))
    assert checked(clone, "--dry-run") == (1, "release: the tree is not clean: commit, or stash\n")
    git("commit", "--quiet", "-am", "another version in one place", cwd=clone)
    code, told = checked(clone, "--dry-run")
    assert code == 1
    assert "dpfl_jax/__init__.py has another version" in told


def test_workflows_call_scripts_that_are_there():
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    called = set()
    for file in workflows:
        jobs = yaml.safe_load(file.read_text())["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        for step in steps:
            called |= set(re.findall(r"(?:^|\s)((?:tests|\.ci)/\S+)", step.get("run", "")))
    assert called == {".ci/run", "tests/notebooks.sh", "tests/versions.sh", "tests/release.sh"}
    assert all(os.access(ROOT / script, os.X_OK) for script in called)
