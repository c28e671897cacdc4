"""Compare the CPU of Tidings and the SDK in one short run: a small fan-out, and a few lists.

For CI: it needs no compiler, takes a few seconds, and measures CPU of the server processes instead of time. Both take
turns, and the minimum of several samples counts, because a busy machine only adds to a sample. The client is a few
blocking sockets; its cost is not measured.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from bench.peers.programs import PEERS, Server, serving
from bench.peers.record import DEADLINE, LISTEN, TOLD, answer, head_of, modern_request, until

__all__ = ["delivering", "listing", "times_less"]

STREAMS = 200
CHANGES = 20
"""Changes in one request, so that the request itself does not matter."""
LISTS = 50
TURNS = 8

Sample: TypeAlias = Callable[[], float]
"""Do the work once, and return the CPU seconds of the server per unit of work."""


def _dial(server: Server, stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE))


def delivering(server: Server, stack: ExitStack) -> Sample:
    """Measure one notification on one stream."""
    streams = [_dial(server, stack) for _ in range(STREAMS)]
    for number, stream in enumerate(streams):
        stream.sendall(modern_request(server.port, LISTEN, number, notifications={"toolsListChanged": True}))
        until(stream, b"subscriptions/acknowledged")
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
        return (server.cpu() - before) / CHANGES / STREAMS

    return sample


def listing(server: Server, stack: ExitStack) -> Sample:
    """Measure one `tools/list`."""
    connection = _dial(server, stack)

    def sample() -> float:
        before = server.cpu()
        for number in range(LISTS):
            connection.sendall(modern_request(server.port, "tools/list", number))
            answer(connection)
        return (server.cpu() - before) / LISTS

    return sample


def times_less(work: Callable[[Server, ExitStack], Sample]) -> float:
    """Return the CPU of the SDK divided by the CPU of Tidings on plain ASGI."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(PEERS[key], 10, Path())) for key in ("sdk", "asgi")]
        sdk, ours = (work(server, stack) for server in servers)
        turns = [(sdk(), ours()) for _ in range(TURNS)]
    return min(first for first, _ in turns) / min(second for _, second in turns)
