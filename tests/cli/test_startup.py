"""`tidings serve --stdio` starts as fast as it can: nothing is imported that its first answer does not need."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidings.cli.output import LogFormat, LogLevel
from tidings.cli.stdio import POLL, read_arguments

BARE = """
from mcp.server.mcpserver import MCPServer
MCPServer("bare").run("stdio")
"""

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}},
}
ENVELOPE = {
    "_meta": {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
}
DISCOVER = {"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": ENVELOPE}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": ENVELOPE}
STARTS: list[list[dict[str, Any]]] = [[INITIALIZE], [DISCOVER, LIST]]


@pytest.mark.parametrize("requests", STARTS, ids=["legacy", "modern"])
def test_the_first_answer_on_stdio_waits_for_no_package_but_the_sdks_and_our_own(
    tmp_path: Path, requests: list[dict[str, Any]]
) -> None:
    """A bare server of the SDK's is the measure; what a folder does not need is not imported for it."""
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools" / "hello.sh"
    script.write_text("#!/bin/sh\n# @describe Say hello\n# @arg name:string! To whom\necho hello\n")
    script.chmod(0o755)

    def imported(*command: str) -> set[str]:
        with (
            (tmp_path / "imports").open("w+") as said,
            subprocess.Popen(
                [sys.executable, "-X", "importtime", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            for request in requests:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                assert json.loads(process.stdout.readline())["id"] == request["id"]
            process.kill()
            said.seek(0)
            names = re.findall(r"^import time:.*\|\s+(\S+)$", said.read(), re.MULTILINE)
        return {name.split(".")[0] for name in names}

    ours = imported("-m", "tidings", "serve", str(tmp_path), "--stdio")
    allowed = {"tidings", "msgspec", "sqlite3", "_sqlite3", "gc", "runpy"}
    # The event loop takes 5 ms, once, and a tenth off each message from then on.
    assert ours - imported("-c", BARE) <= allowed | {"uvloop"}


@pytest.mark.parametrize(
    ("said", "is_plain"),
    [
        ("serve DIR --stdio", True),
        ("serve --stdio", True),
        ("serve --stdio -q DIR --poll 2.5 --log-level=debug --state=none", True),
        ("serve DIR", False),
        ("serve DIR OTHER --stdio", False),
        ("serve DIR --stdio --port 1", False),
        ("serve DIR --stdio --poll never", False),
        ("serve DIR --stdio --poll -1", False),
        ("serve DIR --stdio --poll nan", False),
        ("serve DIR --stdio --poll", False),
        ("serve DIR --stdio --log-level loud", False),
        ("serve DIR --stdio --help", False),
        ("serve --stdio=yes DIR", False),
        ("new --stdio", False),
        ("", False),
    ],
)
def test_the_short_way_takes_what_it_understands_and_leaves_the_rest_to_the_parser(said: str, is_plain: bool) -> None:
    assert (read_arguments(said.split()) is not None) == is_plain


def test_the_short_way_understands_every_option_for_stdio() -> None:
    said = "serve --stdio -q DIR --poll 2.5 --log-level=debug --state none --log-format json"
    assert read_arguments(said.split()) == (Path("DIR"), 2.5, LogLevel.DEBUG, LogFormat.JSON, True, "none")
    assert read_arguments(["serve", "--stdio"]) == (Path(), POLL, LogLevel.INFO, LogFormat.TEXT, False, None)
