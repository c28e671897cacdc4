"""The pytest plugin: `pytest_plugins = ["tidings.testing.plugin"]` in conftest.py.

It is not loaded by itself, because importing it takes a tenth of a second in each run of pytest. The SDK is imported
only by a test that uses the fixture.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidings.testing.clients import LiveClients

__all__ = ["live_clients"]


@pytest.fixture
def live_clients(request: pytest.FixtureRequest) -> Callable[..., AbstractAsyncContextManager[LiveClients]]:
    """Return `tidings.testing.connect`. The report of a test that fails has the notifications of each client."""
    from tidings.testing.clients import NotificationError, connect

    @asynccontextmanager
    async def connect_and_report(target: Any, **options: Any) -> AsyncIterator[LiveClients]:
        async with connect(target, **options) as clients:
            try:
                yield clients
            except NotificationError:
                raise  # its message has them
            except BaseException:
                request.node.add_report_section("call", "live clients", clients.report())
                raise

    return connect_and_report
