"""Answer requests that the server interrupts when it stops.

uvicorn cancels requests that take too long at its shutdown, and the SDK ends their responses without an answer. The
client then gets a bare 500, or a stream that breaks off. Instead, it gets a JSON-RPC error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mcp_types import CONNECTION_CLOSED

from tidings.core.frames import SSE_HEAD, SSE_TAIL
from tidings.http.stream import Message, Receive, Scope, Send
from tidings.wire.envelope import decode_message, error_response

__all__ = ["AnswerInterrupted"]


class AnswerInterrupted:
    """Wraps the ASGI app of the SDK, and answers the requests that it leaves without an answer."""

    def __init__(self, app: Any, is_stopping: Callable[[], bool]) -> None:
        self._app = app
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if self._is_stopping():
                await exchange.finish()
            raise
        if self._is_stopping():
            await exchange.finish()


class _Exchange:
    """One request and its response."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._body: list[bytes] = []
        self._start: Message | None = None
        self._is_complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body.append(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body")
        await self._send(message)

    async def finish(self) -> None:
        """Send an error if the response is not complete."""
        if self._is_complete:
            return
        request = decode_message(b"".join(self._body))
        reason = "The server stopped before the request was finished"
        body = error_response(request.id if request else None, CONNECTION_CLOSED, reason)
        if self._start is None:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await self._send({"type": "http.response.start", "status": 503, "headers": headers})
        elif (b"content-type", b"text/event-stream") in self._start["headers"]:
            body = SSE_HEAD + body + SSE_TAIL
        else:
            return  # the start of a JSON response was sent, and an error can't follow it
        await self._send({"type": "http.response.body", "body": body})
