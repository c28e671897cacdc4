"""Record the bytes that Tidings sends in one real exchange, for the servers that send recorded bytes."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from bench.peers.programs import PEERS, Failure, serving

__all__ = [
    "DEADLINE",
    "LEGACY",
    "LISTEN",
    "RECORDED_ID",
    "TOLD",
    "answer",
    "head_of",
    "legacy_request",
    "modern_request",
    "record",
    "until",
]

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
RECORDED_ID = 1_000_000
"""The request id in recorded responses. A server replaces it with an id of the same length."""
LISTEN = "subscriptions/listen"
TOLD = b"notifications/tools/list_changed"
DEADLINE = 30.0
EVENT_END = b"\r\n\r\n\r\n"
"""The end of an event that is one HTTP chunk."""


def modern_request(port: int, method: str, request_id: int, **params: Any) -> bytes:
    """Return a request with the same bytes as load.c sends."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "load", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    body = json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": {**params, "_meta": meta}})
    return (
        f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json, text/event-stream\r\n"
        f"Content-Type: application/json\r\nMCP-Protocol-Version: {MODERN}\r\nMcp-Method: {method}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def legacy_request(port: int, message: dict[str, Any] | None, session: str = "") -> bytes:
    """Return the POST of a message, or without one the GET of a stream, as load.c sends them."""
    method, body = ("POST", json.dumps({"jsonrpc": "2.0", **message})) if message else ("GET", "")
    in_session = f"MCP-Protocol-Version: {LEGACY}\r\nMcp-Session-Id: {session}\r\n" if session else ""
    return (
        f"{method} /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json, text/event-stream\r\n"
        f"Content-Type: application/json\r\n{in_session}Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def head_of(path: str, port: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\n\r\n".encode()


def until(connection: socket.socket, end: bytes, after: bytes = b"", *, times: int = 1) -> bytes:
    """Read until `end` was found `times` times after `after`, and return everything."""
    found, deadline = b"", time.monotonic() + DEADLINE
    while after not in found or found[found.index(after) :].count(end) < times:
        found += _receive(connection, deadline)
    return found


def answer(connection: socket.socket) -> bytes:
    """Read one response that has a Content-Length."""
    found = until(connection, b"\r\n\r\n")
    head, _, body = found.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    if not lengths:
        raise Failure(f"a response without Content-Length: {head!r}")
    length = int(lengths[0].partition(b":")[2])
    deadline = time.monotonic() + DEADLINE
    while len(body) < length:
        body += _receive(connection, deadline)
    return head + b"\r\n\r\n" + body


def _receive(connection: socket.socket, deadline: float) -> bytes:
    try:
        chunk = connection.recv(1 << 20)
    except TimeoutError:
        chunk = b""
    if not chunk or time.monotonic() > deadline:
        raise Failure("a server did not send the expected bytes in time")
    return chunk


def record(tools: int, programs: Path) -> None:
    """Write the bytes of an open, a notification and a list into a folder."""
    folder = programs / f"recorded-{tools}"
    folder.mkdir()
    with serving(PEERS["asgi"], tools, programs) as server:

        def dial() -> socket.socket:
            return socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)

        with dial() as stream, dial() as other:
            wanted = {"toolsListChanged": True}
            stream.sendall(modern_request(server.port, LISTEN, RECORDED_ID, notifications=wanted))
            opening = until(stream, EVENT_END, after=b"acknowledged")
            other.sendall(head_of("/change?version=1", server.port))
            told = until(stream, EVENT_END, after=TOLD)
            answer(other)
            other.sendall(modern_request(server.port, "tools/list", RECORDED_ID))
            listed = answer(other)
    for name, found in (("open", opening), ("told", told), ("list", listed)):
        (folder / name).write_bytes(found)
