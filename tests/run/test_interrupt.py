"""Signals: a run ends between two steps, and a program that would go on after it ends at once."""

import os
import signal

import pytest

from dpfl_jax.run.interrupt import StopRequest, default_signal_handling


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
