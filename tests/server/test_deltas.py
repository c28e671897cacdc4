"""Deltas over the wire: the bytes they save, and that a client that only applies deltas has the same list."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import pytest

from tests.support.faults.wire import TIMEOUT, Process, Stream, listen_request, request, serve
from tests.support.messages import modern_headers, modern_message
from tidings.core.delta import Copy
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, FILTER_KEY

pytestmark = pytest.mark.anyio

TOOLS = 200
EDITS = 1_000
WANTED = {"toolsListChanged": True}


class Counted(Stream):
    """A listen stream that counts its bytes, including chunk sizes."""

    @property
    def reader(self) -> _Meter:
        assert isinstance(self._reader, _Meter)
        return self._reader


class _Meter:
    """Counts the bytes that are read."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.count = 0

    async def readline(self) -> bytes:
        return self._counted(await self._reader.readline())

    async def readexactly(self, size: int) -> bytes:
        return self._counted(await self._reader.readexactly(size))

    def _counted(self, text: bytes) -> bytes:
        self.count += len(text)
        return text


async def listen(process: Process, detail: str) -> Counted:
    stream = await Counted.open(process.port, listen_request(detail, WANTED, {FILTER_KEY: {"detail": detail}}))
    assert isinstance(stream, Counted)
    stream._reader = _Meter(stream._reader)  # type: ignore[assignment]
    acknowledged = await message(stream)
    assert acknowledged["params"]["_meta"][FILTER_KEY] == {"detail": detail}
    return stream


async def message(stream: Stream) -> dict[str, Any]:
    async with asyncio.timeout(TIMEOUT):
        event = await stream.event()
    assert event is not None
    return event


async def fetch(process: Process) -> tuple[dict[str, Any], int]:
    """Return the list of tools, and the bytes of its body. Headers are not counted, in favour of refetches."""
    headers, message = modern_headers("tools/list"), modern_message("tools/list")
    status, _, body = await request(process.port, "POST", "/mcp", headers, message)
    assert status == 200
    return msgspec.json.decode(body)["result"], len(body)


@pytest.mark.slow
async def test_deltas_need_a_tenth_of_the_bytes_of_refetches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serve("uvicorn") as process:
        tools = [f"tool_{number:03}" for number in range(TOOLS)]
        await process.change(*({"do": "add", "of": "tools", "key": key, "text": "As it was."} for key in tools))
        plain, taker = await listen(process, "none"), await listen(process, "delta")
        first, size = await fetch(process)
        copy = Copy("tools", first["tools"])
        assert copy.digest == first["_meta"][CURSOR_KEY]["topics"]["tools"]["digest"]
        taken, refetched = size, size
        for edit in range(EDITS):
            key = tools[edit * 7 % TOOLS]
            await process.change({"do": "update", "of": "tools", "key": key, "text": f"As edit {edit} left it."})
            summary = (await message(taker))["params"]["_meta"][CHANGE_KEY]
            assert summary["delta"] == {"description": f"As edit {edit} left it."}
            assert copy.apply(summary), "what was rebuilt has the digest that the server says"
            await message(plain)
            listed, size = await fetch(process)
            refetched += size
            assert list(copy.items.values()) == listed["tools"]
        taken, refetched = taken + taker.reader.count, refetched + plain.reader.count
        plain.close()
        taker.close()
    with capsys.disabled():
        sys.stdout.write(f"\n{EDITS} edits: {taken:,} bytes with deltas, {refetched:,} with refetches\n")
    assert taken * 10 <= refetched
