"""The disk cache of calibrations is off in tests, except where a test turns it on."""

import pytest


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("DPFL_CACHE_DIR", "off")
