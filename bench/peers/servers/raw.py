"""Send recorded bytes from a bare asyncio protocol on uvloop: the best case for any server on this event loop.

    python -m bench.peers.servers.raw FOLDER

The same as floor.c in Python: the same recorded bytes, and a loop of `transport.write` instead of `send`. The
difference between this and Tidings is the cost of Tidings; the rest is the cost of the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sys
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from bench.peers.servers.scene import Control, announce, listening_socket

RECORDED: Final = b"1000000"
"""The id of the recorded requests; all ids have this length."""

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_ID = re.compile(rb'"id":(\d+)')
_VERSION = re.compile(rb"(?<=Version )\d{6}")


class Scene:
    """The recorded bytes, and the open streams."""

    def __init__(self, folder: Path) -> None:
        self.opening, self.told, self.listed = (_cut(folder / name) for name in ("open", "told", "list"))
        self.streams: list[Stream] = []
        self.control = 0

    async def change(self, version: int) -> None:
        (head, tail), (before, after) = self.told, self.listed
        self.listed = before, _VERSION.sub(b"%06d" % version, after)
        for stream in self.streams:
            stream.transport.write(head + stream.tag + tail)

    async def touch(self, uri: str) -> None:
        raise NotImplementedError("no stream of this one watches a resource")

    async def listen_for_changes(self) -> int:
        """Return the port for change commands."""
        make = partial(Control, self.change, self.touch)
        listener = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        return int(listener.sockets[0].getsockname()[1])


class Stream(asyncio.Protocol):
    """A connection, for requests or for one listen stream."""

    __slots__ = ("_received", "_scene", "tag", "transport")

    transport: asyncio.Transport

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._received = b""
        self.tag = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as it is
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if end and length is not None and len(body) >= int(length[1]):
            self._received = b""
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        scene, found = self._scene, _ID.search(body)
        if found is None:
            # A start-up check, or the question for the control port: the port answers both.
            port = b"%d" % scene.control
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(port), port))
            return
        self.tag = found[1]
        is_stream = b'"subscriptions/listen"' in body
        before, after = scene.opening if is_stream else scene.listed
        self.transport.write(before + self.tag + after)
        if b'"toolsListChanged"' in body:  # other streams get no notifications
            scene.streams.append(self)


def _cut(path: Path) -> tuple[bytes, bytes]:
    before, found, after = path.read_bytes().partition(RECORDED)
    if not found:
        raise SystemExit(f"{path} has no id")
    return before, after


async def main() -> None:
    scene = Scene(Path(sys.argv[1]))
    scene.control = await scene.listen_for_changes()
    listener = listening_socket()
    await asyncio.get_running_loop().create_server(lambda: Stream(scene), sock=listener)
    announce(listener.getsockname()[1])
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
