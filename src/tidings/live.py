"""`Live(server)`: the composition root.

Takes the server that the user already has and makes it live: what it lists becomes the catalog, every change goes
through the hub, and the lanes carry it to clients of either era. It never replaces the server, and trouble in here
never fails a request or a tool call.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mcp_types import SERVER_INFO_META_KEY

from tidings.core.catalog import Catalog
from tidings.core.cursor import Cursor
from tidings.core.filters import Terms
from tidings.core.frames import EXTENSION
from tidings.core.hub import Hub
from tidings.core.journal import ChangeHistory, Journal
from tidings.core.model import Change, Feature, Topic, Version
from tidings.core.observer import READ_LIST
from tidings.core.patterns import is_pattern
from tidings.core.subscriber import Subscriber
from tidings.errors import InvalidItem, TidingsError
from tidings.http.legacy import LegacyStreams
from tidings.http.listen import ListenStreams
from tidings.http.lists import ListCache
from tidings.policy import Policy
from tidings.server import list_reader as inquiry
from tidings.server.adapters import Attached, attach
from tidings.server.authorization import Authorization, Authorize, Principal
from tidings.server.definitions import distinct
from tidings.server.extension import ExtensionMethods
from tidings.server.heartbeat import Bookmarks
from tidings.server.items import LiveItems, LiveResources
from tidings.server.loop_bridge import Alarm
from tidings.server.sessions import SessionLane
from tidings.server.tool_calls import ToolCallMiddleware
from tidings.server.uri_templates import read_template
from tidings.store import State, Store
from tidings.store.durable_registry import DurableSubscriptions
from tidings.store.writer import StoreWriter, create_writer
from tidings.telemetry import MeasuredServer, Telemetry, observe
from tidings.webhooks.delivery import Webhooks

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from tidings.http.health import Audience

__all__ = ["Live", "LiveItems", "LiveResources"]

logger = logging.getLogger(__name__)

_READING_TIME = 1.0
"""Seconds that a request may wait until the server's lists are read: a list handler that hangs must hang no more."""

_ANSWERING_TIME = 10.0
"""Seconds that a list may take to be read anew before its server is not ready: a slow one is no outage."""

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
        telemetry: bool | Telemetry = True,
        first: Callable[[Topic], None] | None = None,
        last: Callable[[Topic], None] | None = None,
        terms: Callable[[Principal | None], Terms | None] | None = None,
        store: StoreWriter | Store | str | os.PathLike[str] | None = None,
    ) -> None:
        """`shared_lists` says that every caller is shown the same lists, so that they may be encoded once for all. It
        is known for an `MCPServer`; a low-level server and FastMCP may show each caller something else. `terms` says
        how a caller is told of changes; what the caller itself asks for counts within that. `store` is where the state
        survives this process: the path of a file, or a store. `telemetry` is a bool, or has other providers."""
        self.policy = policy or Policy()
        self.source: Attached = attach(server)
        self.server = self.source.server
        self.lowlevel = self.source.lowlevel
        if EXTENSION in self.lowlevel.extensions:
            raise TidingsError(f"{self.lowlevel.name!r} is live already; keep the first Live() and use that")
        # Only now: what is refused must not hold a file that the next one needs.
        self.writer = create_writer(store)
        """Writes the state down; says in `problem` why, if it does not."""
        state = self.writer.state or State(secrets.token_hex(4), 0)
        self.epoch = state.epoch
        """Whose revisions these are, the store's or those of this life alone: a cursor from another one means nothing
        here."""
        self.templates = read_template
        self.catalog = Catalog(self.policy, life=secrets.token_hex(4))
        # Each life has its own revisions: those of one that was killed may be known to somebody, and to us no longer.
        self.catalog.restore(state.items, state.versions, state.contents, state.run << 32, state.forgotten)
        journal = Journal(self.policy)
        journal.restore(state.journal, state.floors)
        self._listed = {
            "tools/list": self.catalog.tools,
            "prompts/list": self.catalog.prompts,
            "resources/list": self.catalog.resources,
            "resources/templates/list": self.catalog.resources,
        }
        self._context = contextvars.copy_context()
        """Nobody's in particular: what is read for all must not be read with the eyes of whoever caused it."""
        self._alarm = Alarm(self._context)
        self.hub: Hub = Hub(
            self.catalog,
            policy=self.policy,
            journal=journal,
            templates=read_template,
            on_timer_change=self._alarm.ring_at,
            first=first,
            last=last,
        )
        self.durables = DurableSubscriptions(self.hub, state.durables.values(), wake=self.writer.wake)
        """Subscriptions that outlive their connections."""
        self.gate = Authorization(self.policy, authorize)
        self._terms = terms
        self.tools = LiveItems(self, Feature.TOOLS)
        self.prompts = LiveItems(self, Feature.PROMPTS)
        self.resources = LiveResources(self)
        self.own_request_id = f"tidings-{secrets.token_hex(8)}"
        """Of the requests with which we ask the server ourselves, so that we don't take them for a client's."""
        self.own_list_id = f"{self.own_request_id}-list"
        self.is_stopping = False
        self.failures: Counter[str] = self.hub.counts.failures
        """How often something inside failed, by what it was: each was logged, and survived."""
        self.metrics = MeasuredServer(self.hub, self.source, lambda: self.listen.slow + self.splice.slow)
        observe(telemetry, self.lowlevel.name, self.metrics)
        self._shared_lists = shared_lists
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._lifespan: Any = inquiry.UNKNOWN
        self._stale: set[Feature] = set(Feature)
        self._causes: dict[Feature, Mapping[str, str]] = {}  # the traces of those who changed what is stale
        self._being_read: dict[Feature, float] = {}  # since when
        self._retries: dict[Feature, asyncio.TimerHandle] = {}
        self.unread: set[Feature] = set(Feature)
        """The lists that could not be read, or were not yet."""
        self._reading = asyncio.Lock()
        self._is_late = False
        """Whether a reading is under way that has already taken too long for anybody to wait for."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_out: set[str] = set()
        self._has_list_change = False
        self.writer.tracer = self.hub.tracer
        self.writer.follow(self.catalog, journal, self.durables.unsaved, self.failures)
        self.catalog.publisher = self._publish
        self.bookmarks = Bookmarks(self.policy.keep_alive)
        self.splice: LegacyStreams = LegacyStreams(self)
        self.listen: ListenStreams = ListenStreams(self)
        self.lists = ListCache(self)
        self._sessions = SessionLane(self)
        self._runs = ToolCallMiddleware(self)
        self.webhooks = Webhooks(self)
        self.extension = ExtensionMethods(self)
        self.source.watch(self.catalog, self.wake)
        for feature in Feature:
            self.wake(feature)

    # Serving

    def http_app(self, *, health: bool = False, metrics: Audience | None = None, **options: Any) -> Starlette:
        """The server's own ASGI app, live. `options` are those of its `streamable_http_app()` or `http_app()`.
        With `health`, it answers `/health/live` and `/health/ready` too, and with `metrics`, `/metrics` to processes of
        this machine ("local") or to anyone."""
        from tidings.http.app import build_app
        from tidings.http.health import add_routes

        app: Starlette = build_app(self, options)
        add_routes(app, self, health=health, metrics=metrics)
        return app

    def run(self, transport: Literal["stdio", "http"] = "stdio", **options: Any) -> None:
        """Serve until the process is told to stop. For "http", `host` and `port` are uvicorn's, the rest the app's."""
        if transport == "stdio":
            from tidings.stdio.transport import run_stdio

            if options:
                raise TidingsError(f"stdio has no option {', '.join(options)}; leave it out, or run http")
            run_stdio(self.server, self.lowlevel, self.lists, self.policy.write_deadline, self.stop)
        elif transport == "http":
            from tidings.http.app import run_http

            run_http(self, **options)
        else:
            raise TidingsError(f"no transport {transport!r}; there are stdio and http")

    def restart(self) -> None:
        """The app is started again after a stop: some are, in one process."""
        if self.is_stopping:
            self.is_stopping, self._loop = False, None

    def stop(self) -> None:
        """End every stream with its graceful result. Safe to call from a signal handler's callback, and twice."""
        if not self.is_stopping:
            self._say("stopping", f"stopping {self.lowlevel.name}: {len(self.hub)} subscribers are let go")
        self.is_stopping = True
        self.listen.stop()
        self.splice.stop()
        self._sessions.stop()
        self.webhooks.stop()
        for task in self._tasks:
            task.cancel()
        self.writer.wake()  # what the streams were told last

    def close(self) -> None:
        """Stop, write down what is left, and let go of the store: another server in this process may have it then. At
        the end of the process this happens by itself. Waits for the disk."""
        self.stop()
        self.writer.close()

    def waits_for(self) -> list[str]:
        """What is missing before it can serve well; nothing, when it is ready."""
        if self.is_stopping or self._loop is None:
            return ["the server"]
        due = time.monotonic() - _ANSWERING_TIME
        hanging = {feature for feature, since in self._being_read.items() if since <= due}
        unread = sorted(feature.value for feature in self.unread | hanging)
        return unread + ([] if getattr(self.source, "is_answering", True) else ["its source"])

    def _say(self, event: str, text: str) -> None:
        logger.info("%s", text, extra={"tidings": {"event": event, "server": self.lowlevel.name}})

    # Reading the server

    async def refresh(self, *features: Feature | str) -> None:
        """Read anew what the server lists, and tell of what differs. From any event loop."""
        self._stale.update(map(Feature, features or Feature))
        if self._loop is None or self._loop is asyncio.get_running_loop() or not self._loop.is_running():
            await self._read()
        else:  # the server's handlers are at home there
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._read(), self._loop))

    async def attend(self, lifespan: Any = inquiry.UNKNOWN) -> None:
        """A client is here: bind to its event loop, and read what could not be read without one."""
        if self._loop is not (running := asyncio.get_running_loop()):
            self._bind(running)
        if lifespan is not inquiry.UNKNOWN:
            self._lifespan = lifespan
        if (self._stale or self._being_read) and not self._is_late:
            reading = self.in_background(self._read_guarded())
            done, _ = await asyncio.wait({reading}, timeout=_READING_TIME)
            if not done:
                logger.warning("the server's lists were not there after %s s; going on without them", _READING_TIME)
                self._is_late = True
                reading.add_done_callback(self._on_time)

    @property
    def is_attended(self) -> bool:
        """Whether `attend()` would find nothing to do."""
        return not self._stale and not self._being_read and self._loop is asyncio.get_running_loop()

    def knows(self, feature: Feature) -> bool:
        """Whether the catalog has what the server lists now, as far as anybody noticed."""
        return feature not in self._stale and feature not in self._being_read and feature not in self.unread

    def serves(self, feature: Feature) -> bool:
        return self.lowlevel.get_request_handler(f"{feature.value}/list") is not None

    @property
    def steps_aside(self) -> bool:
        """Whether every request must go through the SDK, because the user's own middleware wants to see it."""
        return self.source.has_own_middleware()

    @property
    def shares_lists(self) -> bool:
        return self.source.lists_are_shared if self._shared_lists is None else self._shared_lists

    def state_of(self, method: str) -> Hashable:
        """What an answer to a list request depends on."""
        if method == "server/discover":
            return (self.lowlevel.instructions, tuple(self.serves(feature) for feature in Feature))
        return self._listed[method].version

    def cursor(
        self, topics: Iterable[Topic], told: Mapping[Topic, Version | None] | None = None, as_of: int | None = None
    ) -> dict[str, Any]:
        """Where a client stands that has just been shown these topics, or was last `told` something else. Patterns have
        no version: who watches any knows what they cover as of a revision."""
        known: dict[Topic, Version | None] = {
            topic: self.hub.notifications.version(topic)
            for topic in topics
            if isinstance(topic, Feature) or not is_pattern(topic)
        }
        for topic, version in (told or {}).items():
            if version is None or version.digest != self.hub.notifications.version(topic).digest:
                known[topic] = version if version is not None and version.revision >= 0 else None
        return Cursor(self.epoch, known, as_of).as_json()

    def cursor_of(self, subscriber: Subscriber) -> Cursor:
        """Where a subscriber stands: bookmarks say it."""
        return Cursor(
            self.epoch,
            self.hub.known_versions(subscriber),
            self.hub.notifications.revision if subscriber.uris else None,
        )

    def terms_of(self, principal: Principal | None) -> Terms | None:
        """What this server itself sets for a caller."""
        try:
            terms = self._terms(principal) if self._terms is not None else None
            if terms is not None:
                terms.policy(self.policy)
            return terms
        except Exception:  # the user's function; a caller whose terms are unknown is told like any other
            self.failures["terms"] += 1
            logger.exception("terms() failed for %r; using the defaults", principal)
            return None

    def history(
        self,
        feature: Feature | str | None = None,
        *,
        uri: str | None = None,
        since: int | Cursor | None = None,
        limit: int | None = None,
    ) -> ChangeHistory:
        """What changed after a revision, as far as it is remembered: of one list, of one resource's content, or of all.
        Since a cursor, of what is in the cursor. With a limit, the newest so many."""
        if feature is not None and uri is not None:
            raise TidingsError("history is of a feature or of a URI; name one of them, or neither for all")
        past = self.hub.history(uri if feature is None else Feature(feature), since, self.epoch)
        return past if limit is None else past.newest(limit)

    @property
    def result_meta(self) -> dict[str, Any]:
        return {SERVER_INFO_META_KEY: self.lowlevel.server_info_stamp}

    def wake(self, feature: Feature, key: str | None = None) -> None:
        """A list may have changed, or one item of it. Called by the server's own methods, from any thread: it must not
        raise."""
        try:
            # Under the lock, or an older reading could overwrite a newer one.
            with self.catalog.lock:
                # Decorators may stand after `Live()`: what an earlier life listed stays until a client comes.
                is_early = self._loop is None and self.catalog.items(feature).is_restored
                if key is not None and (is_early or feature not in self._stale):
                    self._put(feature, key)
                    return
                listed = self.source.list_now(feature, self._leave_out)
                if listed is not None:
                    self._stale -= set() if is_early else {feature}
                    self._replace(feature, listed, keep=is_early)
                    return
            self._stale.add(feature)
            if (cause := self.hub.tracer.current_trace()) is not None:
                self._causes[feature] = cause
            if self._loop is not None and self._lifespan is not inquiry.UNKNOWN and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._read_soon)
        except Exception:  # the user's add_tool() must not fail because of us
            self._stale.add(feature)
            self.unread.add(feature)
            self.failures["reading"] += 1
            logger.exception("reading %s failed; it will be read again", feature.value)

    def _put(self, feature: Feature, key: str) -> None:
        items = self.catalog.items(feature)
        try:
            if (listed := self.source.list_one(feature, key)) is not None:
                items.put(listed)
                return
        except InvalidItem as error:
            self._leave_out(error)
        if key in items:
            items.remove(key)

    def _replace(self, feature: Feature, listed: Iterable[dict[str, Any]], *, keep: bool = False) -> None:
        self.catalog.items(feature).replace(distinct(feature, listed), on_invalid=self._leave_out, keep=keep)
        self.unread.discard(feature)

    def _leave_out(self, error: InvalidItem) -> None:
        """One item that can't be taken must not silence all others."""
        if str(error) not in self._left_out:
            self._left_out.add(str(error))
            self.failures["items left out"] += 1
            logger.error("clients will not be told of an item: %s", error)

    def _read_soon(self) -> None:
        if self._stale:
            self.in_background(self._read_guarded())

    def _on_time(self, reading: asyncio.Task[None]) -> None:
        self._is_late = False

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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
            failures: list[Exception] = []
            for feature in [each for each in Feature if each in self._stale]:
                try:
                    await self._read_feature(feature)
                except Exception as error:  # one list that fails must not keep the others from being read
                    if failures:  # the first is raised, and would be all that is ever said
                        logger.error("reading the server's %s failed, too", feature.value, exc_info=error)
                    failures.append(error)
            if failures:
                raise failures[0]

    async def _read_feature(self, feature: Feature) -> None:
        with self.catalog.lock:
            if (listed := self.source.list_now(feature, self._leave_out)) is not None:
                self._stale.discard(feature)
                self._replace(feature, listed)
                return
        if self._lifespan is inquiry.UNKNOWN:
            return
        # Before asking: what changes meanwhile is read again in its own turn, so that a restless list delays nobody.
        self._being_read[feature] = time.monotonic()
        self._stale.discard(feature)
        cause = self._causes.pop(feature, None)
        try:
            with self.hub.tracer.span(READ_LIST, cause=cause, feature=feature.value):
                self._replace(feature, await self._ask(feature))
        finally:
            self._being_read.pop(feature, None)

    async def answered(self, method: str, version: str) -> dict[str, Any]:
        """What any modern client is answered to a list request."""
        return await inquiry.answered(self.lowlevel, method, version, self._lifespan, self.own_list_id)

    async def _ask(self, feature: Feature) -> list[dict[str, Any]]:
        try:
            return await inquiry.listed(self.lowlevel, feature, self._lifespan, self.own_request_id)
        except Exception:
            self.unread.add(feature)
            # Not at every request again, and once however often it failed: such a list is expensive as often as not.
            if (retry := self._retries.pop(feature, None)) is not None:
                retry.cancel()
            self._retries[feature] = asyncio.get_running_loop().call_later(_RETRY, self.wake, feature)
            raise

    # Telling, on the event loop's thread

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._reading = asyncio.Lock()
        self._is_late = False
        self._alarm.bind(loop, self.hub)
        self._say("starting", f"{self.lowlevel.name} is live")
        self._drain()
        self.in_background(self.source.run())
        self.webhooks.start(loop)

    def _publish(self, changes: tuple[Change, ...]) -> None:
        """Hand a commit to the hub, on the thread of the event loop once there is one."""
        self.hub.enqueue(changes)
        self._has_list_change |= len(changes) > 1 or not isinstance(changes[0].topic, str)
        if threading.get_ident() == self._thread or self._loop is None or self._loop.is_closed():
            self._drain()
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self.hub.publish_queued()
        if self._has_list_change and self._loop is not None and self._loop.is_running():
            self._has_list_change = False
            self.lists.changed()
