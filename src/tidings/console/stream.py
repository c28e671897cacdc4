"""The server-sent events for one page: what changed since the last events, at most four times per second.

A page that reads slowly does not delay others. While it does not read, the server keeps one set of changed ids for it,
and not a queue of events. `docs/console.md` lists the events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import Any, Final

from tidings.console.record import Record, Updates
from tidings.console.samples import Sample, Samples
from tidings.console.views import Views
from tidings.core.encoding import safe_json
from tidings.core.hub import Hub
from tidings.core.model import Feature

__all__ = ["EventStream"]

_INTERVAL: Final = 0.25
_HEARTBEAT: Final = 10.0
"""Seconds after which the page gets the overview or a comment, if nothing changes."""
_OVERVIEW_INTERVAL: Final = 1.0
_MAX_CHANGES = 25
"""New changes that are sent at once: more than anyone can read. The page can request the older ones."""
_MAX_UPDATED = 100
_MAX_CLIENTS = 100
"""Clients that are sent at once. The others are sent next time."""


class EventStream:
    """Makes the events for one page."""

    def __init__(self, hub: Hub, record: Record, samples: Samples, views: Views, must_end: Callable[[], bool]) -> None:
        self._hub = hub
        self._record = record
        self._samples = samples
        self._views = views
        self._must_end = must_end
        self._updates = Updates(record.last_id)
        self._versions: dict[Feature, Any] = {}
        self._sample: Sample | None = None
        self._overview_at = 0.0
        self._is_overview_due = True

    async def events(self) -> AsyncIterator[bytes]:
        """Yield events until the server stops, the login expires or the page disconnects."""
        loop = asyncio.get_running_loop()
        self._record.updates.add(self._updates)
        try:
            hello = {"epoch": self._hub.catalog.epoch, "revision": self._hub.notifications.revision}
            yield _event("hello", hello | {"started": self._views.started})
            self._take_catalog()
            written_at = loop.time()
            while not self._must_end():
                now = loop.time()
                events = self._take(now)
                if events:
                    written_at = now
                    yield b"".join(events)
                elif now - written_at >= _HEARTBEAT:
                    written_at = now
                    yield b": heartbeat\n\n"
                await asyncio.sleep(_INTERVAL)
        finally:
            self._record.updates.discard(self._updates)

    def _take(self, now: float) -> list[bytes]:
        """Return the events for all changes since the last call."""
        with self._hub.catalog.lock:
            events = [*self._take_changes(), *self._take_clients(), *self._take_catalog()]
            self._is_overview_due = self._is_overview_due or bool(events)
            return events + self._take_overview(now)

    def _take_changes(self) -> list[bytes]:
        updates, record = self._updates, self._record
        new = list(islice(record.find_before(record.last_id + 1), record.last_id - updates.last_change))
        updates.last_change = record.last_id
        updated = list(islice(updates.changes, _MAX_UPDATED))
        for id in updated:
            del updates.changes[id]
        known = [change for id in updated if (change := record.change(id)) is not None]
        for topic in {change.topic for change in new if change.reached}:
            for subscriber in self._hub.subscribers(topic):
                if (client := record.client_of(subscriber)) is not None:
                    updates.clients[client.id] = None
        return [
            *(_event("change", self._views.change_json(change)) for change in reversed(new[:_MAX_CHANGES])),
            *(_event("changed", self._views.counts_json(change)) for change in known),
        ]

    def _take_clients(self) -> list[bytes]:
        updates, record = self._updates, self._record
        ids = list(islice(updates.clients, _MAX_CLIENTS))
        for id in ids:
            del updates.clients[id]
        upserted = [client for id in ids if (client := record.clients.get(id)) is not None and client.closed is None]
        removed = [f"c{id}" for id in updates.removed]
        updates.removed.clear()
        updates.last_client = next(reversed(record.clients), 0)
        if not upserted and not removed:
            return []
        return [
            _event("clients", {"upserted": [self._views.client_json(each) for each in upserted], "removed": removed})
        ]

    def _take_catalog(self) -> list[bytes]:
        events = []
        for feature in Feature:
            version = self._hub.catalog.version(feature)
            if self._versions.get(feature) != version:
                self._versions[feature] = version
                revision_and_digest = {"revision": version.revision, "digest": version.digest}
                events.append(_event("catalog", {"feature": feature.value} | revision_and_digest))
        return events

    def _take_overview(self, now: float) -> list[bytes]:
        sample = self._samples.all[-1] if self._samples.all else None
        has_news = sample is not None and sample is not self._sample and sample.deliveries > 0
        waited = now - self._overview_at
        if waited < _OVERVIEW_INTERVAL or not (self._is_overview_due or has_news or waited >= _HEARTBEAT):
            return []
        self._sample, self._overview_at, self._is_overview_due = sample, now, False
        shown = self._views.current_overview()
        if sample is not None:
            shown["sample"] = self._views.sample_json(sample)
        return [_event("overview", shown)]


def _event(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), safe_json(data))
