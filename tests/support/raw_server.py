"""A server over either transport that answers each request with a text, which need not be valid.

In the text, `ID` is the id of the request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE
from tidings.wire.http import HttpClientSession
from tidings.wire.session import Session
from tidings.wire.stdio import StdioClientSession

__all__ = ["raw_session", "serving_text"]

_PROGRAM = """
import json, sys
for line in sys.stdin:
    if "id" in (message := json.loads(line)):
        print(sys.argv[1].replace("ID", json.dumps(message["id"])), flush=True)
"""


@asynccontextmanager
async def serving_text(text: str) -> AsyncIterator[str]:
    """Serve over HTTP; yield the URL."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        request_id = json.loads(body or b"{}").get("id")
        answer = b"" if request_id is None else text.replace("ID", json.dumps(request_id)).encode()
        status = 202 if request_id is None else 200
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": answer})

    async with run_uvicorn(app, lifespan="off") as server:
        yield f"http://127.0.0.1:{address_of(server)[1]}/mcp"


@asynccontextmanager
async def raw_session(transport: str, text: str) -> AsyncIterator[Session]:
    """Open a session with such a server."""
    session: Session
    if transport == "stdio":
        async with StdioClientSession([sys.executable, "-c", _PROGRAM, text], "modern", DEADLINE) as session:
            await session.open()
            yield session
    else:
        async with serving_text(text) as url, HttpClientSession(url, "modern", DEADLINE, headers={}) as session:
            await session.open()
            yield session
