"""Fixtures of the tests of the console. Those in Chromium need Playwright, which `make test` does not install."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("playwright") else ["test_page.py", "test_screenshots.py"]


@pytest.fixture
def no_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Log nothing, in tests whose callbacks fail on purpose."""
    caplog.set_level(logging.CRITICAL + 1, "tidings")
