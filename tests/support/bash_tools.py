"""Tools written in bash with the helpers of `tool-sdk.sh`, called as a server calls them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mcp_types as types

from tests.support.waiting import DEADLINE
from tidings.workspace.executable import Executable


class BashTools:
    """A workspace with one bash tool. `progress` has the progress and log lines of its calls."""

    def __init__(self, root: Path, env: dict[str, str]) -> None:
        self.root = root
        self.env = env
        self.progress: list[dict[str, Any]] = []
        self.on_progress: Callable[[dict[str, Any]], None] = self.progress.append

    async def call(self, text: str, arguments: dict[str, Any] | None = None) -> types.CallToolResult:
        path = self.root / "tool.sh"
        header = '#!/usr/bin/env bash\nset -euo pipefail\nsource "${MCP_SDK:?}/tool-sdk.sh"\n'
        path.write_text(header + textwrap.dedent(text), "utf-8")
        path.chmod(0o755)
        executable = Executable(
            command=[str(path)], root=self.root, name="tool", timeout=DEADLINE, max_output=8 << 20, env=self.env
        )
        return await executable.call(arguments or {}, on_progress=self.on_progress)

    async def text(self, text: str, arguments: dict[str, Any] | None = None) -> str:
        """Call the tool, and return its output; fail if it is an error."""
        result = await self.call(text, arguments)
        content = result.content[0]
        assert isinstance(content, types.TextContent)
        assert not result.is_error, content.text
        return content.text
