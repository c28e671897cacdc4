"""Measure a few lists, opens and deliveries of a server, and compare the CPU of Tidings and the SDK.

The comparison is for CI: it needs no compiler, takes a few seconds, and measures CPU of the server processes instead of
time. Both take turns, and the median of several samples counts: on a busy machine a sample may be too large, and on a
virtual one too small, even 0. The client is a few blocking sockets; its cost is not measured.
"""

from __future__ import annotations

import re
import socket
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from bench.peers.programs import PEERS, Failure, Server, serving
from bench.peers.record import (
    DEADLINE,
    LEGACY,
    LISTEN,
    RECORDED_ID,
    TOLD,
    answer,
    head_of,
    legacy_request,
    modern_request,
    until,
)

__all__ = ["delivering", "growing", "legacy_opening", "listing", "opening", "times_less"]

STREAMS = 200
CHANGES = 20
"""Changes in one request, so that the request itself does not matter."""
LISTS = 50
OPENS = 50
GROWN = 500
"""Streams that are opened to measure the memory of one."""
TURNS = 8

Sample: TypeAlias = Callable[[], float]
"""Do the work once, and return how much `Server.cpu` has grown per unit of work."""


def _dial(server: Server, stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE))


def _listen(server: Server, stream: socket.socket) -> None:
    stream.sendall(modern_request(server.port, LISTEN, 1, notifications={"toolsListChanged": True}))
    until(stream, b"subscriptions/acknowledged")


def opening(server: Server, stack: ExitStack) -> Sample:
    """Measure one listen request until its acknowledgement, on a connection that is already open."""
    return _opening(server, stack, _listen)


def _opening(server: Server, stack: ExitStack, open_one: Callable[[Server, socket.socket], None]) -> Sample:
    def sample() -> float:
        streams = [_dial(server, stack) for _ in range(OPENS)]
        before = server.cpu()
        for stream in streams:
            open_one(server, stream)
        return (server.cpu() - before) / OPENS

    return sample


def _open_session(server: Server, stream: socket.socket) -> None:
    """Open a legacy session and its GET stream, on one connection."""
    client = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "load", "version": "1"}}
    stream.sendall(legacy_request(server.port, {"id": 1, "method": "initialize", "params": client}))
    session = re.search(rb"(?i)\r\nmcp-session-id: *([^\r]+)", until(stream, b"\r\n0\r\n\r\n"))
    if session is None:
        raise Failure("a legacy session was not opened")
    stream.sendall(legacy_request(server.port, {"method": "notifications/initialized"}, session[1].decode()))
    until(stream, b"\r\n\r\n")
    stream.sendall(legacy_request(server.port, None, session[1].decode()))
    until(stream, b"\r\n\r\n", after=b"text/event-stream")


def legacy_opening(server: Server, stack: ExitStack) -> Sample:
    """Measure the set-up of one legacy session with its GET stream, on a connection that is already open."""
    return _opening(server, stack, _open_session)


def growing(server: Server, stack: ExitStack, is_legacy: bool = False) -> Sample:
    """Measure the resident memory of one open stream, in bytes, after a few that are not counted."""
    open_one = _open_session if is_legacy else _listen

    def sample() -> float:
        before = server.memory()
        for _ in range(GROWN):
            open_one(server, _dial(server, stack))
        return (server.memory() - before) / GROWN

    for _ in range(OPENS):
        open_one(server, _dial(server, stack))
    return sample


def delivering(server: Server, stack: ExitStack, count: int = STREAMS) -> Sample:
    """Measure one notification on one stream."""
    streams = [_dial(server, stack) for _ in range(count)]
    for stream in streams:
        _listen(server, stream)
    control = _dial(server, stack)
    version = 1

    def sample() -> float:
        nonlocal version
        before = server.cpu()
        control.sendall(head_of(f"/change?version={version}&count={CHANGES}", server.port))
        for stream in streams:
            until(stream, TOLD, times=CHANGES)
        answer(control)
        version += CHANGES
        return (server.cpu() - before) / CHANGES / count

    return sample


def listing(server: Server, stack: ExitStack, count: int = LISTS) -> Sample:
    """Measure one `tools/list`. All requests arrive at once: a server that often sleeps and wakes takes more CPU, and
    how much depends on the machine."""
    connections = [_dial(server, stack) for _ in range(count)]

    def sample() -> float:
        before = server.cpu()
        for number, connection in enumerate(connections, RECORDED_ID):
            connection.sendall(modern_request(server.port, "tools/list", number))
        for connection in connections:
            answer(connection)
        return (server.cpu() - before) / count

    return sample


def times_less(work: Callable[[Server, ExitStack], Sample]) -> float:
    """Return the CPU of the SDK divided by the CPU of Tidings on plain ASGI."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(PEERS[key], 10, Path())) for key in ("sdk", "asgi")]
        sdk, ours = (work(server, stack) for server in servers)
        turns = [(sdk(), ours()) for _ in range(TURNS)]
    return statistics.median(first for first, _ in turns) / statistics.median(second for _, second in turns)
