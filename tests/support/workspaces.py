"""Workspaces to try: written as files, served to a client, their tools called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp.client.client import Client

from tidings.workspace.source import Workspace

NASTY = {
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "separators": "\u2028\u2029\x85",
    "quotes": "'\"`\\'\"",
    "newlines": "a\nb\r\nc\n\n",
    "substitution": "$(touch owned) `touch owned` ${HOME} $PATH",
    "dashes": "--help",
    "dash": "-",
    "controls": "".join(map(chr, range(1, 32))),
    "direction": "\u202eabc\u202c\u200b\ufeff",
    "astral": "\U0010ffff\ue000",
    "equals": "A=B;C=D",
    "function": "() { :; }; touch owned",
    "empty": "",
    "blank": "  \t ",
    "percent": "%s%n%d",
    "glob": "* ? [a-z] ~ {a,b}",
}
"""Texts that careless quoting breaks."""
Scenario = Callable[[Client, Workspace], Awaitable[None]]


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[tuple[Client, Workspace]]:
    workspace = Workspace(root)
    async with asyncio.timeout(60), Client(workspace.server) as client:
        yield client, workspace


def run(root: Path, scenario: Scenario) -> None:
    async def main() -> None:
        async with serving(root) as (client, workspace):
            await scenario(client, workspace)

    asyncio.run(main())


def write(root: Path, files: dict[str, str], *, executable: tuple[str, ...] = ()) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name in executable or text.startswith("#!"):
            path.chmod(0o755)


async def call(client: Client, name: str, arguments: dict[str, Any] | None = None) -> Any:
    result = await client.call_tool(name, arguments or {})
    return result.structured_content or getattr(result.content[0], "text", None)


async def read(client: Client, uri: str) -> str:
    return str(getattr((await client.read_resource(uri)).contents[0], "text", ""))
