"""What a legacy session watches is kept under its durable name, and nowhere else."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import anyio
import httpx2
import pytest

from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tests.support.wire_clients import LegacyWire
from tidings.store.sqlite import peek


@pytest.mark.anyio
async def test_what_a_session_subscribes_to_is_written_down_though_it_is_told_nothing(tmp_path: Path) -> None:
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources" / "a.txt").write_text("a")
    state, uri = tmp_path / "state.db", "workspace:///a.txt"
    command = [sys.executable, "-m", "tidings", "serve", str(tmp_path), "--port", "0", "--json", "--state", str(state)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)

    async def until_written(expected: tuple[str, ...]) -> None:
        await until(lambda: [each.uris for each in peek(state).durables.values()] == [expected])

    try:
        assert process.stdout is not None
        with anyio.fail_after(DEADLINE):
            url = json.loads(await process.stdout.readline())["url"]
        async with httpx2.AsyncClient(timeout=DEADLINE) as http:
            wire = LegacyWire(url, http)
            await wire.shake_hands({"dev.tidings/durable": {"name": "laptop"}})
            await until_written(())
            await wire.post("resources/subscribe", uri=uri)
            await until_written((uri,))
            await wire.post("resources/unsubscribe", uri=uri)
            await until_written(())
    finally:
        process.kill()
        await process.wait()
