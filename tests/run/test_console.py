"""What is shown is text, whoever wrote it."""

import io
import os
import signal

import pytest
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table

from dpfl_jax.cli.main import main
from dpfl_jax.run.console import Console, RunConsole, StopRequest, default_signal_handling
from tests.statements import SOUND, finished

ODD = "[/x] [red]a[/red] :smile: \x1b]0;owned\x07\x9b2J\u202e b"


def shown(*what, terminal=False, kind=Console, **options):
    file = io.StringIO()
    kind(file=file, width=200, force_terminal=terminal).print(*what, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", [Console, RunConsole])
@pytest.mark.parametrize("terminal", [False, True])
def test_text_of_others_is_no_markup_and_moves_no_cursor(kind, terminal):
    table = Table(ODD, title=ODD)
    table.add_row(ODD)
    for what in (ODD, table, Panel(ODD), Markdown(f"# {ODD}\n`{ODD}`", hyperlinks=False)):
        found = shown(what, terminal=terminal, kind=kind, highlight=False)
        assert "[/x] [red]a[/red] :smile: " in found
        for bad in ("\x1b]", "\x07", "\x9b", "\u202e"):
            assert bad not in found
        assert terminal or "\x1b" not in found
    assert shown("a\tb ä\n日本").split() == ["a", "b", "ä", "日本"]


def test_a_warning_is_seen():
    assert "\x1b[1;33mwarning:\x1b[0m" in shown("warning: noise", terminal=True, highlight=False)
    assert shown("warning: noise") == "warning: noise\n"


def test_off_a_terminal_a_report_is_whole_and_in_short(tmp_path, capsys, monkeypatch):
    """No table is cut, and how norms are computed is for who asks for it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    names = ("loss", "loss_by_user", "accuracy", "majority_accuracy", "base_rate", "auc")
    evaluation = {"final": dict.fromkeys(names, 0.123456)}
    norms = {"summary": "norms of 1 of 2 parameters by book-keeping", "warning": None}
    finished(tmp_path, SOUND["uls"](), eval=evaluation, clipping=norms)
    for options in ((), ("--full",)):
        assert main(["show", str(tmp_path), *options]) == 0
        told = capsys.readouterr().out
        assert "…" not in told
        assert all(name.replace("_", " ") in told for name in names)
        assert ("book-keeping" in told) == bool(options)


def test_a_report_that_somebody_sent_moves_no_cursor(tmp_path, capsys):
    run = tmp_path / "[/x]"
    finished(run, SOUND["uls"](), name=ODD, model={"kind": "[a](http://evil.example)"})
    assert main(["show", str(run)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "[a](http://evil.example)" in told
    (run / "report.json").write_text((run / "report.json").read_text().replace("planned_", "p"))
    assert main(["show", str(run)]) == 2
    assert "report.json is damaged" in capsys.readouterr().err
    assert main(["show", str(tmp_path / ODD)]) == 2
    assert "\x1b" not in capsys.readouterr().err
    (run / "report.json").unlink()
    (run / "config.yaml").write_text("a: 1\n")
    assert main(["show", str(run)]) == 0
    assert f"{run}: unfinished".replace("\n", "") in capsys.readouterr().out.replace("\n", "")


# ---- signals: a run ends between two steps, what would go on after it ends at once --------------


class EndedError(Exception):
    """Instead of the process."""


@pytest.fixture
def handler():
    def end(number, frame):
        raise EndedError

    before = signal.signal(signal.SIGTERM, end)
    yield end
    assert signal.signal(signal.SIGTERM, before) is end


def test_a_run_is_asked_to_stop_once(handler):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"
        with pytest.raises(EndedError):
            os.kill(os.getpid(), signal.SIGTERM)


def test_what_would_take_a_part_for_the_whole_ends_at_once(handler):
    with default_signal_handling(), StopRequest() as stop, pytest.raises(EndedError):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested is None
    with StopRequest() as stop:  # as before
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested == "SIGTERM"
