"""Tools written in bash with the helpers of `tool-sdk.sh`, called as a server calls them: with jq, and without."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest

from tidings.workspace import environment as environment_module
from tidings.workspace.executable import Executable

DEADLINE = 60.0


class Tools:
    """A workspace whose tools are bash scripts, run as a server runs them."""

    def __init__(self, root: Path, own: dict[str, str]) -> None:
        self.root = root
        self.own = own
        self.said: list[dict[str, Any]] = []
        self.on_progress: Callable[[dict[str, Any]], None] = self.said.append

    async def call(self, text: str, arguments: dict[str, Any] | None = None, **options: Any) -> types.CallToolResult:
        path = self.root / "tool.sh"
        header = '#!/usr/bin/env bash\nset -euo pipefail\nsource "${MCP_SDK:?}/tool-sdk.sh"\n'
        path.write_text(header + textwrap.dedent(text), "utf-8")
        path.chmod(0o755)
        executable = Executable(
            command=[str(path)], root=self.root, name="tool", timeout=DEADLINE, max_output=8 << 20, env=self.own
        )
        return await executable.call(arguments or {}, on_progress=self.on_progress, **options)

    async def text(self, text: str, arguments: dict[str, Any] | None = None, **options: Any) -> str:
        result = await self.call(text, arguments, **options)
        content = result.content[0]
        assert isinstance(content, types.TextContent)
        assert not result.is_error, content.text
        return content.text


@pytest.fixture(params=["as found", "none"])
def tools(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    """With the JSON tool of this machine, if there is one, and with none."""
    own = {}
    if request.param == "none":
        monkeypatch.setattr(environment_module, "find_json_tool", lambda path: None)
        own["MCPBASH_JSON_TOOL_BIN"] = ""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    root = tmp_path / "workspace"
    root.mkdir()
    yield Tools(root, own)
    assert list(scratch.iterdir()) == []  # a call leaves nothing behind
