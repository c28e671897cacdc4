"""The servers of a test module, and clients of them over the wire."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.support.sdk_clients import serving_all
from tests.support.wire_clients import Wires, http

__all__ = ["http"]


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Start the servers that the module has in `SERVERS`, by name: their kind and options."""
    with serving_all(request.module.SERVERS) as urls:
        yield urls


@pytest.fixture
def wires(urls: dict[str, str], http: httpx2.AsyncClient) -> Wires:
    return Wires(urls, http)
