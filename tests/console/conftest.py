"""Fixtures of the tests of the console."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def no_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Log nothing, in tests whose callbacks fail on purpose."""
    caplog.set_level(logging.CRITICAL + 1, "tidings")
