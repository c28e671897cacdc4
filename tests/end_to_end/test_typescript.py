"""The TypeScript clients are notified of every change and refresh their lists by themselves.

These are real clients of both eras, in Node, with real servers of each kind, over HTTP and stdio. All notifications up
to that of a marker at the end of each stream are compared with the expected ones.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import ENVIRONMENT
from tests.support.messages import LISTS
from tests.support.sdk_clients import KINDS, MARKER, MODERN, Received, serving, stdio_server
from tests.typescript.node import needs_node, node
from tidings.core.frames import CHANGE_KEY, SUBSCRIPTION_KEY

pytestmark = [pytest.mark.anyio, pytest.mark.node, needs_node]

WATCH = Path(__file__).parents[1] / "typescript" / "watch.mjs"
DEADLINE = 100.0
"""Seconds for one wait. Only a failure reaches it."""
KEYS = {"tools": "zoom", "prompts": "zest", "resources": "board://zone"}
"""The item of each list that is added, updated and removed."""
SPRINT = "board://sprint"
TOLD = tuple(f"notifications/{feature}/" for feature in KEYS)
"""The methods that are compared. Clients also receive acknowledgements and log messages."""

any_kind = pytest.mark.parametrize("kind", KINDS)
any_transport = pytest.mark.parametrize("transport", ["http", "stdio"])


class Watcher:
    """A TypeScript client in its own process. tests/typescript/watch.mjs describes its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._answers: list[dict[str, Any]] = []
        self.connected: dict[str, Any] = {}
        self.received: list[dict[str, Any]] = []
        self.lists: dict[str, dict[str, dict[str, Any]]] = {}
        """By feature, the list that the client fetched last."""
        self.updated: list[dict[str, Any]] = []
        self.closed: dict[str, str] = {}
        self.errors: list[str] = []

    async def until(self, is_so: Callable[[], object]) -> None:
        """Read the output of the client until a condition is true."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(DEADLINE):
                while not is_so():
                    line = await self._process.stdout.readline()
                    assert line, f"the client ended; it had received {self.summaries}"
                    self._take(json.loads(line))
        except TimeoutError:
            raise AssertionError(f"still false; received {self.summaries}, errors {self.errors}") from None

    def _take(self, event: dict[str, Any]) -> None:
        match event.pop("event"):
            case "connected":
                self.connected = event
            case "received" if event["method"].startswith(TOLD):
                self.received.append(event)
            case "listed":
                assert "error" not in event, event
                key = "uri" if event["feature"] == "resources" else "name"
                self.lists[event["feature"]] = {item[key]: item for item in event["items"]}
            case "updated":
                self.updated.append(event)
            case "closed":
                self.closed[event["stream"]] = event["how"]
            case "error":
                self.errors.append(event["text"])
            case "answer":
                self._answers.append(event)

    async def ask(self, verb: str, argument: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, argument]).encode() + b"\n")
        await self.until(lambda: self._answers)
        answer = self._answers.pop()
        assert "error" not in answer, answer
        return answer["result"]

    async def change(self, what: str, **args: Any) -> None:
        """Change the server, on a thread outside any request."""
        assert await self.ask("change", {"what": what, "where": "outside", "args": args}) == {"result": "later"}

    def has(self, feature: str, key: str, description: str | None = None) -> bool:
        item = self.lists.get(feature, {}).get(key)
        return item is not None and (description is None or item["description"] == description)

    @property
    def summaries(self) -> list[str]:
        return [
            Received(each["method"], each["params"]["_meta"], each["params"].get("uri")).summary
            for each in self.received
            if each["params"].get("uri") != MARKER
        ]


@asynccontextmanager
async def watching(client: str, target: dict[str, Any]) -> AsyncIterator[Watcher]:
    program = node()
    assert program is not None
    process = await asyncio.create_subprocess_exec(
        program,
        str(WATCH),
        client,
        json.dumps(target),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,  # a list is one line
    )
    try:
        watcher = Watcher(process)
        await watcher.until(lambda: watcher.connected)
        yield watcher
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(DEADLINE):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def find_target(kind: str, transport: str, stack: ExitStack) -> dict[str, Any]:
    if transport == "http":
        return {"url": stack.enter_context(serving(kind))}
    server = stdio_server(kind)
    return {"command": server.command, "args": server.args, "env": {**os.environ, **ENVIRONMENT}}


async def follow_every_change(watcher: Watcher) -> None:
    """Add, update and remove an item of each list, then change contents. Check each notification and each list."""
    expected = []
    for feature, key in KEYS.items():
        await watcher.change("add", feature=feature, key=key)
        await watcher.until(lambda: watcher.has(feature, key))  # noqa: B023  # waited for at once
        await watcher.change("update", feature=feature, key=key, fields={"description": "Another."})
        await watcher.until(lambda: watcher.has(feature, key, "Another."))  # noqa: B023
        await watcher.change("remove", feature=feature, key=key)
        await watcher.until(lambda: not watcher.has(feature, key))  # noqa: B023
        expected += [f"{feature} added {key}", f"{feature} updated {key}", f"{feature} removed {key}"]
        assert watcher.summaries == expected

    zone = KEYS["resources"]
    assert await watcher.ask("subscribe", [SPRINT]) == [SPRINT]
    assert await watcher.ask("subscribe", [MARKER, zone]) == [MARKER, zone]
    await watcher.change("updated", uri=SPRINT, metadata={"version": 2})
    await watcher.until(lambda: watcher.updated)
    [update] = watcher.updated
    assert update["uri"] == SPRINT
    assert update["meta"][CHANGE_KEY]["operation"] == "updated"
    assert update["contents"][0]["text"] == "Unchanging."
    assert watcher.received[-1]["params"]["metadata"] == {"version": 2}
    expected.append(f"content updated {SPRINT}")

    await watcher.change("add", feature="resources", key=zone)
    await watcher.until(lambda: watcher.has("resources", zone))
    await watcher.change("deleted", uri=zone)
    await watcher.until(lambda: not watcher.has("resources", zone) and len(watcher.updated) == 2)
    assert watcher.updated[-1]["uri"] == zone
    assert watcher.updated[-1]["meta"][CHANGE_KEY]["operation"] == "deleted"
    expected += [f"resources added {zone}", f"resources removed {zone}", f"content deleted {zone}"]

    await watcher.ask("unsubscribe", SPRINT)
    await watcher.change("updated", uri=SPRINT)  # no client watches it any more
    await watcher.change("add", feature="tools", key="last")
    await watcher.change("updated", uri=MARKER)
    await watcher.until(lambda: watcher.has("tools", "last") and watcher.updated[-1]["uri"] == MARKER)
    expected.append("tools added last")
    # Lists and contents may come on different streams; each stream is in order.
    assert sorted(watcher.summaries, key=is_content) == sorted(expected, key=is_content)
    assert watcher.errors == []


def is_content(summary: str) -> bool:
    return summary.startswith("content ")


def check_items(received: list[dict[str, Any]]) -> None:
    """Check that each notification on the wire has the operation and the item."""
    first = {each["method"]: each["params"] for each in reversed(received)}
    tool = first["notifications/tools/list_changed"]
    prompt = first["notifications/prompts/list_changed"]
    resource = first["notifications/resources/list_changed"]
    assert (tool["operation"], tool["tool"]["name"]) == ("added", KEYS["tools"])
    assert (prompt["operation"], prompt["prompt"]["name"]) == ("added", KEYS["prompts"])
    assert (resource["operation"], resource["resource"]["uri"]) == ("added", KEYS["resources"])


@any_kind
@any_transport
async def test_legacy_client_gets_every_change_and_refreshes_its_lists(kind: str, transport: str) -> None:
    """`@modelcontextprotocol/sdk`, 1.x."""
    with ExitStack() as stack:
        async with watching("sdk", find_target(kind, transport, stack)) as watcher:
            await follow_every_change(watcher)
            check_items(watcher.received)
            assert not any(SUBSCRIPTION_KEY in each["params"]["_meta"] for each in watcher.received)


@any_kind
@any_transport
async def test_modern_client_gets_every_change_and_refreshes_its_lists(kind: str, transport: str) -> None:
    """`@modelcontextprotocol/client`, 2.x: it opens a stream for the lists, and the test opens two for contents."""
    with ExitStack() as stack:
        async with watching("client", find_target(kind, transport, stack)) as watcher:
            assert watcher.connected["version"] == MODERN
            assert watcher.connected["honoured"] == LISTS
            await follow_every_change(watcher)
            check_items(watcher.received)
            assert all(SUBSCRIPTION_KEY in each["params"]["_meta"] for each in watcher.received)
            if transport == "http":
                stack.close()  # SIGTERM
                await watcher.until(lambda: len(watcher.closed) == 3)
                assert watcher.closed == {"lists": "graceful", MARKER: "graceful", SPRINT: "local"}


@any_transport
async def test_modern_client_with_a_legacy_handshake_gets_every_change(transport: str) -> None:
    with ExitStack() as stack:
        async with watching("client-legacy", find_target("mcpserver", transport, stack)) as watcher:
            await follow_every_change(watcher)
            assert watcher.connected["capabilities"]["tools"]["listChanged"] is True
