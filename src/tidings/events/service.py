"""MCP Events of one server: the implementation of `live.events`, `live.event()` and `live.emit()`."""

from __future__ import annotations

import inspect
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from tidings.errors import TidingsError
from tidings.events import draft
from tidings.events.delivery import EventDeliveries
from tidings.events.occurrences import Occurrence, Occurrences
from tidings.events.subscriptions import EventSubscriptions
from tidings.events.types import EventHook, EventTypes, Payload, check, make_type
from tidings.store import EventRow
from tidings.store.durable import DurableSubscription

if TYPE_CHECKING:
    from mcp.server import Server

    from tidings.server.subscribe import Subscriptions
    from tidings.store.writer import StoreWriter

__all__ = ["EventService"]

logger = logging.getLogger(__name__)

_EVENT_ID = re.compile(r"[ -\-/-~]{1,256}")
"""Printable ASCII without a dot, because the dot separates the parts of a signed text."""


class EventService:
    """Declares event types, and emits events to their subscriptions."""

    def __init__(
        self,
        server: Server[Any],
        subscriptions: Subscriptions,
        writer: StoreWriter,
        stored: Mapping[EventRow, bytes],
    ) -> None:
        self._hub = subscriptions.hub
        self._bridge = subscriptions.bridge
        self._writer = writer
        self.types = EventTypes()
        hub = self._hub
        self.occurrences = Occurrences(hub.catalog.lock, hub.catalog.now, hub.counts, writer.add_events, stored)
        self._started: set[tuple[str, str]] = set()
        """The names and arguments for which `on_first` was called, and `on_last` was not called yet."""
        self._watchers = _Watchers(hub.catalog.lock)
        for record in subscriptions.durables.all():
            self._watchers.add(record)  # `emit` may be called before the event loop runs
        self.deliveries = EventDeliveries(subscriptions, self.occurrences)
        self.deliveries.on_added = self._add
        self.deliveries.on_removed = self._remove
        self.subscriptions = EventSubscriptions(
            server,
            subscriptions,
            self.types,
            self.deliveries,
            is_stored=writer.is_open,
            save=writer.flush,
        )

    def stop(self) -> None:
        self.deliveries.stop()
        self._started.clear()  # the next start calls `on_first` again

    def declare(
        self,
        name: str,
        *,
        description: str | None = None,
        arguments: Mapping[str, Any] | type | None = None,
        payload: Mapping[str, Any] | type | None = None,
        on_first: EventHook | None = None,
        on_last: EventHook | None = None,
    ) -> Callable[[Payload], Payload]:
        """Declare an event type. See `Live.event`."""
        options: dict[str, Any] = {"arguments": arguments, "on_first": on_first, "on_last": on_last}
        event = make_type(name, description=description, payload=payload, **options)
        self.types.declare(event)

        def describe_payload(payload: Payload) -> Payload:
            described = make_type(name, description=description, payload=payload, **options)
            self.types.declare(described, replaces=True)
            return payload

        return describe_payload

    def emit(
        self, name: str, data: Any, matching: Mapping[str, Any] | None = None, *, event_id: str | None = None
    ) -> str:
        """Publish an event, and return its id. See `Live.emit`."""
        event_type = self.types.own(name)
        described = f"the data of the event {name!r}"
        with _json_errors(described):
            data = to_jsonable_python(data)
        check(data, event_type.payload, described)
        with _json_errors("matching"):
            values = data if matching is None else to_jsonable_python(matching)
        if not isinstance(values, dict):
            raise TidingsError('matching must be a mapping of arguments to their values, such as {"document_id": "d1"}')
        event_id = event_id if event_id is not None else f"evt_{secrets.token_hex(16)}"
        if not isinstance(event_id, str) or _EVENT_ID.fullmatch(event_id) is None:
            raise TidingsError(
                f"{event_id!r:.80} is not the id of an event: it has 1 to 256 ASCII characters, and no ."
            )
        now = self._hub.catalog.now()
        with _json_errors(described):
            event = draft.encode_event(event_id, name, now, data)
        if len(event.body) > draft.MAX_BODY:
            raise TidingsError(
                f"the event {name!r} has {len(event.body)} bytes, and {draft.MAX_BODY} are allowed; send a summary, "
                "and let the receiver read the rest with a tool or a resource"
            )
        with self._hub.catalog.lock:  # a subscription that ends between these lines would keep its event
            self._hub.counts.events["emitted"] += 1
            watching = self._watchers.find(name, values)
            self.occurrences.add(Occurrence(event_id, name, now, event.body), watching)
        if watching:
            self._writer.flush()  # after this call, kill -9 does not lose the event
            self._bridge.call(self.deliveries.send_to, watching)
        return event_id

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the newest emitted events, the oldest first, with the number of subscriptions that wait for each."""
        found = self.occurrences.history()
        return found if limit is None else found[max(0, len(found) - limit) :]

    # The first and the last subscriber of a name and arguments

    def _add(self, record: DurableSubscription) -> None:
        self._watchers.add(record)
        if (key := _key(record)) not in self._started:
            self._started.add(key)
            self._call_hook(record, "on_first")

    def _remove(self, record: DurableSubscription) -> None:
        self._watchers.remove(record)
        if not self._watchers.has_any(record):
            self._started.discard(_key(record))
            self._call_hook(record, "on_last")

    def _call_hook(self, record: DurableSubscription, hook: str) -> None:
        assert record.event is not None
        event_type = self.types.get(record.event.name)
        function: EventHook | None = getattr(event_type, hook, None)
        if function is None:
            return
        try:
            result = function(dict(record.event.arguments))
            if inspect.iscoroutine(result):
                self._bridge.start_task(result)
        except Exception:  # the user's function
            self._hub.counts.failures["hook"] += 1
            logger.exception("%s of the event %r failed", hook, record.event.name)


@contextmanager
def _json_errors(what: str) -> Iterator[None]:
    """Raise `TidingsError` if a value can't be encoded: it has a cycle, an unpaired surrogate, or a foreign type."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TidingsError(f"{what} has no JSON form: {error}") from None


class _Watchers:
    """Finds the subscriptions of an emitted event by the values of their arguments. Any thread may use it."""

    def __init__(self, lock: threading.RLock) -> None:
        """`lock` is that of the catalog. A caller may hold it."""
        self._lock = lock
        self._ids: dict[str, dict[tuple[str, ...], dict[str, set[str]]]] = {}
        """The ids of subscriptions, by event name, the names of the arguments, and their values."""

    def add(self, record: DurableSubscription) -> None:
        if (event := record.event) is None or record.features or record.uris:
            return
        with self._lock:
            by_names = self._ids.setdefault(event.name, {})
            names = tuple(sorted(event.arguments))
            by_names.setdefault(names, {}).setdefault(draft.normalized_json(event.arguments), set()).add(record.name)

    def remove(self, record: DurableSubscription) -> None:
        if (event := record.event) is None:
            return
        with self._lock:
            by_names = self._ids.get(event.name, {})
            names, values = tuple(sorted(event.arguments)), draft.normalized_json(event.arguments)
            ids = by_names.get(names, {}).get(values, set())
            ids.discard(record.name)
            if names in by_names and not ids:
                by_names[names].pop(values, None)
                if not by_names[names]:
                    del by_names[names]

    def has_any(self, record: DurableSubscription) -> bool:
        """Return whether any subscription has the event and the arguments of `record`."""
        event = record.event
        assert event is not None
        with self._lock:
            by_values = self._ids.get(event.name, {}).get(tuple(sorted(event.arguments)), {})
            return draft.normalized_json(event.arguments) in by_values

    def find(self, name: str, values: Mapping[str, Any]) -> list[str]:
        """Return the subscriptions of an event whose arguments all equal the members of `values`."""
        with self._lock:
            by_names = self._ids.get(name, {})
            matching = (
                by_values.get(draft.normalized_json({each: values[each] for each in names}), ())
                for names, by_values in by_names.items()
                if all(each in values for each in names)
            )
            return list(chain.from_iterable(matching))


def _key(record: DurableSubscription) -> tuple[str, str]:
    assert record.event is not None
    return record.event.name, draft.normalized_json(record.event.arguments)
