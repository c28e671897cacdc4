"""A NATS server for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidings.cluster.embedded import EmbeddedNats


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with EmbeddedNats() as server:
        yield server.url
