"""What a log file sees of a run: lines, and never a long silence."""

import io
import re
import time

import pytest
import rich.console

from dpfl_jax.run import console as console_module
from dpfl_jax.run.console import RunConsole, StepProgress, default_console


@pytest.fixture
def log():
    return io.StringIO()


def test_a_log_file_sees_phases_and_steps(log, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    console = RunConsole(file=log)
    with console.status("reading data"):
        pass
    with StepProgress(console, "steps", 100) as bar:
        for step in range(1, 101):
            clock[0] += 1.5
            bar.update(step, f"loss {step}")
    lines = log.getvalue().splitlines()
    assert lines[0] == "reading data ..."
    assert lines[1] == "steps 7/100 loss 7"  # the first after ten seconds
    assert lines[-1] == "steps 100/100 loss 100"
    assert len(lines) == 1 + 100 // 7 + 1


def test_a_long_phase_says_that_it_goes_on(log, monkeypatch):
    monkeypatch.setattr(console_module, "SILENCE", 0.2)
    console = RunConsole(file=log)
    with console.alive(), console.status("calibrating noise"):
        deadline = time.monotonic() + 20
        while "still calibrating" not in log.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert re.search(r"still calibrating noise \(\d+ s\)", log.getvalue())
    said = log.getvalue()
    time.sleep(0.5)
    assert log.getvalue() == said  # nothing once it is over


def test_a_terminal_gets_a_bar_and_silence_stays_silent(log):
    console = RunConsole(file=log, force_terminal=True, width=120)
    with console.alive(), StepProgress(console, "steps", 2) as bar:
        bar.update(2, "loss 1")
    assert "2/2" in log.getvalue()
    assert "━" in log.getvalue()
    with StepProgress(rich.console.Console(quiet=True, file=log), "quiet", 2) as bar:
        bar.update(2, "")
    assert "quiet" not in log.getvalue()


def test_fit_is_silent_where_nobody_looks():
    assert default_console() is None  # pytest has taken the terminal
