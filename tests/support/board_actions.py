"""What can be done with a board of any kind, and what can be asked of it."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio.to_thread

from tidings import Feature, Filter, Live, Notification, Policy, Principal, Terms, Topic
from tidings.core.journal import change_json
from tidings.http.parking import ParkedStream

LOREM = "Unchanging."
CHANGE_SCHEMA = {
    "type": "object",
    "properties": {"what": {"type": "string"}, "where": {"type": "string"}, "args": {"type": "object"}},
    "required": ["what"],
}


def steady() -> str:
    """A tool that is always there."""
    return "steady"


def greet(name: str) -> str:
    """A prompt that is always there."""
    return f"Greet {name}."


def sprint() -> str:
    """A resource that is always there."""
    return LOREM


def card(number: str) -> str:
    """A template that is always there."""
    return f"card {number}"


class Board:
    """What can be changed on every kind of server."""

    live: Live

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.asked: list[list[str | None]] = []
        self.told: dict[str, list[Notification]] = {}
        self.outside: queue.Queue[Callable[[], object]] = queue.Queue()
        if options.get("telemetry"):
            from tests.support.telemetry import install

            self.telemetry = install(options["telemetry"])
        threading.Thread(target=self._work, daemon=True).start()

    def make_live(self, server: Any) -> Live:
        authorize = {None: None, "sync": self._authorize, "async": self._authorize_later}[self.options.get("asks")]
        return Live(
            server,
            policy=Policy(**self.options.get("policy", {})),
            authorize=authorize,
            shared_lists=self.options.get("shared_lists"),
            terms=self._terms if "terms" in self.options else None,
            telemetry=self.options.get("telemetry") is not False,
        )

    def _terms(self, principal: Principal | None) -> Terms | None:
        """What a server's own code would build."""
        knobs = self.options["terms"].get(principal.client_id if principal else "*")
        return None if knobs is None else Terms(**knobs)

    def _authorize(self, principal: Principal | None, topic: Topic) -> bool:
        name = topic.value if isinstance(topic, Feature) else topic
        who = principal.client_id if principal else None
        self.asked.append([who, name])
        return name not in self.options.get("deny", {}).get(who or "*", ())

    async def _authorize_later(self, principal: Principal | None, topic: Topic) -> bool:
        await asyncio.sleep(0)  # a turn of the loop: it is not there at once
        return self._authorize(principal, topic)

    def _work(self) -> None:
        while True:
            try:
                self.outside.get()()
            except Exception:  # the next one may be fine
                logging.getLogger("board").exception("a change outside any request failed")

    async def change(self, what: str, where: str, args: dict[str, Any], ctx: Any) -> str:
        async_verb: Callable[..., Awaitable[object]] | None = getattr(self, f"async_{what}", None)
        try:
            if async_verb is not None:
                return json.dumps({"result": await async_verb(ctx=ctx, **args)})
            verb = getattr(self, what)
            if where == "request":
                return json.dumps({"result": verb(**args)})
            if where == "thread":
                return json.dumps({"result": await anyio.to_thread.run_sync(lambda: verb(**args))})
            if where == "loop":
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: verb(**args), context=contextvars.Context())
            else:
                self.outside.put(lambda: verb(**args))
            return json.dumps({"result": "later"})
        except Exception as error:  # the tests look at what a caller gets to see
            return json.dumps({"error": type(error).__name__, "text": str(error)})

    # Through Live

    def items(self, feature: str) -> Any:
        return {"tools": self.live.tools, "prompts": self.live.prompts}.get(feature, self.live.resources)

    def remove(self, feature: str, key: str) -> None:
        self.items(feature).remove(key)

    def update(self, feature: str, key: str, fields: dict[str, Any]) -> None:
        self.items(feature).update(key, fields)

    def updated(self, uri: str, etag: str | None = None, metadata: dict[str, Any] | None = None) -> int:
        return len(self.live.resources.updated(uri, etag=etag, **(metadata or {})))

    def deleted(self, uri: str) -> int:
        return len(self.live.resources.deleted(uri))

    def many(self, steps: list[dict[str, Any]]) -> None:
        """Several changes as one publication."""
        with self.live.catalog.batch():
            for step in steps:
                getattr(self, step["what"])(**step["args"])

    async def async_refresh(self, ctx: Any) -> None:
        await self.live.refresh()

    async def async_flood(self, ctx: Any, uri: str, count: int, size: int) -> None:
        """Go on updating a content after the answer, as fast as it goes."""

        async def flood() -> None:
            for number in range(count):
                self.live.resources.updated(uri, number=number, padding="x" * size)
                if number % 10 == 0:
                    await asyncio.sleep(0)  # the others' turn

        self.flooding = asyncio.create_task(flood())

    def crowd(self, count: int) -> None:
        """Many tools."""
        for number in range(count):
            self.add("tools", f"tool-{number}", description=LOREM * 40)

    def noise(self) -> str:
        """What no tool should do, and many do."""
        print("noise")  # noqa: T201  # that is the point
        os.write(1, b"noise\n")
        subprocess.run(["sh", "-c", "echo noise"], check=True)
        return sys.stdin.read() + subprocess.run(["cat"], check=True, capture_output=True, text=True).stdout

    async def async_mutter(self, ctx: Any) -> None:
        """Print something from a thread, so late that the client has left."""

        def mutter() -> None:
            threading.Event().wait(0.5)
            print("noise", flush=True)  # noqa: T201  # that is the point

        asyncio.get_running_loop().run_in_executor(None, mutter)

    def present(self, **fields: Any) -> None:
        """Other instructions, other extensions."""
        for name, value in fields.items():
            setattr(self.live.lowlevel, name, value)

    def stop(self) -> None:
        """What a signal does, with the process left running."""
        self.live.stop()

    # Asking

    def history(self, **wanted: Any) -> dict[str, Any]:
        """`live.history()`, as clients see it."""
        is_full = wanted.pop("detail", None) == "full"
        past = self.live.history(**wanted)
        return {"changes": [change_json(each, is_full=is_full) for each in past.changes], "complete": past.complete}

    def hook(self, name: str, url: str) -> None:
        """A webhook of the server's own."""
        self.live.webhooks.put(name, url, "tools")

    def hooks(self) -> list[str]:
        return [each.name for each in self.live.durables.all() if each.webhook is not None]

    def state(self) -> dict[str, Any]:
        """Who listens, and what is kept for them."""
        live = self.live
        subscriptions = live.hub.subscriptions()
        return {
            "subscribers": len(live.hub),
            "watched": sorted(topic for topic, _ in subscriptions if isinstance(topic, str)),
            "labels": sorted({each.label for _, watchers in subscriptions for each in watchers}),
            "behind": {
                each.label: sorted(feature.value for feature in each.features if self._is_behind(each, feature))
                for _, watchers in subscriptions
                for each in watchers
            },
            "pending": sum(each.mailbox_size for _, watchers in subscriptions for each in watchers),
            "streams": live.subscriptions.limits.count,
            "parked": sum(type(each.response) is ParkedStream for each in live.listen_streams),
            "spliced": len(live.legacy_streams._sessions),
            "standing": len(live.legacy_streams),
            "asked": self.asked,
        }

    def hear(self, name: str, filter: dict[str, Any] | None = None, policy: dict[str, Any] | None = None) -> None:
        """Let somebody in this process watch the tools."""
        told: list[Notification] = self.told.setdefault(name, [])
        options: dict[str, Any] = {"filter": Filter(**filter) if filter else None, "policy": Policy(**(policy or {}))}
        self.live.hub.subscribe(partial(told.append), Feature.TOOLS, label=name, **options)

    def heard(self) -> dict[str, int]:
        return {name: len(told) for name, told in self.told.items()}

    def spans(self) -> list[dict[str, Any]]:
        return self.telemetry.spans()

    def metrics(self) -> dict[str, Any]:
        return self.telemetry.metrics()

    def _is_behind(self, subscriber: Any, feature: Feature) -> bool:
        """Whether a subscriber was last told something else than is true now."""
        told = self.live.hub.told(subscriber, feature)
        return told is None or told.digest != self.live.catalog.version(feature).digest

    def add(self, feature: str, key: str, description: str = LOREM, replace: bool = False) -> None:
        raise NotImplementedError
