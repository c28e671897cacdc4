"""`Live(server)`: the composition root.

Takes the server that the user already has and makes it live: what it lists becomes the catalog, every change goes
through the hub, and the lanes carry it to clients of either era. It never replaces the server, and trouble in here
never fails a request or a tool call.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

from mcp_types import SERVER_INFO_META_KEY

from tidings.catalog import Catalog
from tidings.errors import InvalidItem, NotFound, TidingsError
from tidings.frames import EXTENSION, Shape
from tidings.gate import Authorize, Gate
from tidings.hub import Hub
from tidings.lanes.listen import ListenLane
from tidings.lanes.lists import ListsLane
from tidings.lanes.session import SessionLane
from tidings.lanes.splice import SpliceLane
from tidings.lanes.templates import read_template
from tidings.model import Change, Feature, Topic
from tidings.policy import Policy
from tidings.sources import inquiry
from tidings.sources.attached import Attached, attach

__all__ = ["Live", "LiveItems", "LiveResources"]

logger = logging.getLogger(__name__)

_READING_TIME = 1.0
"""Seconds that a request may wait until the server's lists are read: a list handler that hangs must hang no more."""

_RETRY = 1.0
"""Seconds until a list that could not be read is asked for again."""


class Live:
    """Makes an `MCPServer`, a low-level `Server` or a `FastMCP` tell its clients of every change."""

    def __init__(
        self,
        server: Any,
        *,
        policy: Policy | None = None,
        authorize: Authorize | None = None,
        shared_lists: bool | None = None,
        first: Callable[[Topic], None] | None = None,
        last: Callable[[Topic], None] | None = None,
    ) -> None:
        """`shared_lists` says that every caller is shown the same lists, so that they may be encoded once for all. It
        is known for an `MCPServer`; a low-level server and FastMCP may show each caller something else."""
        self.policy = policy or Policy()
        self.epoch = secrets.token_hex(4)
        """One life of this server: a cursor from another one means nothing here."""
        self.templates = read_template
        self.catalog = Catalog(self.policy)
        self.hub = Hub(
            self.catalog,
            policy=self.policy,
            templates=read_template,
            alarm=self._alarm,
            first=first,
            last=last,
            follow=False,
        )
        self.gate = Gate(self.policy, authorize)
        self.tools = LiveItems(self, Feature.TOOLS)
        self.prompts = LiveItems(self, Feature.PROMPTS)
        self.resources = LiveResources(self)
        self.own_request_id = f"tidings-{secrets.token_hex(8)}"
        """Of the requests with which we ask the server ourselves, so that we don't take them for a client's."""
        self.is_stopping = False
        self.failures: Counter[str] = self.hub.failures
        """How often something inside failed, by what it was: each was logged, and survived."""
        self._source: Attached = attach(server)
        self.server = self._source.server
        self.lowlevel = self._source.lowlevel
        if EXTENSION in self.lowlevel.extensions:
            raise TidingsError(f"{self.lowlevel.name!r} is live already; keep the first Live() and use that")
        self._shared_lists = shared_lists
        self._context = contextvars.copy_context()
        """Nobody's in particular: what is read for all must not be read with the eyes of whoever caused it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._lifespan: Any = inquiry.UNKNOWN
        self._stale: set[Feature] = set(Feature)
        self._reading = asyncio.Lock()
        self._is_late = False
        """Whether a reading is under way that has already taken too long for anybody to wait for."""
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_out: set[str] = set()
        self._outbox: deque[tuple[Change, ...]] = deque()
        self.catalog.follow(self._publish)
        self.splice = SpliceLane(self)
        self.listen = ListenLane(self)
        self.lists = ListsLane(self)
        self._sessions = SessionLane(self)
        for feature in Feature:
            self.wake(feature)
        self._source.watch(self.catalog, self.wake)

    # Serving

    def http_app(self, **options: Any) -> Any:
        """The server's own ASGI app, live. `options` are those of its `streamable_http_app()` or `http_app()`."""
        from tidings.lanes.app import build_app

        return build_app(self, options)

    def run(self, transport: Literal["stdio", "http"] = "stdio", **options: Any) -> None:
        """Serve until the process is told to stop. For "http", `host` and `port` are uvicorn's, the rest the app's."""
        if transport == "stdio":
            from tidings.lanes.stdio import run_stdio

            run_stdio(self)
        elif transport == "http":
            from tidings.lanes.app import run_http

            run_http(self, **options)
        else:
            raise TidingsError(f"no transport {transport!r}; there are stdio and http")

    def restart(self) -> None:
        """The app is started again after a stop: some are, in one process."""
        if self.is_stopping:
            self.is_stopping, self._loop = False, None

    def stop(self) -> None:
        """End every stream with its graceful result. Safe to call from a signal handler's callback, and twice."""
        self.is_stopping = True
        self.listen.stop()
        self.splice.stop()
        self._sessions.stop()
        for task in self._tasks:
            task.cancel()

    # Reading the server

    async def refresh(self, *features: Feature | str) -> None:
        """Read anew what the server lists, and tell of what differs."""
        self._stale.update(map(Feature, features or Feature))
        await self._read()

    async def attend(self, lifespan: Any = inquiry.UNKNOWN) -> None:
        """A client is here: bind to its event loop, and read what could not be read without one."""
        if self._loop is not (running := asyncio.get_running_loop()):
            self._bind(running)
        if lifespan is not inquiry.UNKNOWN:
            self._lifespan = lifespan
        if self._stale and not self._is_late:
            reading = self._keep(self._read_guarded())
            done, _ = await asyncio.wait({reading}, timeout=_READING_TIME)
            if not done:
                logger.warning("the server's lists were not there after %s s; going on without them", _READING_TIME)
                self._is_late = True
                reading.add_done_callback(self._on_time)

    def serves(self, feature: Feature) -> bool:
        return self.lowlevel.get_request_handler(f"{feature.value}/list") is not None

    @property
    def steps_aside(self) -> bool:
        """Whether every request must go through the SDK, because the user's own middleware wants to see it."""
        return self._source.has_own_middleware()

    @property
    def shares_lists(self) -> bool:
        return self._source.lists_are_shared if self._shared_lists is None else self._shared_lists

    @property
    def is_behind(self) -> bool:
        """Whether a list may have changed that has not been read since."""
        return bool(self._stale)

    def state_of(self, method: str) -> Hashable:
        """What an answer to a list request depends on."""
        if method == "server/discover":
            return (self.lowlevel.instructions, tuple(self.serves(feature) for feature in Feature))
        return self.catalog.version(Feature(method.partition("/")[0]))

    def cursor(self, features: Iterable[Feature]) -> dict[str, Any]:
        """Where a client stands that has just been shown these lists."""
        return {
            "epoch": self.epoch,
            "topics": {feature.value: self.hub.news.version(feature)._asdict() for feature in features},
        }

    @property
    def result_meta(self) -> dict[str, Any]:
        return {SERVER_INFO_META_KEY: self.lowlevel.server_info_stamp}

    def shape(self, *, is_sse: bool = False, is_tagged: bool = False, is_extended: bool = False) -> Shape:
        policy = self.policy
        return Shape(policy.detail, policy.max_changes_per_frame, is_sse, is_tagged, is_extended)

    def wake(self, feature: Feature, key: str | None = None) -> None:
        """A list may have changed, or one item of it. Called by the server's own methods, from any thread: it must not
        raise."""
        try:
            # Under the lock, or an older reading could overwrite a newer one.
            with self.catalog.lock:
                if key is not None and feature not in self._stale:
                    self._put(feature, key)
                    return
                listed = self._source.list_now(feature)
                if listed is not None:
                    self._stale.discard(feature)
                    self._replace(feature, listed)
                    return
            self._stale.add(feature)
            if self._loop is not None and self._lifespan is not inquiry.UNKNOWN and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._read_soon)
        except Exception:  # the user's add_tool() must not fail because of us
            self._stale.add(feature)
            self.failures["reading"] += 1
            logger.exception("reading %s failed; it will be read again", feature.value)

    def _put(self, feature: Feature, key: str) -> None:
        items = self.catalog.items(feature)
        definition = self._source.list_one(feature, key)
        try:
            if definition is not None:
                items.add(definition, replace=True)
            elif key in items:
                items.remove(key)
        except InvalidItem as error:
            self._leave_out(error)

    def _replace(self, feature: Feature, listed: Iterable[dict[str, Any]]) -> None:
        self.catalog.items(feature).replace(_distinct(feature, listed), on_invalid=self._leave_out)

    def _leave_out(self, error: InvalidItem) -> None:
        """One item that can't be taken must not silence all others."""
        if str(error) not in self._left_out:
            self._left_out.add(str(error))
            self.failures["items left out"] += 1
            logger.error("clients will not be told of an item: %s", error)

    def _read_soon(self) -> None:
        if self._stale:
            self._keep(self._read_guarded())

    def _on_time(self, reading: asyncio.Task[None]) -> None:
        self._is_late = False

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something in the background, until it is done or the server stops."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task in the background failed", exc_info=task.exception())

    async def _read_guarded(self) -> None:
        try:
            await self._read_stale()
        except Exception:  # nobody waits for it; the next wake-up or client tries again
            logger.exception("reading the server's lists failed; they will be read again")

    async def _read(self) -> None:
        task = asyncio.get_running_loop().create_task(self._read_stale(), context=self._context.copy())
        await asyncio.shield(task)  # others may wait for the same

    async def _read_stale(self) -> None:
        async with self._reading:
            for feature in Feature:
                while feature in self._stale:
                    with self.catalog.lock:
                        listed = self._source.list_now(feature)
                        if listed is not None:
                            self._stale.discard(feature)
                            self._replace(feature, listed)
                            continue
                    if self._lifespan is inquiry.UNKNOWN:
                        break
                    # Before asking: what changes while the answer is made is then read again.
                    self._stale.discard(feature)
                    self._replace(feature, await self._ask(feature))

    async def _ask(self, feature: Feature) -> list[dict[str, Any]]:
        try:
            return await inquiry.listed(self.lowlevel, feature, self._lifespan, self.own_request_id)
        except Exception:
            # Not at every request again: a list that fails is expensive as often as not.
            asyncio.get_running_loop().call_later(_RETRY, self.wake, feature)
            raise

    # Telling, on the event loop's thread

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._reading = asyncio.Lock()
        self._is_late = False
        self._drain()
        self._keep(self._source.run())

    def _publish(self, changes: tuple[Change, ...]) -> None:
        """Hand a commit to the hub, on the thread of the event loop once there is one."""
        self._outbox.append(changes)
        if self._loop is None or self._loop.is_closed() or threading.get_ident() == self._thread:
            self._drain()
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        while self._outbox:
            self.hub.publish(self._outbox.popleft())

    def _alarm(self, when: float) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self._alarm, when)
            return
        delay = max(0.0, when - time.monotonic())
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.hub.tick()
        due = self.hub.next_due()
        if due is not None:
            self._alarm(due)


class LiveItems:
    """`live.tools` and `live.prompts`: changes that every client is told of."""

    def __init__(self, live: Live, feature: Feature) -> None:
        self._live = live
        self._feature = feature

    def add(self, thing: Any, *, replace: bool = False, **options: Any) -> None:
        """Add a function, with the options of the server's own decorator, or an item of the server's own class.

        A low-level server takes a definition, and `handler=`.
        """
        self._live._source.add(self._feature, thing, replace=replace, **options)

    def remove(self, key: str) -> None:
        self._live._source.remove(self._feature, key)

    def update(self, key: str, fields: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Change only the fields given."""
        self._live._source.update(self._feature, key, {**(fields or {}), **more})

    def __contains__(self, key: object) -> bool:
        return key in self._live.catalog.items(self._feature)

    def __len__(self) -> int:
        return len(self._live.catalog.items(self._feature))

    def __iter__(self) -> Any:
        return iter(self._live.catalog.items(self._feature))


class LiveResources(LiveItems):
    """`live.resources`: the list, and the contents behind it."""

    def __init__(self, live: Live) -> None:
        super().__init__(live, Feature.RESOURCES)

    def updated(self, uri: str, *, etag: str | None = None, **metadata: Any) -> Sequence[Change]:
        """The content of `uri` is another one: its subscribers are told."""
        return self._live.catalog.resources.updated(uri, etag=etag, **metadata)

    def deleted(self, uri: str) -> Sequence[Change]:
        """The resource is gone: its subscribers are told, and it leaves the list."""
        with self._live.catalog.batch() as changes:
            if uri in self:
                try:
                    self.remove(uri)
                except NotFound:
                    pass  # listed by something that is not ours to change
            self._live.catalog.resources.deleted(uri)
        return changes


def _distinct(feature: Feature, listed: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The first of each key: a server may list a thing twice, and its clients take the first."""
    key = "uri" if feature is Feature.RESOURCES else "name"
    seen: dict[Any, dict[str, Any]] = {}
    for definition in listed:
        seen.setdefault(definition.get(key, definition.get("uriTemplate")), definition)
    return seen.values()
