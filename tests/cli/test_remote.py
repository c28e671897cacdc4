from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.command import DEADLINE, tidings
from tests.support.uvicorn_server import address_of, run_uvicorn
from tidings import Live, TidingsError
from tidings.cli.remote import Unreachable, connect


def test_unusable_proxy_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALL_PROXY", "all_proxy"):  # the machine may have set either
        monkeypatch.setenv(name, "gopher://127.0.0.1")
    refused = tidings("subscriptions", "HTTP://127.0.0.1:1/mcp")
    refused.check_error("the proxy that the environment names can't be used")


@asynccontextmanager
async def answering(status: str, answer: str | Iterator[str] = "") -> AsyncIterator[str]:
    """Yield the URL of a server that answers each request alike, or with the next text. `ID` is the request's id."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        request = json.loads(await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0])))
        text = answer if isinstance(answer, str) else next(answer)
        body = text.replace("ID", json.dumps(request.get("id"))).encode()
        headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        writer.write(f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body)
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


@pytest.mark.anyio
async def test_server_behind_a_proxy_that_answers_503_counts_as_unreachable() -> None:
    async with answering("503 Service Unavailable") as url:
        with pytest.raises(Unreachable, match="answered 503; the server is not available"):
            async with asyncio.timeout(DEADLINE), connect(url, None):
                pass


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        '{"a": 1}',
        '{"jsonrpc": "2.0", "id": ID, "error": {"code": -1, "message": "\\n\\u001b[31m"}}',
        '{"jsonrpc": "2.0", "id": ID, "result": {"a": 1}}',
        '{"jsonrpc": "2.0", "id": ID, "result": {"protocolVersion": "1999-01-01", "capabilities": {}, '
        '"serverInfo": {"name": "old", "version": "1"}}}',
    ],
)
async def test_an_answer_that_is_not_mcp_is_a_one_line_error(answer: str) -> None:
    async with answering("200 OK", answer) as url:
        with pytest.raises(Unreachable, match="can't be reached: ") as raised:
            async with asyncio.timeout(DEADLINE), connect(url, None):
                pass
    assert str(raised.value).isprintable()


@pytest.mark.anyio
async def test_a_server_without_the_modern_era_gets_one_session_and_its_end() -> None:
    server = MCPServer("old")
    server.add_tool(lambda: "", name="first")
    app = Live(server).http_app()
    requests: list[str] = []

    async def legacy_only(scope: Any, receive: Any, send: Any) -> None:
        is_modern = any(name == b"mcp-method" for name, _ in scope.get("headers", ()))
        if scope["type"] == "http":
            requests.append(scope["method"] if not is_modern else "modern")
        if is_modern:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    async with run_uvicorn(legacy_only, http="h11") as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        async with asyncio.timeout(DEADLINE), connect(url, None) as remote:
            await remote.watch([])
            remote.clear()
            server.add_tool(lambda: "", name="second")
            await remote.wait()
            assert [tool["name"] for tool in (await remote.request("tools/list"))["tools"]] == ["first", "second"]
            assert not remote.is_lost
    assert (requests[0], requests.count("modern"), requests[-1]) == ("modern", 1, "DELETE")
    assert "GET" in requests


@pytest.mark.anyio
async def test_a_result_that_is_not_an_object_is_a_clear_error() -> None:
    answer = '{"jsonrpc": "2.0", "id": ID, "result": %s}'
    discovered = '{"supportedVersions": ["2026-07-28"]}'
    answers = iter([answer % discovered, answer % "[]"])
    async with answering("200 OK", answers) as url, asyncio.timeout(DEADLINE), connect(url, None) as remote:
        with pytest.raises(TidingsError, match="the result of ping is not an object"):
            await remote.request("ping")
