"""Fixtures of the tests of the core."""

from __future__ import annotations

import logging

import pytest

from tests.support.published import Published, record_commits
from tests.support.readers import Clock, Reader
from tidings import Catalog, Hub
from tidings.sdk.uri_templates import read_template


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def published(catalog: Catalog) -> Published:
    return record_commits(catalog)


@pytest.fixture
def hub(catalog: Catalog, clock: Clock) -> Hub:
    return Hub(catalog, templates=read_template, clock=clock)


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def no_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Log nothing, in tests whose callbacks fail on purpose."""
    caplog.set_level(logging.CRITICAL + 1, "tidings")
