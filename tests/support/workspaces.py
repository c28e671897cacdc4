"""Workspaces for tests: write files, serve them to a client, call tools, and collect notifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp.client.client import Client

from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import until
from tidings.core.model import Feature
from tidings.live import Live
from tidings.workspace.problems import ERRORS
from tidings.workspace.source import Workspace

DIFFICULT_STRINGS = {
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
"""Strings that break careless quoting."""

MARKER = "workspace:///marker.txt"
TOOLS = "notifications/tools/list_changed"
PROMPTS = "notifications/prompts/list_changed"
RESOURCES = "notifications/resources/list_changed"
UPDATED = "notifications/resources/updated"


def write(root: Path, files: dict[str, str]) -> None:
    """Write files below `root`. A file that starts with `#!` is executable."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)


def script(description: str, body: str = "echo ok") -> str:
    return f"#!/bin/sh\n# @describe {description}\n{body}\n"


def list_names(workspace: Workspace, feature: Feature = Feature.TOOLS) -> list[str]:
    return sorted(definition["name"] for definition in workspace.read_items(feature))


def get_problems(root: Path) -> list[str]:
    return [str(problem) for problem in Workspace(root).problems]


@asynccontextmanager
async def serve(root: Path) -> AsyncIterator[tuple[Client, Workspace]]:
    """Serve a folder to a client in this process, without watching it."""
    workspace = Workspace(root)
    async with asyncio.timeout(60), Client(workspace.server) as client:
        yield client, workspace


@asynccontextmanager
async def run_source(workspace: Workspace) -> AsyncIterator[None]:
    """Keep the items of a workspace up to date, as a server does."""
    running = asyncio.create_task(workspace.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def call(client: Client, name: str, arguments: dict[str, Any] | None = None) -> Any:
    result = await client.call_tool(name, arguments or {})
    return result.structured_content or getattr(result.content[0], "text", None)


async def call_with_progress(client: Client, name: str, arguments: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the text of a result, and the progress notifications before it."""
    steps: list[Any] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append((progress, total, message))

    result = await client.call_tool(name, arguments, progress_callback=on_progress)
    return getattr(result.content[0], "text", None), steps


async def read(client: Client, uri: str) -> str:
    return str(getattr((await client.read_resource(uri, cache_mode="bypass")).contents[0], "text", ""))


async def list_tools(client: Client) -> dict[str, str]:
    listed = await client.list_tools(cache_mode="bypass")
    return {tool.name: tool.description or "" for tool in listed.tools}


@asynccontextmanager
async def serve_http(live: Live) -> AsyncIterator[str]:
    """Serve over HTTP in this process, and return the URL."""
    async with run_uvicorn(live.http_app()) as server:
        try:
            yield f"http://127.0.0.1:{address_of(server)[1]}/mcp"
        finally:
            live.stop()


class Watcher:
    """A client that subscribes to everything, and the watched workspace that it is connected to."""

    def __init__(self, workspace: Workspace, client: Client) -> None:
        self.root = workspace.root
        self.workspace = workspace
        self.client = client
        self.received: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._markers = 0

    def write_marker(self) -> None:
        self._markers += 1
        temporary = self.root / "resources" / ".marker"
        temporary.write_text(str(self._markers))
        temporary.replace(self.root / "resources" / "marker.txt")

    async def settle(self) -> list[tuple[str, str, str]]:
        """Return the changes received until now, as (method, operation, key).

        The notification of a marker file ends it, and that of a second one: the first may be sent together with other
        changes, in any order, but the second comes after all of them. Each marker causes exactly one notification of
        its content, so none is left for the next call.
        """
        changes: list[tuple[str, str, str]] = []
        count = 0
        async with asyncio.timeout(100):
            while count < 2:
                self.write_marker()
                while True:
                    method, meta = await self.received.get()
                    if (method, meta.get("uri")) == (UPDATED, MARKER):
                        break
                    changes += [
                        (method, change["operation"], change.get("name", change.get("uri")))
                        for change in meta.get("changes", [meta])
                    ]
                count = 0 if self.workspace.watcher.pending else count + 1
        return changes

    async def until_tools(self, *names: str) -> None:
        await until(lambda: list_names(self.workspace) == sorted(names))
        assert sorted(await self.tools()) == sorted(names)

    async def tools(self) -> dict[str, str]:
        return await list_tools(self.client)

    async def prompts(self) -> dict[str, str]:
        listed = await self.client.list_prompts(cache_mode="bypass")
        return {prompt.name: prompt.description or "" for prompt in listed.prompts}

    async def resources(self) -> set[str]:
        listed = await self.client.list_resources(cache_mode="bypass")
        return {resource.uri for resource in listed.resources} - {ERRORS, MARKER}

    async def errors(self) -> str:
        return await read(self.client, ERRORS)


@asynccontextmanager
async def watch(root: Path, poll: float = 0, uris: Iterable[str] = ()) -> AsyncIterator[Watcher]:
    """Serve a folder over HTTP, watch it, and connect a client that subscribes to all lists and files, and to `uris`.

    Without `poll`, only file system events lead to notifications.
    """
    for folder in ("tools", "resources", "prompts"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    workspace = Workspace(root, poll=poll)

    async def on_message(message: Any) -> None:
        if not isinstance(message, Exception):
            watcher.received.put_nowait((message.method, (message.params.meta or {})["dev.tidings/change"]))

    async with (
        serve_http(Live(workspace, policy=workspace.settings.policy)) as url,
        Client(url, mode="2026-07-28", message_handler=on_message) as client,
    ):
        watcher = Watcher(workspace, client)
        async with client.listen(
            tools_list_changed=True,
            prompts_list_changed=True,
            resources_list_changed=True,
            resource_subscriptions=["workspace:///**", ERRORS, *uris],
        ):
            await watcher.settle()  # the folder is watched from here on
            yield watcher
