"""The status panel of `tidings serve` on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
from pathlib import Path

import pytest
from mcp.client.client import Client

from tests.support.command import DEADLINE, GRACE, HELLO, start_command
from tests.support.terminal import Screen

pytestmark = pytest.mark.anyio


async def test_panel_shows_items_clients_changes_and_problems(board: Path) -> None:
    master, slave = pty.openpty()
    env = {"TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "120", "LINES": "40"}
    async with asyncio.timeout(DEADLINE), start_command("serve", board, "--port", 0, stderr=slave, env=env) as process:
        os.close(slave)
        screen = Screen(master)
        try:
            url = (await screen.shows(r"Serving board on (http://\S+)"))[1]
            await screen.shows(r"items +3 tools, 1 prompt, 1 resource\b")
            await screen.shows(r"clients +0 modern streams, 0 legacy sessions")
            (board / "tools" / "hello.py").write_text(HELLO)
            await screen.shows(r"items +4 tools")
            await screen.shows(r"changes +\d\d:\d\d:\d\d  tool hello added")
            (board / "tools" / "hello.py").write_text("def (")
            await screen.shows(r"problems +tools/hello.py:1: ")
            async with Client(url) as client, client.listen(tools_list_changed=True):
                await screen.shows(r"1 modern stream,")
                async with Client(url, mode="legacy"):
                    await screen.shows(r"1 modern stream, 1 legacy session\b")
            await screen.shows(r"0 modern streams,")
            assert not re.search(r"\x1b\[([0-9;]*;)?[349][0-9]m", screen.raw)  # NO_COLOR
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), GRACE) == 0
            assert "Traceback" not in screen.text
            assert "\x1b[?25h" in await screen.rest()  # the cursor is visible again
        finally:
            screen.close()
