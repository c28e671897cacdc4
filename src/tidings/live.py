"""`Live(server)`: make the user's server notify its clients of every change.

This module builds the parts and connects them. It has no logic of its own: `docs/architecture.md` describes the
modules. The server is never replaced, and an error of Tidings never fails a request or a tool call.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from tidings.core.catalog import Catalog
from tidings.core.cursor import Cursor
from tidings.core.frames import EXTENSION
from tidings.core.hub import Hub
from tidings.core.journal import ChangeHistory, Journal, history_topic
from tidings.core.model import Feature, Topic
from tidings.errors import TidingsError
from tidings.http.legacy import LegacyStreams
from tidings.http.listen import ListenStreams
from tidings.policy import Policy
from tidings.sdk import internals
from tidings.sdk.change_events import ChangeEvents
from tidings.sdk.source import source_of
from tidings.sdk.uri_templates import read_template
from tidings.server.authorization import Authorization, Authorize, Principal
from tidings.server.extension import ExtensionMethods
from tidings.server.items import LiveItems, LiveResources
from tidings.server.list_cache import ListCache
from tidings.server.list_reader import ListReader
from tidings.server.local import Listener, listen
from tidings.server.loop_bridge import LoopBridge
from tidings.server.middleware import NotificationMiddleware, ToolCallMiddleware, server_info_meta
from tidings.server.sessions import Sessions
from tidings.server.stream_limits import StreamLimits
from tidings.server.subscribe import Subscriptions, TermsOf
from tidings.store import State, Store
from tidings.store.durable_registry import DurableSubscriptions
from tidings.store.opened import OpenedStore, open_store
from tidings.store.writer import StoreWriter
from tidings.telemetry import MeasuredServer, Telemetry, observe
from tidings.webhooks.delivery import Webhooks

if TYPE_CHECKING:
    from fastmcp import FastMCP
    from mcp.server import Server
    from mcp.server.mcpserver import MCPServer
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.applications import Starlette
    from starlette.routing import Route

    from tidings.cluster.backend import Backend
    from tidings.cluster.replica import Replica
    from tidings.console.console import Console, Mode
    from tidings.events.service import EventService
    from tidings.events.types import EventHook, Payload
    from tidings.http.health import Audience
    from tidings.http.options import AppOptions, RunOptions
    from tidings.sdk.source import Source

__all__ = ["Live", "LiveItems", "LiveResources"]

logger = logging.getLogger(__name__)

_NO_SSE = "Live does not serve the transport sse, which the protocol has replaced; use http (streamable HTTP) or stdio"


class Live:
    """Makes an `MCPServer`, a low-level `Server` or a `FastMCP` notify its clients of every change."""

    def __init__(
        self,
        server: MCPServer[Any] | Server[Any] | FastMCP[Any] | Source,
        *,
        policy: Policy | None = None,
        authorize: Authorize | None = None,
        shared_lists: bool | None = None,
        telemetry: bool | Telemetry = True,
        on_watched: Callable[[Topic], None] | None = None,
        on_unwatched: Callable[[Topic], None] | None = None,
        terms: TermsOf | None = None,
        store: OpenedStore | Store | str | os.PathLike[str] | None = None,
        poll: float | None = None,
        cluster: Backend | None = None,
        events: bool = False,
    ) -> None:
        """Make `server` live.

        * `policy`: all settings.
        * `authorize`: decides which topics a caller may watch.
        * `shared_lists`: whether every caller sees the same lists, so that they can be encoded once for all. Tidings
          detects it for an `MCPServer`; other servers may list other items for each caller.
        * `telemetry`: whether to trace and measure, or the OpenTelemetry providers to use.
        * `on_watched`, `on_unwatched`: called with a topic that gets its first subscriber, or loses its last.
        * `terms`: returns the terms that the server sets for a caller; the caller's own options apply within them.
        * `store`: the path of a file, or a store, in which the state survives a restart.
        * `poll`: seconds after which lists with subscribers are read again, for items that change without a call of the
          server: of a proxy, a mounted server or an upstream API.
        * `cluster`: makes this server a replica of a cluster, for example `Nats("nats://…")`. All replicas with one
          server name have the same items.
        """
        _check_option("policy", policy, policy is None or isinstance(policy, Policy), "a Policy(…)")
        _check_option("telemetry", telemetry, isinstance(telemetry, bool | Telemetry), "True, False or a Telemetry(…)")
        functions = {"authorize": authorize, "terms": terms, "on_watched": on_watched, "on_unwatched": on_unwatched}
        for name, function in functions.items():
            _check_option(name, function, function is None or callable(function), "a function")
        is_interval = isinstance(poll, int | float) and not isinstance(poll, bool) and 0 < poll < math.inf
        _check_option("poll", poll, poll is None or is_interval, "a number of seconds above 0, or None")
        is_store = store is None or isinstance(store, OpenedStore | str | os.PathLike) or hasattr(store, "open")
        _check_option("store", store, is_store, "the path of a file, or a store")
        _check_option("cluster", cluster, cluster is None or hasattr(cluster, "run"), "Nats(…)")
        if cluster is not None and store is not None:
            raise TidingsError("Live(cluster=…) keeps the state in the cluster; leave store= out")
        if cluster is not None and events:
            raise TidingsError("Live(cluster=…) can't serve events yet: each replica would deliver them")
        self.policy = policy or Policy()
        self.source = source_of(server)
        self.server = self.source.server
        self.lowlevel = self.source.lowlevel
        if EXTENSION in self.lowlevel.extensions:
            raise TidingsError(f"{self.lowlevel.name!r} is live already; keep the first Live() and use that")
        self._poll = poll
        self._console: Console | None = None
        # After the checks: a server that is refused must not keep a store open that another one needs.
        opened = open_store(store)
        state = opened.state or State(secrets.token_hex(4), 0)
        self._build_core(state, on_watched, on_unwatched, has_own_items=cluster is not None)
        self.durables = DurableSubscriptions(self.hub, state.durables.values())
        """Subscriptions that outlive their connections."""
        self._build_server(authorize, terms, shared_lists)
        self.metrics = MeasuredServer(
            self.hub, self.source, lambda: self.listen_streams.slow + self.legacy_streams.slow
        )
        observe(telemetry, self.lowlevel.name, self.metrics)
        self.own_catalog.trace = self.catalog.trace
        self.replica = None if cluster is None else self._join(cluster)
        """This server as a replica of its cluster."""
        self.writer = StoreWriter(opened, self.hub, self.durables)
        """Writes the state to the store. `writer.problem` says why, if it does not."""
        self._events = self._serve_events(state) if events else None
        self.list_reader.start()
        internals.follow_apps(self.server, self.lowlevel, self._make_live)

    def _build_core(
        self,
        state: State,
        on_watched: Callable[[Topic], None] | None,
        on_unwatched: Callable[[Topic], None] | None,
        *,
        has_own_items: bool,
    ) -> None:
        self.catalog = Catalog(self.policy, life=secrets.token_hex(4), epoch=state.epoch)
        """The items that clients see."""
        self.own_catalog = Catalog(self.policy, life=secrets.token_hex(4)) if has_own_items else self.catalog
        """The items of this server. They are those that clients see, unless the server is a replica of a cluster."""
        journal = Journal(self.policy)
        state.restore(self.catalog, journal)
        self.hub = Hub(
            self.catalog,
            policy=self.policy,
            journal=journal,
            templates=read_template,
            on_watched=on_watched,
            on_unwatched=on_unwatched,
        )
        self.failures: Counter[str] = self.hub.counts.failures
        """The number of errors inside Tidings, by kind. Each was logged and did not stop the server."""

    def _build_server(self, authorize: Authorize | None, terms: TermsOf | None, shared_lists: bool | None) -> None:
        source, hub, lowlevel = self.source, self.hub, self.lowlevel
        self.bridge = LoopBridge(hub)
        self.bridge.on_bind(self._start)
        self.list_reader = ListReader(source, hub, self.own_catalog, self.bridge)
        self.list_cache = ListCache(source, self.list_reader, hub, self.bridge, shared_lists=shared_lists)
        self.subscriptions = Subscriptions(
            hub,
            self.bridge,
            self.durables,
            StreamLimits(self.policy),
            Authorization(authorize),
            serves=self.list_reader.serves,
            serves_contents=self.list_reader.serves_contents,
            terms=terms,
        )
        self.listen_streams = ListenStreams(
            self.subscriptions, result_meta=partial(server_info_meta, lowlevel), stop_server=self.stop
        )
        self.legacy_streams = LegacyStreams(self.subscriptions)
        events = ChangeEvents(
            source, hub, self.own_catalog, self.list_reader.wake
        )  # before `Sessions` replaces the handler
        self._sessions = Sessions(lowlevel, self.subscriptions, self.legacy_streams)
        self.webhooks = Webhooks(self.subscriptions)
        self.extension = ExtensionMethods(lowlevel, self.subscriptions, self.webhooks)
        self._middleware = NotificationMiddleware(source, hub, self.list_reader, self._sessions, events)
        lowlevel.middleware.insert(0, self._middleware)
        lowlevel.middleware.append(ToolCallMiddleware(hub))
        self.tools = LiveItems(source, self.own_catalog, Feature.TOOLS)
        self.prompts = LiveItems(source, self.own_catalog, Feature.PROMPTS)
        self.resources = LiveResources(source, self.own_catalog)

    def _serve_events(self, state: State) -> EventService:
        from tidings.events.draft import CAPABILITIES
        from tidings.events.service import EventService

        self._middleware.more_capabilities.update(CAPABILITIES)
        events = EventService(self.lowlevel, self.subscriptions, self.writer, state.events)
        self.metrics.count_event_subscriptions = partial(len, events.deliveries)
        self.metrics.count_pending_events = partial(len, events.occurrences)
        return events

    def _join(self, backend: Backend) -> Replica:
        from tidings.cluster.replica import Replica

        replica = Replica(
            backend, self.lowlevel, self.own_catalog, self.hub, self.durables, self.bridge, self.list_reader
        )
        self.subscriptions.catch_up = replica.catch_up
        self.metrics.count_replicas = replica.count_reachable
        return replica

    @property
    def epoch(self) -> str:
        """Identifies the revisions: those of the store, of the cluster or of this process."""
        return self.catalog.epoch

    # Serving

    def http_app(
        self,
        *,
        health: bool = False,
        metrics: Audience | None = None,
        console: bool | Mode = False,
        **options: Unpack[AppOptions],
    ) -> Starlette:
        """Return the server's own ASGI app, made live. `options` are those of its `streamable_http_app()` or
        `http_app()`. `health` and `metrics` add routes: see `health_routes`. So does `console`: True or "read" for a
        console that only shows, "write" for one that can call tools and end streams; see `console_routes`."""
        from tidings.http.app import own_app

        given: dict[str, Any] = {**options}
        if given.get("transport") == "sse":
            raise TidingsError(_NO_SSE)
        app: Starlette = own_app(self.server, given)
        app.router.routes.extend(self.health_routes(health=health, metrics=metrics))
        if console is not False:
            mode: Mode = "read" if console is True else console
            app.router.routes.extend(self.console_routes(mode, security=given.get("transport_security")))
        return app

    def _make_live(self, app: Starlette) -> None:
        """Make an app live that the server returns from `streamable_http_app()` or `http_app()`, or runs itself."""
        from tidings.http.app import make_live
        from tidings.http.router import Router

        make_live(
            self.server,
            app,
            make_router=lambda manager: Router(
                manager, self.source, self.list_reader, self.list_cache, self.listen_streams, self.legacy_streams
            ),
            reader=self.list_reader,
            start=self._restart,
            stop=self.stop,
        )

    def health_routes(
        self, *, health: bool = True, metrics: Audience | None = "local", token: str | None = None
    ) -> list[Route]:
        """Return routes for `/health/live` and `/health/ready`, and `/metrics` for processes of this machine ("local")
        or for anyone. With a token, a request for local metrics must contain it."""
        from tidings.http.health import routes
        from tidings.telemetry.metrics import render

        return routes(
            self.missing_for_readiness,
            self.find_degraded,
            partial(render, self.metrics),
            health=health,
            metrics=metrics,
            token=token,
        )

    def console_routes(
        self, mode: Mode = "read", *, token: str | None = None, security: TransportSecuritySettings | None = None
    ) -> list[Route]:
        """Return routes for `/console`. Without a token, it is for programs of this machine. With a token, a user logs
        in with it, from anywhere, or from the Host headers that `security` accepts."""
        from tidings.console.console import Console, Mode

        if mode not in get_args(Mode):
            raise TidingsError(f"console is {mode!r}; it must be True or one of {', '.join(get_args(Mode))}")
        if self._console is None:
            self._console = Console(self)
        return self._console.routes(mode, token, security)

    def run(
        self, transport: Literal["stdio", "http", "streamable-http"] = "stdio", **options: Unpack[RunOptions]
    ) -> None:
        """Serve until the process gets a signal to end. "streamable-http" is the SDK's name of "http".

        For "http", `host`, `port` and `log_level` are those of uvicorn, and the others those of `http_app()`."""
        if transport == "stdio":
            from tidings.stdio.transport import run_stdio

            if options:
                raise TidingsError(f"stdio has no option {', '.join(options)}; leave it out, or run http")
            run_stdio(self.server, self.lowlevel, self.list_cache, self.policy.write_deadline, self.stop)
        elif transport in ("http", "streamable-http"):
            from tidings.http.app import run_http

            run_http(self.server, self.http_app, **options)
        else:
            name: str = transport
            raise TidingsError(_NO_SSE if name == "sse" else f"no transport {name!r}; there are stdio and http")

    def listen(self, *features: Feature | str, uris: Iterable[str] = (), **options: Any) -> Listener:
        """Listen in this process: `async with live.listen("prompts") as changes: async for change in changes: …`"""
        self.bridge.call(self.bridge.publish_queued)  # the listener gets what comes after this call
        return listen(self.hub, *features, uris=uris, **options)

    def stop(self) -> None:
        """End every stream with its graceful result. Can be called from a signal handler's callback, and twice."""
        if not self.subscriptions.is_stopping:
            self._log("stopping", f"stopping {self.lowlevel.name}: subscribers to close: {len(self.hub)}")
        self.bridge.call(self.bridge.publish_queued)
        self.subscriptions.stop()
        self.listen_streams.stop()
        self.legacy_streams.stop()
        self._sessions.stop()
        self.webhooks.stop()
        if self._events is not None:
            self._events.stop()
        self.bridge.cancel_tasks()
        self.writer.wake()  # to write the versions that the streams were told last

    def end_streams(self, principal: Principal) -> int:
        """End all streams of a principal with their graceful result, and return how many. It is found by `client_id`
        and `subject`. Its clients can open streams again as long as their tokens are accepted. Can be called in any
        thread."""
        if not isinstance(principal, Principal):
            raise TidingsError(f"end_streams() takes the Principal that `authorize` gets, not {principal!r:.80}")
        return self.subscriptions.authorized_streams.end_all_of(principal)

    def close(self) -> None:
        """Stop, write what is left to the store, and release it for another server in this process.

        This waits for the disk. At the end of the process, the store is written without this call."""
        self.stop()
        self.writer.close()

    def missing_for_readiness(self) -> list[str]:
        """Return what is missing before the server is ready; an empty list if it is ready."""
        if self.subscriptions.is_stopping or not self.bridge.is_bound:
            return ["the server"]
        return self.list_reader.find_missing() + ([] if self.source.is_answering else ["its source"])

    def find_degraded(self) -> list[str]:
        """Return the parts that are out of order while the server serves without them."""
        if self.replica is None or self.replica.lost_reason is None:
            return []
        return [f"the cluster can't be reached: {self.replica.lost_reason}"]

    def _restart(self) -> None:
        """Start again after a stop: some applications do so in one process."""
        if self.subscriptions.is_stopping:
            self.subscriptions.restart()
            self.bridge.unbind()

    def _start(self) -> None:
        self._log("starting", f"{self.lowlevel.name} is live")
        self.bridge.start_task(self.source.run())
        if self._poll is not None:
            self.bridge.start_task(self.list_reader.poll(self._poll))
        self.bridge.start_task(self.subscriptions.authorized_streams.run())
        if self.replica is not None:
            self.bridge.start_task(self.replica.run())

    def _log(self, event: str, text: str) -> None:
        logger.info("%s", text, extra={"tidings": {"event": event, "server": self.lowlevel.name}})

    # Events

    @property
    def events(self) -> EventService:
        """The MCP Events of this server."""
        if self._events is None:
            raise TidingsError(f"{self.lowlevel.name!r} serves no events; create it with Live(server, events=True)")
        return self._events

    def event(
        self,
        name: str,
        *,
        description: str | None = None,
        arguments: Mapping[str, Any] | type | None = None,
        payload: Mapping[str, Any] | type | None = None,
        on_first: EventHook | None = None,
        on_last: EventHook | None = None,
    ) -> Callable[[Payload], Payload]:
        """Declare a type of events. As a decorator of a class, it takes the payload and the description from it.

        `arguments` and `payload` are JSON schemas, or classes that have one: dataclasses, TypedDicts and pydantic
        models. `on_first` and `on_last` are called with the arguments of the first subscription with these arguments,
        and of the last one that ends, for example to start and end a watch of an upstream service."""
        return self.events.declare(
            name, description=description, arguments=arguments, payload=payload, on_first=on_first, on_last=on_last
        )

    def emit(
        self, name: str, data: Any, matching: Mapping[str, Any] | None = None, *, event_id: str | None = None
    ) -> str:
        """Publish an event, and return its id. It is kept until it is delivered or three days old.

        It goes to the subscriptions whose arguments all equal the values in `matching`, by default those in `data`.
        With a store, it is written before this returns: that takes a fraction of a millisecond, and more if the disk is
        slow. `event_id` is the id that an upstream service gave it. Can be called in any thread."""
        return self.events.emit(name, data, matching, event_id=event_id)

    # Reading

    async def refresh(self, *features: Feature | str) -> None:
        """Read lists of the server again, by default all, and publish what differs. Can be called on any event loop."""
        await self.list_reader.refresh(*features)

    def history(
        self,
        feature: Feature | str | None = None,
        *,
        uri: str | None = None,
        since: int | Cursor | None = None,
        limit: int | None = None,
    ) -> ChangeHistory:
        """Return the changes after a revision that the journal has: of one list, of one resource's content, or of all.

        With a cursor as `since`, only changes of the topics in it. With a limit, only the newest changes."""
        found = self.hub.history(history_topic(feature, uri), since, self.epoch)
        return found if limit is None else found.newest(limit)


def _check_option(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise TidingsError(f"Live({name}=…) must be {expected}, not {value!r:.80}")
