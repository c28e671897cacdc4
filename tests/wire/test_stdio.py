from __future__ import annotations

import os

import pytest

from tests.support.sdk_clients import DEADLINE, stdio_server
from tidings.wire.stdio import StdioClientSession


@pytest.mark.anyio
async def test_no_signal_is_sent_to_a_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have reused its number."""
    server = stdio_server("mcpserver")
    session = StdioClientSession([server.command, *server.args], "modern", DEADLINE)
    await session.open()
    await session.close()
    sent: list[tuple[int, ...]] = []
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda *arguments: sent.append(arguments))
    assert await session.terminate(DEADLINE)
    assert sent == []
