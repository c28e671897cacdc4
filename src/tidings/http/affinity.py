"""Pass each request of a legacy session to the worker that has the session. All workers accept on one socket.

A legacy session exists only in the worker that opened it. So each session id that a worker gives to a client begins
with the name of the worker and a dot. A worker passes a request with the id of another worker to that worker's Unix
socket, with its body, its response and the client's disconnect. A worker handles requests without a session itself,
except those of the console: they go to the first worker, because each worker keeps its own record of changes.

If the other worker is gone, this one handles the request. It does not know the session, so the SDK answers 404, and the
client initializes again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import h11

from tidings.http.disconnects import find_request, mark_disconnected
from tidings.http.stream import Message, Receive, Scope, Send, replay

__all__ = ["SessionAffinity"]

logger = logging.getLogger(__name__)

_HEADER = b"mcp-session-id"

_CLIENT_HEADER = b"x-tidings-client"
"""The address of the client of a request that another worker has passed on. Removed from all other requests."""

_CONSOLE = "/console"

_OWN_RESPONSE_HEADERS = frozenset({b"connection", b"date", b"server", b"transfer-encoding"})
"""Headers that the server of this worker sets itself."""

_READ_SIZE = 1 << 16


class SessionAffinity:
    """ASGI middleware around the whole app of a worker."""

    def __init__(self, app: Any, worker: str, sockets: Mapping[str, str]) -> None:
        """`worker` is the name of this worker, without a dot. `sockets` has the path of the Unix socket of each one."""
        self._app = app
        self._worker = worker.encode()
        self._others = {name.encode(): path for name, path in sockets.items() if name != worker}
        self._first = next(iter(sockets), worker).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _with_client(scope)
        owner, dot, session_id = _find_session_id(scope).partition(b".")
        if scope["path"] == _CONSOLE or scope["path"].startswith(f"{_CONSOLE}/"):
            path = self._others.get(self._first)
        else:
            path = self._others.get(owner) if dot else None
        if path is not None:
            exchange = _Exchange(scope, receive, send)
            if await exchange.forward(path):
                return
            receive = exchange.receive_again()
        if dot and owner == self._worker:
            scope = {**scope, "headers": [_replace(header, session_id) for header in scope["headers"]]}

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [_replace(header, b"%b.%b" % (self._worker, header[1])) for header in message["headers"]]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_named)


def _with_client(scope: Scope) -> Scope:
    """Return the scope with the address of the client, and without the header for it.

    Only the header of a request from another worker, through a Unix socket, is trusted."""
    found = [value for name, value in scope["headers"] if name == _CLIENT_HEADER]
    if not found:
        return scope
    headers = [header for header in scope["headers"] if header[0] != _CLIENT_HEADER]
    # A Unix socket has no port. `scope["client"]` does not tell: it is also None if a TCP client has disconnected.
    server = scope.get("server")
    is_passed = server is None or server[1] is None
    client = (found[0].decode("latin-1"), 0) if is_passed else scope["client"]
    return {**scope, "headers": headers, "client": client}


def _find_session_id(scope: Scope) -> bytes:
    """Return the session id of a request; an empty one if it has none, or several."""
    values: list[bytes] = [value for name, value in scope["headers"] if name == _HEADER]
    return values[0].strip(b" \t") if len(values) == 1 else b""


def _replace(header: tuple[bytes, bytes], session_id: bytes) -> tuple[bytes, bytes]:
    return (header[0], session_id) if header[0].lower() == _HEADER else header


class _Exchange:
    """One request that another worker handles, and its response.

    Each exchange opens a new connection: a connection that was kept could belong to a worker that is gone."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._http = h11.Connection(h11.CLIENT)
        self._messages: list[Message] = []
        self._is_started = False

    def receive_again(self) -> Receive:
        """Return a `receive` that repeats the messages that were read already. The SDK limits their size."""
        return replay(self._messages, self._receive)

    async def forward(self, path: str) -> bool:
        """Pass the request and its response. Return False if no response was sent and the client waits."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            logger.debug("a worker is gone: %s", error)
            return False
        response = asyncio.ensure_future(self._pass_response(reader))
        request = asyncio.ensure_future(self._pass_request(writer))
        try:
            await asyncio.wait({response, request}, return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                response.result()
        except (OSError, h11.ProtocolError) as error:
            logger.debug("a worker is gone: %s", error)
            if not self._is_started:
                return False
            self._abort()
        finally:
            writer.transport.abort()
            for task in (response, request):
                task.cancel()
            await asyncio.gather(response, request, return_exceptions=True)
        return True

    async def _pass_request(self, writer: asyncio.StreamWriter) -> None:
        """Pass the request, and return when the client has disconnected."""
        scope = self._scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = list(scope["headers"])
        if scope.get("client"):
            headers.append((_CLIENT_HEADER, scope["client"][0].encode("latin-1", "replace")))
        head = h11.Request(method=scope["method"], target=target, headers=headers)
        try:
            writer.write(self._http.send(head))
            while (message := await self._receive())["type"] == "http.request":
                self._messages.append(message)
                if body := message.get("body"):
                    writer.write(self._http.send(h11.Data(body)))
                if not message.get("more_body"):
                    writer.write(self._http.send(h11.EndOfMessage()))
                await writer.drain()
        except (OSError, h11.ProtocolError) as error:
            # The response may say why, for example that the body is too large.
            logger.debug("a worker does not read a request: %s", error)
            await asyncio.Event().wait()

    async def _pass_response(self, reader: asyncio.StreamReader) -> None:
        while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                self._http.receive_data(await reader.read(_READ_SIZE))
            elif isinstance(event, h11.Response):
                headers = [header for header in event.headers if header[0] not in _OWN_RESPONSE_HEADERS]
                self._is_started = True
                await self._send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                await self._send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    def _abort(self) -> None:
        """Close the connection of the client without the end of the response, as the worker that is gone did."""
        request = find_request(self._scope, self._receive)
        if request is not None:
            request.transport.abort()
            mark_disconnected(request)
