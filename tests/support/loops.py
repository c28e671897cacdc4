"""Each test twice, on asyncio's own event loop and on uvloop: `from tests.support.loops import anyio_backend`."""

from __future__ import annotations

import pytest

__all__ = ["anyio_backend"]


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Their transports have nothing in common."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}
