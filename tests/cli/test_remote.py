from __future__ import annotations

import asyncio

import pytest

from tests.support.command import DEADLINE, tidings
from tidings.cli.remote import Unreachable, connect


def test_unusable_proxy_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALL_PROXY", "all_proxy"):  # the machine may have set either
        monkeypatch.setenv(name, "gopher://127.0.0.1")
    refused = tidings("subscriptions", "HTTP://127.0.0.1:1/mcp")
    refused.check_error("the proxy that the environment names can't be used")


@pytest.mark.anyio
async def test_server_behind_a_proxy_that_answers_503_counts_as_unreachable() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as proxy:
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/mcp"
        with pytest.raises(Unreachable, match="answered 503; the server is not available"):
            async with asyncio.timeout(DEADLINE), connect(url, None):
                pass
