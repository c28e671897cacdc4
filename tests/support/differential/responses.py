"""Send a request to an app or to a port, and reduce the response to what a live server must not change.

`comparable` removes the differences that docs/live.md names: the cursor in `_meta`, the extension, the capabilities
`listChanged` and `subscribe`, the ids of SSE events, and a URI that an acknowledgement repeats. Everything else is
compared.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from tests.support.differential.requests import HttpRequest

__all__ = ["HttpAnswer", "answer_of", "comparable", "socket_answer_of"]

DEADLINE = 30.0
"""Seconds for one response: far above the slowest, so that only a request without a response meets it."""
CURSOR, EXTENSION = "dev.tidings/cursor", "dev.tidings/changes"
ACKNOWLEDGED = b"notifications/subscriptions/acknowledged"
VARYING_HEADERS = {b"connection", b"content-length", b"date"}
"""The length of a body differs because of the additions. HTTP/1.1 needs no `Connection: keep-alive`."""


class HttpAnswer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    """Of a stream that stays open, only the first event."""

    @property
    def session_id(self) -> bytes | None:
        return dict(self.headers).get(b"mcp-session-id")


async def answer_of(app: Any, request: HttpRequest) -> HttpAnswer:
    """Return the response of an app. Close a stream after its first event, and the GET stream of a session at once."""
    chunks = list(request.chunks)
    is_closed = asyncio.Event()
    status, headers, body = 0, [], b""

    async def receive() -> dict[str, Any]:
        if chunks:
            return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}
        await is_closed.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, headers, body
        if message["type"] == "http.response.start":
            status, headers = message["status"], [(name.lower(), value) for name, value in message["headers"]]
            if request.method == "GET" and status == 200:
                is_closed.set()
        elif not is_closed.is_set():
            body += message.get("body", b"")
            if ACKNOWLEDGED in body:
                is_closed.set()

    path, _, query = request.path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": request.headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    async with asyncio.timeout(DEADLINE):
        await app(scope, receive, send)
    return HttpAnswer(status, headers, body)


async def socket_answer_of(port: int, request: HttpRequest) -> HttpAnswer:
    """Return the response of a server on a new connection. A body in several parts is sent with chunked encoding."""
    lines = [f"{request.method} {request.path} HTTP/1.1".encode()]
    lines += [name + b": " + value for name, value in request.headers]
    if len(request.chunks) == 1:
        lines.append(b"content-length: %d" % len(request.chunks[0]))
        body = request.chunks[0]
    else:
        lines.append(b"transfer-encoding: chunked")
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in request.chunks if chunk) + b"0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(DEADLINE):
            writer.write(b"\r\n".join([*lines, b"", b""]) + body)
            return await _read_answer(reader, request)
    finally:
        writer.close()


async def _read_answer(reader: asyncio.StreamReader, request: HttpRequest) -> HttpAnswer:
    start, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    headers = [(name.lower(), value) for name, _, value in (line.partition(b": ") for line in lines)]
    status, fields, body = int(start.split()[1]), dict(headers), b""
    if request.method == "HEAD" or (request.method == "GET" and status == 200):
        return HttpAnswer(status, headers, b"")
    if fields.get(b"transfer-encoding") == b"chunked":
        while ACKNOWLEDGED not in body and (size := int(await reader.readline(), 16)):
            body += (await reader.readexactly(size + 2))[:-2]
    else:
        body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
    return HttpAnswer(status, headers, body)


def comparable(answer: HttpAnswer) -> tuple[int, list[tuple[bytes, bytes]], Any]:
    """Return the parts of a response that are the same for a live server."""
    headers = [(name, b"" if name == b"mcp-session-id" else value) for name, value in answer.headers]
    kept = sorted((name, value) for name, value in headers if name not in VARYING_HEADERS)
    return answer.status, kept, _comparable_body(answer.body)


def _comparable_body(body: bytes) -> Any:
    """Return the JSON of a body, the JSON of the events of an SSE stream, or the bytes themselves."""
    if body.startswith((b"event:", b"data:", b"id:", b": ")):
        events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")]
        return [_reduced(json.loads(event)) for event in events]
    try:
        return _reduced(json.loads(body))
    except ValueError:
        return body


def _reduced(message: Any) -> Any:
    """Return a JSON-RPC message without the documented additions."""
    if not isinstance(message, dict):
        return message
    for part in ("result", "params"):
        content = message.get(part)
        if isinstance(content, dict):
            _remove(content, "_meta", CURSOR)
            _reduce_capabilities(content.get("capabilities"))
            if isinstance(topics := content.get("notifications"), dict) and "resourceSubscriptions" in topics:
                topics["resourceSubscriptions"] = list(dict.fromkeys(topics["resourceSubscriptions"]))
    return message


def _reduce_capabilities(capabilities: Any) -> None:
    if isinstance(capabilities, dict):
        _remove(capabilities, "extensions", EXTENSION)
        for feature in ("tools", "prompts", "resources"):
            if isinstance(capabilities.get(feature), dict):
                capabilities[feature] = {
                    name: value
                    for name, value in capabilities[feature].items()
                    if name not in ("listChanged", "subscribe")
                }


def _remove(owner: dict[str, Any], member: str, key: str) -> None:
    """Remove a key of a member, and the member if it is empty then."""
    if isinstance(values := owner.get(member), dict) and key in values:
        del values[key]
        if not values:
            del owner[member]
