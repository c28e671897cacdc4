"""Measure one legacy session over stdio; this process is the client.

The client does not parse responses. It counts line ends, and writes one request for each response, so that it
costs only a few microseconds each. If it has a core of its own it never sleeps, because waking it costs the server CPU.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.programs import CORES, PATIENCE, START, Failure, Peer, Server, starting

__all__ = ["sit_at_pipes"]

IN_FLIGHT = 16
LIMIT = 60.0
UPDATED = b"notifications/resources/updated"


class Pipes:
    def __init__(self, process: subprocess.Popen[bytes], peer: Peer) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        self._peer = peer
        self._ready = select.poll()
        self._ready.register(self._out, select.POLLIN)
        self._found: float | None = None
        """The CPU time at which data arrived, until it is processed."""
        self._busy = 0.0
        self.server = Server(peer, process.pid)

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._in, data) :]

    def read(self, deadline: float) -> bytes:
        self._rest()
        while not self._ready.poll(PATIENCE):
            if time.monotonic() > deadline:
                raise Failure(f"{self._peer.name} did not answer on stdio in time")
        self._found = time.process_time()
        data = os.read(self._out, 1 << 20)
        if not data:
            raise Failure(f"{self._peer.name} ended, on stdio")
        return data

    def busy(self) -> float:
        """Return the CPU seconds spent on received data."""
        self._rest()
        return self._busy

    def _rest(self) -> None:
        if self._found is not None:
            self._busy += time.process_time() - self._found
            self._found = None

    def ask(self, method: str, **params: Any) -> None:
        """Send one request and read up to the end of its response; ignore notifications before it."""
        self.write(request(0, method, params))
        found, deadline = b"", time.monotonic() + START
        while not any(b'"id":0' in line.replace(b" ", b"") for line in found.split(b"\n")[:-1]):
            found += self.read(deadline)

    def greet(self) -> None:
        client = {"name": "load", "version": "1"}
        self.ask("initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo=client)
        self.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        self.ask("tools/list")
        self.ask("resources/subscribe", uri="bench://item")  # some servers refuse it and notify anyway


def request(number: int, method: str, params: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode() + b"\n"


def lists(pipes: Pipes, seconds: float, notes: dict[str, float]) -> None:
    asked = request(1, "tools/list", {})
    deadline = time.monotonic() + LIMIT
    before, own, start = pipes.server.cpu(), pipes.busy(), time.monotonic()
    pipes.write(asked * IN_FLIGHT)
    answers = 0
    while time.monotonic() < start + seconds:
        done = pipes.read(deadline).count(b"\n")
        answers += done
        pipes.write(asked * done)
    waiting = IN_FLIGHT
    while waiting > 0:
        waiting -= pipes.read(deadline).count(b"\n")
    answers += IN_FLIGHT
    taken = time.monotonic() - start
    notes["stdio-lists"] = answers / taken
    notes["stdio-list"] = 1e6 * (pipes.server.cpu() - before) / answers
    notes["stdio-client-busy"] = 100 * (pipes.busy() - own) / taken


def notifications(pipes: Pipes, count: int, notes: dict[str, float]) -> None:
    """Change the contents of `count` resources with one call, and read the notifications of all."""
    deadline = time.monotonic() + LIMIT
    before, own, start = pipes.server.cpu(), pipes.busy(), time.monotonic()
    pipes.write(request(2, "tools/call", {"name": "touch", "arguments": {"count": count}}))
    told, carry, is_answered = 0, b"", False
    while not is_answered or told < count:
        whole, _, carry = (carry + pipes.read(deadline)).rpartition(b"\n")
        told += whole.count(UPDATED)
        is_answered = is_answered or any(b'"id":2' in line for line in whole.split(b"\n") if UPDATED not in line)
    taken = time.monotonic() - start
    notes["stdio-notifications"] = told / taken
    notes["stdio-notification"] = 1e6 * (pipes.server.cpu() - before) / told
    notes["stdio-told-client-busy"] = 100 * (pipes.busy() - own) / taken


@contextmanager
def _on_the_clients_core() -> Iterator[None]:
    if len(CORES) < 2:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[-1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def sit_at_pipes(peer: Peer, changes: int, programs: Path, notes: dict[str, float]) -> None:
    command = peer.command("stdio", 10, programs)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with _on_the_clients_core(), starting(command, 0, **pipes) as process:
        try:
            client = Pipes(process, peer)
            client.greet()
            lists(client, 1.0, notes)
            notifications(client, changes, notes)
        except BrokenPipeError:
            raise Failure(f"{peer.name} ended, on stdio") from None
