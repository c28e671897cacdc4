"""Run each test on the event loop of asyncio and on uvloop: `from tests.support.loops import anyio_backend`."""

from __future__ import annotations

import pytest

__all__ = ["anyio_backend"]


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Run on both loops, because their transports share no code."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}
