"""Deltas over the wire: the bytes that they save, and that a client that only applies deltas has the same list."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.support.list_copy import Copy
from tests.support.wire_clients import Wire, Wires
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, FILTER_KEY

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TOOLS = 200
EDITS = 1_000
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {"mcpserver": ("mcpserver", {})}
WANTED = {"toolsListChanged": True}


async def fetch(wire: Wire) -> tuple[dict[str, Any], int]:
    """Return the list of tools, and the bytes of its body. Headers are not counted, in favour of refetches."""
    response = await wire.post("tools/list")
    assert response.status_code == 200
    return response.json()["result"], len(response.content)


async def test_deltas_need_a_tenth_of_the_bytes_of_refetches(wires: Wires, capsys: pytest.CaptureFixture[str]) -> None:
    wire = wires.modern("mcpserver")
    tools = [f"tool_{number:03}" for number in range(TOOLS)]
    await wire.change("many", steps=[{"what": "add", "args": {"feature": "tools", "key": key}} for key in tools])
    async with (
        wire.listen(1, WANTED, {FILTER_KEY: {"detail": "none"}}) as plain,
        wire.listen(2, WANTED, {FILTER_KEY: {"detail": "delta"}}) as deltas,
    ):
        for stream, detail in ((plain, "none"), (deltas, "delta")):
            assert (await stream.message())["params"]["_meta"][FILTER_KEY] == {"detail": detail}
        first, size = await fetch(wire)
        copy = Copy("tools", first["tools"])
        assert copy.digest == first["_meta"][CURSOR_KEY]["topics"]["tools"]["digest"]
        taken = refetched = size
        for edit in range(EDITS):
            fields = {"description": f"As edit {edit} left it."}
            await wire.change("update", feature="tools", key=tools[edit * 7 % TOOLS], fields=fields)
            summary = (await deltas.message())["params"]["_meta"][CHANGE_KEY]
            assert summary["delta"] == fields
            assert copy.apply(summary), "what was rebuilt has the digest that the server says"
            await plain.message()
            listed, size = await fetch(wire)
            refetched += size
            assert list(copy.items.values()) == listed["tools"]
        taken += deltas.response.num_bytes_downloaded
        refetched += plain.response.num_bytes_downloaded
    with capsys.disabled():
        sys.stdout.write(f"\n{EDITS} edits: {taken:,} bytes with deltas, {refetched:,} with refetches\n")
    assert taken * 10 <= refetched
