"""The methods of a board of any kind that clients call through its tool `change`."""

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
UNNOTICED = "Changed without a notification."
"""The description of a tool that was changed in place, which Tidings does not notice."""
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
    """A server that tests change and query."""

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
        """The `terms` function of the server."""
        settings = self.options["terms"].get(principal.client_id if principal else "*")
        return None if settings is None else Terms(**settings)

    def _authorize(self, principal: Principal | None, topic: Topic) -> bool:
        name = topic.value if isinstance(topic, Feature) else topic
        who = principal.client_id if principal else None
        self.asked.append([who, name])
        return name not in self.options.get("deny", {}).get(who or "*", ())

    async def _authorize_later(self, principal: Principal | None, topic: Topic) -> bool:
        await asyncio.sleep(0)  # suspend once
        return self._authorize(principal, topic)

    def _work(self) -> None:
        while True:
            try:
                self.outside.get()()
            except Exception:  # the next change may succeed
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
        """Make several changes as one publication."""
        with self.live.catalog.batch():
            for step in steps:
                getattr(self, step["what"])(**step["args"])

    async def async_refresh(self, ctx: Any) -> None:
        await self.live.refresh()

    async def async_send(self, ctx: Any, kind: str, uri: str = "") -> None:
        """Call `ctx.session.send_*()`, as users of the SDK do."""
        if kind == "updated":
            await ctx.session.send_resource_updated(uri)
        else:
            await getattr(ctx.session, f"send_{kind}_list_changed")()

    async def async_add_and_send(self, ctx: Any, key: str) -> None:
        self.add("tools", key)
        await ctx.session.send_tool_list_changed()

    async def async_flood(self, ctx: Any, uri: str, count: int, size: int) -> None:
        """Update a content many times after the response, as fast as possible."""

        async def flood() -> None:
            for number in range(count):
                self.live.resources.updated(uri, number=number, padding="x" * size)
                if number % 10 == 0:
                    await asyncio.sleep(0)  # let other tasks run

        self.flooding = asyncio.create_task(flood())

    def add_many(self, count: int) -> None:
        """Add many tools."""
        for number in range(count):
            self.add("tools", f"tool-{number}", description=LOREM * 40)

    def noise(self) -> str:
        """Write to standard output and read standard input, which no tool should do."""
        print("noise")  # noqa: T201  # that is the point
        os.write(1, b"noise\n")
        subprocess.run(["sh", "-c", "echo noise"], check=True)
        return sys.stdin.read() + subprocess.run(["cat"], check=True, capture_output=True, text=True).stdout

    async def async_print_later(self, ctx: Any) -> None:
        """Print from a thread after the client has left."""

        def print_later() -> None:
            threading.Event().wait(0.5)
            print("noise", flush=True)  # noqa: T201  # that is the point

        asyncio.get_running_loop().run_in_executor(None, print_later)

    async def async_block(self, ctx: Any) -> None:
        """Block a thread, as a Python tool does."""
        await anyio.to_thread.run_sync(threading.Event().wait)

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Stop the server as a signal does, but keep the process."""
        self.live.stop()

    # Queries

    def history(self, **requested: Any) -> dict[str, Any]:
        """Return `live.history()` as clients see it."""
        is_full = requested.pop("detail", None) == "full"
        past = self.live.history(**requested)
        return {"changes": [change_json(each, is_full=is_full) for each in past.changes], "complete": past.complete}

    def hook(self, name: str, url: str) -> None:
        """Put a webhook of the server itself."""
        self.live.webhooks.put(name, url, "tools")

    def hooks(self) -> list[str]:
        return [each.name for each in self.live.durables.all() if each.webhook is not None]

    def state(self) -> dict[str, Any]:
        """Return the subscribers, and what is kept for them."""
        live = self.live
        subscriptions = live.hub.subscriptions()
        return {
            "subscribers": len(live.hub),
            "watched": sorted(topic for topic, _ in subscriptions if isinstance(topic, str)),
            "labels": sorted({each.label for _, subscribers in subscriptions for each in subscribers}),
            "behind": {
                each.label: sorted(feature.value for feature in each.features if self._is_behind(each, feature))
                for _, subscribers in subscriptions
                for each in subscribers
            },
            "pending": sum(each.mailbox_size for _, subscribers in subscriptions for each in subscribers),
            "streams": live.subscriptions.limits.count,
            "parked": sum(type(each.response) is ParkedStream for each in live.listen_streams),
            "legacy_sessions": len(live.legacy_streams._sessions),
            "legacy_streams": len(live.legacy_streams),
            "asked": self.asked,
        }

    def subscribe_callback(
        self, name: str, filter: dict[str, Any] | None = None, policy: dict[str, Any] | None = None
    ) -> None:
        """Subscribe a callback in this process to the tools."""
        told: list[Notification] = self.told.setdefault(name, [])
        self.live.hub.subscribe(
            partial(told.append),
            Feature.TOOLS,
            label=name,
            filter=Filter(**filter) if filter else None,
            settings=Policy(**(policy or {})).delivery,
        )

    def callback_counts(self) -> dict[str, int]:
        return {name: len(told) for name, told in self.told.items()}

    def spans(self) -> list[dict[str, Any]]:
        return self.telemetry.spans()

    def metrics(self) -> dict[str, Any]:
        return self.telemetry.metrics()

    def _is_behind(self, subscriber: Any, feature: Feature) -> bool:
        """Return whether a subscriber was last told another version than the present one."""
        told = self.live.hub.told(subscriber, feature)
        return told is None or told.digest != self.live.catalog.version(feature).digest

    def add(self, feature: str, key: str, description: str = LOREM, replace: bool = False) -> None:
        raise NotImplementedError
