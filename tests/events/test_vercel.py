"""The client and the webhook handler of the Vercel AI SDK accept the catalog, the challenge and the deliveries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.events import serving_events
from tests.support.hooks import nothing
from tests.support.waiting import DEADLINE
from tests.typescript.node import needs_node, node
from tidings import Live

pytestmark = [pytest.mark.anyio, pytest.mark.node, needs_node]

SCRIPT = Path(__file__).parents[1] / "typescript" / "events.mjs"
NAME = "comment.created"
DOCUMENT = {"type": "object", "properties": {"document_id": {"type": "string"}}, "additionalProperties": False}


class Subscriber:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def next(self, member: str) -> Any:
        """Return a member of the next line that has it. A line with an error fails."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            while line := await self.process.stdout.readline():
                printed = json.loads(line)
                assert "error" not in printed
                if member in printed:
                    return printed[member]
        raise AssertionError(f"the process ended without printing {member}")


@asynccontextmanager
async def subscribing(url: str, name: str, arguments: dict[str, Any]) -> AsyncIterator[Subscriber]:
    command = [str(node()), str(SCRIPT), url, "alice", name, json.dumps(arguments)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield Subscriber(process)
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), DEADLINE) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_own_event_is_delivered_renewed_and_unsubscribed() -> None:
    def declare(live: Live) -> None:
        live.event(NAME, arguments=DOCUMENT)

    async with serving_events(declare=declare) as (live, client):
        async with subscribing(client.url, NAME, {"document_id": "d1"}) as subscriber:
            assert NAME in await subscriber.next("types")
            subscription = await subscriber.next("subscribed")
            event_id = live.emit(NAME, {"document_id": "d1", "text": "ä"})
            event = await subscriber.next("event")
            assert (event["eventId"], event["data"]) == (event_id, {"document_id": "d1", "text": "ä"})
            assert subscriber.process.stdin is not None
            subscriber.process.stdin.write(b"\n")
            assert await subscriber.next("renewed") == subscription
            subscriber.process.stdin.close()
            assert await subscriber.next("left") == 0
        assert not live.durables.all()


async def test_change_of_a_topic_is_delivered_and_the_end_of_the_rights_is_told() -> None:
    allowed = True
    async with (
        serving_events(authorize=lambda principal, topic: allowed) as (live, client),
        subscribing(client.url, "tools.list_changed", {}) as subscriber,
    ):
        await subscriber.next("subscribed")
        live.tools.add(nothing, name="one")
        event = await subscriber.next("event")
        assert event["data"]["tool"]["name"] == "one"
        allowed = False
        live.tools.add(nothing, name="two")
        assert (await subscriber.next("terminated"))["code"] == -32012
