"""Reads what a server lists, and keeps the catalog equal to it.

A source only says that a list may have changed. Some sources can be read immediately and from any thread; the others
get list requests as from a client: through the server's own middleware and handlers, page by page, on the event loop.
An error here never fails a request or a call of the user.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from mcp.shared.exceptions import MCPError
from mcp_types import METHOD_NOT_FOUND
from mcp_types.version import LATEST_MODERN_VERSION

from tidings.core.catalog import Catalog
from tidings.core.hub import Hub
from tidings.core.model import Change, Feature
from tidings.core.tracer import READ_LIST
from tidings.errors import InvalidItem
from tidings.runtime.backoff import Backoff
from tidings.sdk.definitions import distinct
from tidings.sdk.requests import request
from tidings.sdk.source import RegistryChange, Source
from tidings.server.loop_bridge import LoopBridge
from tidings.wire.methods import READ_RESOURCE, list_methods
from tidings.wire.paging import read_pages

__all__ = ["UNKNOWN", "ListReader"]

logger = logging.getLogger(__name__)

UNKNOWN: Final = object()
"""The state of the server's lifespan before it is known."""

_RETRY_DELAY, _MAX_RETRY_DELAY = 1.0, 60.0
"""Seconds until a list that could not be read is read again."""

_JITTER = 0.2
"""The part of the polling interval by which it varies."""

_MAX_LOGGED = 64
"""Causes of failed reads that are logged before a read succeeds. A message may contain a time, for example."""


class ListReader:
    """Reads the lists of one server."""

    def __init__(self, source: Source, hub: Hub, catalog: Catalog, bridge: LoopBridge) -> None:
        """`catalog` has the items of this server. It is the hub's, unless the server is a replica of a cluster."""
        self._source = source
        self._server = source.lowlevel
        self._hub = hub
        self._catalog = catalog
        self._bridge = bridge
        self.lifespan: Any = UNKNOWN
        """What the lifespan of the server yielded."""
        self._stale: set[Feature] = set(Feature)
        self._unread: set[Feature] = set(Feature)
        """The lists that could not be read, or were not read yet."""
        self._started: dict[Feature, float] = {}
        """The lists that are being read, and since when."""
        self._causes: dict[Feature, Mapping[str, str]] = {}
        """The traces of the calls that changed stale lists."""
        self._noticed: dict[Feature, dict[str | None, RegistryChange]] = {}
        """The lists that a source said may have changed since the last request for them, with the changes of items that
        were not in the catalog, by key. Needs the catalog's lock."""
        self._retries: dict[Feature, asyncio.TimerHandle] = {}
        self._failures: Counter[Feature] = Counter()
        """The reads that failed since the last one that succeeded."""
        self._logged: dict[Feature, set[str]] = {feature: set() for feature in Feature}
        """The causes of these failures."""
        self._reading = asyncio.Lock()
        self._is_late = False
        """Whether a read takes longer than a request waits for it."""
        self._reported: set[str] = set()
        self.request_timeout = 1.0
        """Seconds that a request waits for the lists. A list handler that hangs must not stop other requests."""
        self.ready_timeout = 10.0
        """Seconds that a list may take to be read before the server is not ready. A slow server is not an outage."""
        self.request_id: Final = f"tidings-{secrets.token_hex(8)}"
        """The id of the requests that read lists for the catalog. The middleware passes them on unchanged."""
        self.cache_request_id: Final = f"{self.request_id}-cache"
        """The id of the requests whose response is cached for clients."""
        bridge.on_bind(self._reset)

    def start(self) -> None:
        """Watch the source, and read the lists as far as that is possible without an event loop."""
        self._source.watch(self._catalog, self.wake)
        for feature in Feature:
            self.read_again(feature)

    def serves(self, feature: Feature) -> bool:
        """Return whether the server has a handler that lists this feature."""
        return self._server.get_request_handler(f"{feature.value}/list") is not None

    def serves_contents(self) -> bool:
        """Return whether the server lists resources, or reads them without a list."""
        return self.serves(Feature.RESOURCES) or self._server.get_request_handler(READ_RESOURCE) is not None

    def is_current(self, feature: Feature) -> bool:
        """Return whether the catalog has what the server lists now, as far as a change was noticed."""
        return feature not in self._stale and feature not in self._started and feature not in self._unread

    @property
    def is_loaded(self) -> bool:
        """Whether `ensure_loaded()` has nothing to do."""
        return not self._stale and not self._started and self._bridge.is_bound_here

    def find_missing(self) -> list[str]:
        """Return the lists that could not be read, or that take too long."""
        deadline = time.monotonic() - self.ready_timeout
        slow = {feature for feature, start in self._started.items() if start <= deadline}
        return sorted(feature.value for feature in self._unread | slow)

    async def ensure_loaded(self, lifespan: Any = UNKNOWN) -> None:
        """Bind to the running event loop, and read the lists that are stale. Wait for at most `request_timeout`."""
        self._bridge.bind()
        if lifespan is not UNKNOWN:
            self.lifespan = lifespan
        if (self._stale or self._started) and not self._is_late:
            reading = self._bridge.start_task(self._read_and_log_errors())
            done, _ = await asyncio.wait({reading}, timeout=self.request_timeout)
            if not done:
                logger.warning(
                    "the server's lists were not read in %s s; handling the request without them", self.request_timeout
                )
                self._is_late = True
                reading.add_done_callback(self._end_late)

    async def refresh(self, *features: Feature | str) -> None:
        """Read lists again, by default all, and publish the changes. Can be called on any event loop."""
        self._stale.update(map(Feature, features or Feature))
        await self._bridge.run(self._read_stale)

    async def poll(self, interval: float) -> None:
        """Read the lists that have subscribers again after each `interval` seconds, until cancelled."""
        while True:
            # With jitter, so that several servers do not ask the same upstream at the same moment.
            await asyncio.sleep(interval * random.uniform(1 - _JITTER, 1 + _JITTER))
            for feature in Feature:
                # A list that can't be read has a delay of its own.
                if not self._failures[feature] and self._hub.subscribers(feature):
                    self._stale.add(feature)
            await self._read_and_log_errors()

    def wake(self, feature: Feature, key: str | None = None, *, changed: RegistryChange | None = None) -> None:
        """Read a list again, or one item of it, because the source says that it may have changed.

        If the list can't be read, or shows nothing of the items that did change, clients are notified without details.
        The server's own methods call this, in any thread. It does not raise."""
        with self._catalog.lock:
            # Before the read, which removes it. A read that succeeds immediately needs no record of what was noticed.
            noticed = self._noticed.setdefault(feature, {})
            if changed is not None and changed.key not in self._catalog.items(feature):
                first = noticed.get(changed.key, changed)
                noticed[changed.key] = changed._replace(existed=first.existed)
        self.read_again(feature, key)

    def read_again(self, feature: Feature, key: str | None = None) -> None:
        """Read a list again, or one item of it. It does not raise."""
        try:
            # With the lock, so that an older read can't overwrite a newer one.
            with self._catalog.lock:
                # The user may register items after `Live()`: until a client comes, keep what the store remembers.
                is_early = not self._bridge.is_bound and self._catalog.items(feature).is_restored
                if key is not None and (is_early or feature not in self._stale):
                    self._noticed.pop(feature, None)
                    self._read_item(feature, key)
                    return
                listed = self._source.read_items(feature, self._report)
                if listed is not None:
                    self._noticed.pop(feature, None)
                    self._stale -= set() if is_early else {feature}
                    self._replace(feature, listed, remove_others=not is_early)
                    return
            self._stale.add(feature)
            if (cause := self._hub.tracer.current_trace()) is not None:
                self._causes[feature] = cause
            if self.lifespan is not UNKNOWN:
                self._bridge.call_soon(self._read_soon)
        except Exception as error:  # the user's add_tool() must not fail because of this
            self._stale.add(feature)
            self._record_failure(feature, error)

    async def request(self, method: str, version: str) -> dict[str, Any]:
        """Return the result of a list request by a modern client without capabilities."""
        return await self._request(method, version, self.cache_request_id, {})

    async def call(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of any request by such a client. Nobody can answer the server's own requests to it."""
        return await self._request(method, LATEST_MODERN_VERSION, f"call-{secrets.token_hex(8)}", params)

    # On the event loop

    def _reset(self) -> None:
        self._reading = asyncio.Lock()
        self._is_late = False

    def _end_late(self, reading: asyncio.Task[None]) -> None:
        self._is_late = False

    def _read_soon(self) -> None:
        if self._stale:
            self._bridge.start_task(self._read_and_log_errors())

    async def _read_and_log_errors(self) -> None:
        with suppress(Exception):  # which was logged
            await self._read_stale()

    async def _read_stale(self) -> None:
        async with self._reading:
            errors: list[Exception] = []
            for feature in [feature for feature in Feature if feature in self._stale]:
                try:
                    await self._read_feature(feature)
                except Exception as error:  # a list that fails must not prevent the others from being read
                    self._record_failure(feature, error)
                    self._retry(feature)
                    errors.append(error)
            if errors:
                raise errors[0]

    async def _read_feature(self, feature: Feature) -> None:
        with self._catalog.lock:
            if (listed := self._source.read_items(feature, self._report)) is not None:
                self._noticed.pop(feature, None)
                self._stale.discard(feature)
                self._replace(feature, listed)
                return
        if self.lifespan is UNKNOWN:
            return
        # Before the request: a change during it makes the list stale again, and then it is read again.
        self._started[feature] = time.monotonic()
        self._stale.discard(feature)
        cause = self._causes.pop(feature, None)
        with self._catalog.lock:
            noticed = self._noticed.pop(feature, None)
        items = self._catalog.items(feature)
        # Items that were registered before the first read are no change, also if this reader does not see them.
        unseen = noticed if noticed and items.was_read else {}
        try:
            with self._hub.tracer.span(READ_LIST, cause=cause, feature=feature.value):
                changes = self._replace(feature, await self._request_items(feature))
        except Exception:
            if noticed is not None:
                items.mark_changed()
            raise
        finally:
            self._started.pop(feature, None)
        if not changes and any(
            (change.existed or change.exists) and change.key not in items for change in unseen.values()
        ):
            items.mark_changed()

    def _retry(self, feature: Feature) -> None:
        """Read the list again after a delay; not at every request, because a list that fails may be expensive."""
        if (retry := self._retries.pop(feature, None)) is not None:
            retry.cancel()
        delay = Backoff(_RETRY_DELAY, _MAX_RETRY_DELAY).delay(self._failures[feature] - 1)
        self._retries[feature] = asyncio.get_running_loop().call_later(delay, self.read_again, feature)

    def _record_failure(self, feature: Feature, error: Exception) -> None:
        """Count a failed read, and log its cause once."""
        self._unread.add(feature)
        self._failures[feature] += 1
        self._hub.counts.failures["reading"] += 1
        cause, logged = f"{type(error).__name__}: {error}", self._logged[feature]
        if cause not in logged and len(logged) < _MAX_LOGGED:
            logged.add(cause)
            logger.error(
                "reading the server's %s failed. Until it succeeds, clients are notified of changes without details. "
                "Later attempts that fail with the same error are counted, and not logged",
                feature.value,
                exc_info=error,
            )

    async def _request_items(self, feature: Feature) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for name, method in list_methods(feature).items():
            if self._server.get_request_handler(name) is None:
                continue
            try:
                async for page in read_pages(name, partial(self._request_page, name)):
                    items += page.get(method.member, [])
            except MCPError as error:
                if error.code != METHOD_NOT_FOUND:
                    raise
        return items

    async def _request_page(self, method: str, cursor: str | None) -> dict[str, Any]:
        page = {} if cursor is None else {"cursor": cursor}
        return await self._request(method, LATEST_MODERN_VERSION, self.request_id, page)

    async def _request(self, method: str, version: str, request_id: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return await request(self._server, self.lifespan, request_id, method, version, params)

    # Into the catalog

    def _read_item(self, feature: Feature, key: str) -> None:
        items = self._catalog.items(feature)
        try:
            if (listed := self._source.read_item(feature, key)) is not None:
                items.put(listed)
                return
        except InvalidItem as error:
            self._report(error)
        if key in items:
            items.remove(key)

    def _replace(
        self, feature: Feature, listed: Iterable[dict[str, Any]], *, remove_others: bool = True
    ) -> Sequence[Change]:
        items = self._catalog.items(feature)
        changes = items.replace(distinct(feature, listed), on_invalid=self._report, remove_others=remove_others)
        self._unread.discard(feature)
        if self._failures.pop(feature, 0):
            self._logged[feature].clear()
            logger.info("the server's %s can be read again", feature.value)
        return changes

    def _report(self, error: InvalidItem) -> None:
        """Log an invalid item, once. It is left out of the catalog."""
        if str(error) not in self._reported:
            self._reported.add(str(error))
            self._hub.counts.failures["items left out"] += 1
            logger.error("clients will not be told of an item: %s", error)
