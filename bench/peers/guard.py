"""Measure a few lists, opens and deliveries of a server, and compare the CPU of Tidings and the SDK.

The comparison is for CI: it needs no compiler, takes a few seconds, and measures CPU of the server processes instead of
time. Both take turns, and the median of several samples counts: on a busy machine a sample may be too large, and on a
virtual one too small, even 0. The client is a few blocking sockets; its cost is not measured.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from bench.peers.programs import PEERS, Server, serving
from bench.peers.record import DEADLINE, LISTEN, RECORDED_ID, TOLD, answer, head_of, modern_request, until

__all__ = ["delivering", "listing", "opening", "times_less"]

STREAMS = 200
CHANGES = 20
"""Changes in one request, so that the request itself does not matter."""
LISTS = 50
OPENS = 50
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

    def sample() -> float:
        streams = [_dial(server, stack) for _ in range(OPENS)]
        before = server.cpu()
        for stream in streams:
            _listen(server, stream)
        return (server.cpu() - before) / OPENS

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
