"""The JSON that the console shows, made from the record, the hub and the catalog of one server.

Call all methods on the event loop of the server.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from importlib.metadata import version as installed_version
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from mcp.shared.exceptions import MCPError

from tidings.console.change import FETCH_TIMEOUT, OutcomeState, PublishedChange
from tidings.console.client import RecordedClient
from tidings.console.record import Record
from tidings.console.samples import Sample, Samples, percentile
from tidings.core.encoding import iso_time, safe_json
from tidings.core.field_diff import ABSENT, FieldChange, compare_fields
from tidings.core.filters import Filter
from tidings.core.model import Change, Feature, Item, Reason, Topic, Version
from tidings.core.patterns import is_pattern
from tidings.errors import NotFound, TidingsError
from tidings.store.durable import as_json
from tidings.wire.methods import CALL_TOOL, GET_PROMPT, READ_RESOURCE

if TYPE_CHECKING:
    from mcp.server import Server

    from tidings.cluster.replica import Replica
    from tidings.core.hub import Hub
    from tidings.http.legacy import LegacyStreams
    from tidings.http.listen import ListenStreams
    from tidings.sdk.source import Source
    from tidings.server.list_cache import ListCache
    from tidings.server.list_reader import ListReader
    from tidings.store.durable_registry import DurableSubscriptions

__all__ = ["Served", "Views"]

_MAX_LIMIT = 1000
_MAX_FIELDS = 100
"""Fields of one item in a change."""
_MAX_VALUE = 4000
"""Characters of a value in a change. A longer value is shown as text that ends here."""
_MAX_DESCRIPTION = 200
_MAX_DELIVERIES = 5000
_MAX_WATCHES = 500
_MAX_RECENT = 20
_MAX_WATCHERS = 500
_MAX_CACHED = 256
"""Changes whose differing fields are cached."""


class Served(Protocol):
    """The parts of a live server that the console shows."""

    @property
    def hub(self) -> Hub: ...
    @property
    def lowlevel(self) -> Server[Any]: ...
    @property
    def source(self) -> Source: ...
    @property
    def list_reader(self) -> ListReader: ...
    @property
    def list_cache(self) -> ListCache: ...
    @property
    def listen_streams(self) -> ListenStreams: ...
    @property
    def legacy_streams(self) -> LegacyStreams: ...
    @property
    def durables(self) -> DurableSubscriptions: ...
    @property
    def replica(self) -> Replica | None: ...


class Views:
    def __init__(self, server: Served, record: Record, samples: Samples, *, can_write: bool, has_login: bool) -> None:
        self._server = server
        self._hub = server.hub
        self._record = record
        self._samples = samples
        self._can_write = can_write
        self._has_login = has_login
        self._problems: dict[str, float] = {}
        """When each problem of the workspace was first seen."""
        self._cached_items: dict[int, list[dict[str, Any]]] = {}
        """A cache of the items and fields of recent changes, by the id of the change."""

    # Overview

    def overview(self, params: Mapping[str, str]) -> dict[str, Any]:
        samples = list(self._samples.all)
        return self.current_overview() | {
            "history": {
                "times": [round(each.time, 3) for each in samples],
                "deliveries": [round(each.deliveries / each.seconds, 2) for each in samples],
                "p95": [each.p95 for each in samples],
            }
        }

    def current_overview(self) -> dict[str, Any]:
        """Return the overview without its history."""
        server, hub, counts = self._server, self._hub, self._hub.counts
        lowlevel, latency = server.lowlevel, list(counts.latency.counts)
        return {
            "server": {
                "name": lowlevel.name,
                "version": lowlevel.version or "",
                "tidings": installed_version("tidings"),
                "started": self.started,
                "login": self._has_login,
            },
            "mode": "write" if self._can_write else "read",
            "epoch": hub.catalog.epoch,
            "revision": hub.notifications.revision,
            "clients": len(hub),
            "watched": len(hub.count_subscriptions()),
            "delivered": sum(counts.sent.values()),
            "suppressed": {reason.value: number for reason, number in counts.suppressed.items()},
            "pending": sum(subscriber.pending for subscriber in hub),
            "slow": server.listen_streams.slow + server.legacy_streams.slow,
            "failures": {name: number for name, number in counts.failures.items() if number},
            "deliveriesPerSecond": round(self._samples.deliveries_per_second, 2),
            "latency": {f"p{share}": percentile(latency, share / 100) for share in (50, 95, 99)},
            "catalog": {feature.value: self._feature(feature) for feature in Feature},
            "problems": self._list_problems(),
            "webhooks": [_webhook(as_json(each)) for each in server.durables.all() if each.webhook is not None],
            "replicas": self._list_replicas(),
        }

    @property
    def started(self) -> str:
        return iso_time(self._record.started)

    def sample_json(self, sample: Sample) -> dict[str, Any]:
        deliveries = round(sample.deliveries / sample.seconds, 2)
        return {"time": round(sample.time, 3), "deliveries": deliveries, "p95": sample.p95}

    def _feature(self, feature: Feature) -> dict[str, Any]:
        items = self._hub.catalog.items(feature)
        return {"items": len(items), "revision": items.version.revision, "digest": items.version.digest}

    def _list_problems(self) -> list[dict[str, Any]]:
        problems = self._server.source.problems
        now = self._hub.catalog.now()
        self._problems = {text: self._problems.get(text, now) for text in map(str, problems)}
        return [
            {
                "file": each.path,
                "line": each.line,
                "column": None,
                "text": each.message,
                "since": iso_time(self._problems[str(each)]),
            }
            for each in problems
        ]

    def _list_replicas(self) -> list[dict[str, Any]]:
        replica = self._server.replica
        if replica is None:
            return []
        return [
            {
                "id": name,
                "host": info.host,
                "pid": info.pid,
                "digests": info.digests,
                "streams": info.streams,
                "lag": lag,
                "isSelf": name == replica.id,
            }
            for name, info, lag in replica.list_replicas()
        ]

    # Changes

    def changes(self, params: Mapping[str, str]) -> dict[str, Any]:
        limit = min(_integer(params, "limit", 200), _MAX_LIMIT)
        before = _integer(params, "before", self._record.last_id + 1)
        text = params.get("text", "").casefold()
        is_unfetched = params.get("notFetched") in ("1", "true")
        with self._hub.catalog.lock:
            found = [
                change
                for change in self._record.find_before(before)
                if not (is_unfetched and not change.not_fetched(self._hub.catalog.now()))
                and not (text and not self._matches(change, text))
            ]
        return {"changes": [self.change_json(each) for each in found[:limit]], "hasMore": len(found) > limit}

    def change(self, params: Mapping[str, str]) -> dict[str, Any]:
        with self._hub.catalog.lock:
            change = self._record.change(_integer(params, "id", 0))
            if change is None:
                raise NotFound("There is no such change, or it is too old; the console keeps the last 1,000")
            deliveries, is_complete = self._deliveries(change)
            is_truncated = change.is_truncated or not is_complete
            return self.change_json(change) | {"deliveries": deliveries, "isTruncated": is_truncated}

    def change_json(self, change: PublishedChange) -> dict[str, Any]:
        return {
            "id": change.id,
            "time": iso_time(change.time),
            "topic": _topic(change.topic),
            "revision": change.version.revision,
            "digest": change.version.digest,
            "source": self._source(),
            "items": self._items_of(change),
            **self.counts_json(change),
        }

    def counts_json(self, change: PublishedChange) -> dict[str, Any]:
        """Return the part of a change that may still change."""
        late = [each.latency for each in change.deliveries.values() if each.latency is not None]
        immediate = change.told - len(late)
        median: float | None = change.latency if immediate >= len(late) else statistics.median(late)
        return {
            "id": change.id,
            "told": change.told,
            "pending": change.counts[OutcomeState.PENDING],
            "suppressed": change.counts[OutcomeState.SUPPRESSED],
            "superseded": change.counts[OutcomeState.SUPERSEDED],
            "closed": change.counts[OutcomeState.CLOSED],
            "fetched": change.fetched,
            "notFetched": change.not_fetched(self._hub.catalog.now()),
            "latency": {"p50": median, "max": change.max_latency} if change.told else {"p50": None, "max": None},
        }

    def _source(self) -> str:
        """Return where the changes of this server come from."""
        if self._server.replica is not None:
            return "cluster"
        return "workspace" if self._server.source.editor is None else "code"

    def _items_of(self, change: PublishedChange) -> list[dict[str, Any]]:
        items = self._cached_items.get(change.id)
        if items is None:
            items = self._cached_items[change.id] = [
                {"operation": each.operation.value, "key": each.key, "fields": _fields(each)} for each in change.changes
            ]
            if len(self._cached_items) > _MAX_CACHED:
                del self._cached_items[next(iter(self._cached_items))]
        return items

    def _matches(self, change: PublishedChange, text: str) -> bool:
        """Return whether the topic, the key of an item, or the path of a field contains a text."""
        if text in _topic(change.topic).casefold() or any(text in each.key.casefold() for each in change.changes):
            return True
        paths = (field["path"] for item in self._items_of(change) for field in item["fields"])
        return any(text in path.casefold() for path in paths)

    def _deliveries(self, change: PublishedChange) -> tuple[list[dict[str, Any]], bool]:
        """Return the delivery of a change to each client, and whether the list is complete."""
        found: list[dict[str, Any]] = []
        for client in self._record.clients.values():
            delivery = change.deliveries.get(client.id)
            if delivery is None and (change.is_missing_deliveries or not client.was_watching(change)):
                continue
            if len(found) >= _MAX_DELIVERIES:
                return found, False
            state = OutcomeState.TOLD if delivery is None else delivery.state
            told_at = change.published if delivery is None else delivery.time
            fetched, after = self._fetch_of(client, change, state, told_at)
            found.append(
                {
                    "client": _client_id(client),
                    "name": _name(client),
                    "state": state.value,
                    "reason": None if delivery is None else delivery.reason,
                    "latency": change.latency if delivery is None else delivery.latency,
                    "fetched": fetched,
                    "fetchedAfter": after,
                }
            )
        # The record has dropped the clients that left long ago.
        return found, len(found) >= change.reached

    def _fetch_of(
        self, client: RecordedClient, change: PublishedChange, state: OutcomeState, told_at: float
    ) -> tuple[str, float | None]:
        """Return whether a client fetched a change, and how many seconds after the notification."""
        if state is not OutcomeState.TOLD or not client.can_fetch:
            return "not applicable", None
        fetched_at, is_known = client.first_fetch(change)
        if not is_known:
            return "not applicable", None
        if fetched_at:
            after = max(0.0, fetched_at - told_at)
            return "yes" if after <= FETCH_TIMEOUT else "no", round(after, 6)
        return "waiting" if self._hub.catalog.now() <= told_at + FETCH_TIMEOUT else "no", None

    # Clients

    def clients(self, params: Mapping[str, str]) -> dict[str, Any]:
        with self._hub.catalog.lock:
            return {"clients": [self.client_json(each) for each in self._record.open_clients()]}

    def client(self, params: Mapping[str, str]) -> dict[str, Any]:
        with self._hub.catalog.lock:
            client = self._find_client(params)
            watches = [self._watch_json(client, topic) for topic in islice(client.watches, _MAX_WATCHES)]
            return self.client_json(client) | {
                "watches": watches,
                "isTruncated": len(client.watches) > _MAX_WATCHES,
                "recent": list(islice(self._recent(client), _MAX_RECENT)),
                "filter": _filter(client.subscriber.filter if client.subscriber is not None else None),
            }

    def client_json(self, client: RecordedClient) -> dict[str, Any]:
        subscriber, identity, record = client.subscriber, client.identity, self._record
        last = record.last_told(client)
        pending = subscriber.pending if subscriber is not None else 0
        principal = identity.principal
        return {
            "id": _client_id(client),
            "name": _name(client),
            "version": identity.version,
            "era": client.kind.era,
            "protocol": identity.protocol,
            "transport": client.kind.transport,
            "principal": (principal[1] or principal[0]) if principal is not None else None,
            "connected": iso_time(client.connected),
            "closed": client.closed,
            "topics": len(client.watches),
            "pending": pending,
            "delivered": record.delivered_to(client),
            "suppressed": client.suppressed,
            "latency": last[1] if last is not None else None,
            "isSlow": pending > 0 and subscriber is not None and not subscriber.is_ready,
            "lastTold": iso_time(last[0]) if last is not None else None,
        }

    def client_view(self, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the lists that a client gets, with a note if the server may list other items for each caller."""
        self._find_client(params)
        shared = all(self._server.list_cache.can_serve(f"{feature.value}/list") for feature in Feature)
        note = None if shared else "This server may list other items for each caller; these are those without a caller."
        return {feature.value: self._list_items(feature) for feature in Feature} | {"note": note}

    async def end_client(self, params: Mapping[str, Any]) -> dict[str, bool]:
        """End the stream of a client with its graceful result. The client may open another one."""
        client = self._find_client(params)
        subscriber, kind = client.subscriber, client.kind
        if subscriber is None:
            raise NotFound(f"{_name(client)} has left already")
        if kind.transport == "webhook":
            raise TidingsError("A webhook has no stream; remove it with `tidings subscriptions`")
        if kind.era == "legacy":
            if kind.transport != "http" or not self._server.legacy_streams.end_stream_of(subscriber):
                raise TidingsError(f"{_name(client)} has no open stream that could be ended")
        else:
            self._hub.close(subscriber, Reason.REVOKED)
        return {"ended": True}

    def _find_client(self, params: Mapping[str, Any]) -> RecordedClient:
        client = self._record.clients.get(_integer({"id": str(params.get("id", "")).removeprefix("c")}, "id", 0))
        if client is None:
            raise NotFound("There is no such client, or it left long ago")
        return client

    def _watch_json(self, client: RecordedClient, topic: Topic) -> dict[str, Any]:
        subscriber, fetched_at = client.subscriber, client.last_fetched.get(topic)
        is_named = isinstance(topic, Feature) or not is_pattern(topic)
        told = self._hub.told(subscriber, topic) if is_named and subscriber is not None else None
        mailbox = subscriber.mailbox if subscriber is not None else None
        is_muted = subscriber.is_muted if subscriber is not None else None
        return {
            "topic": _topic(topic),
            "told": _version(told) if told is not None else None,
            "current": _version(self._hub.notifications.version(topic)) if is_named else None,
            "isPending": mailbox is not None and mailbox.is_pending(topic, is_muted),
            "lastFetched": iso_time(fetched_at) if fetched_at is not None else None,
        }

    def _recent(self, client: RecordedClient) -> Iterator[dict[str, Any]]:
        """Yield the deliveries to a client, the newest first."""
        for change in self._record.find_before(self._record.last_id + 1):
            delivery = change.deliveries.get(client.id)
            if delivery is None and not client.was_watching(change):
                continue
            if delivery is None or delivery.state is OutcomeState.TOLD:
                time, latency = (
                    (change.published, change.latency) if delivery is None else (delivery.time, delivery.latency)
                )
                yield {
                    "time": iso_time(time),
                    "topic": _topic(change.topic),
                    "revision": change.version.revision,
                    "latency": latency,
                }

    # Catalog

    def catalog(self, params: Mapping[str, str]) -> dict[str, Any]:
        return {feature.value: self._feature(feature) | {"items": self._list_items(feature)} for feature in Feature}

    def item(self, params: Mapping[str, str]) -> dict[str, Any]:
        feature, key = Feature(params.get("feature", "")), params.get("key", "")
        item = self._hub.catalog.items(feature).item(key)
        changes = [each for each in self._hub.history(feature, None, "").changes if each.key == key]
        if item is None and not changes:
            raise NotFound(f"There is no {feature.singular} {key!r:.200}")
        history = [
            {
                "time": iso_time(each.time),
                "revision": each.revision,
                "operation": each.operation.value,
                "fields": _fields(each),
            }
            for each in reversed(changes)
        ]
        watchers = [self._record.client_of(each) for each in self._hub.subscribers(_topic_of(feature, key))]
        return {
            "feature": feature.value,
            "key": key,
            "definition": item.definition if item is not None else None,
            "history": history,
            "watchers": [
                {"id": _client_id(each), "name": _name(each)} for each in watchers[:_MAX_WATCHERS] if each is not None
            ],
        }

    def _list_items(self, feature: Feature) -> list[dict[str, Any]]:
        hub = self._hub
        with hub.catalog.lock:
            revisions = {each.key: each.revision for each in hub.journal.kept_since(0, feature)[0]}
            is_content = feature is Feature.RESOURCES
            list_watchers = 0 if is_content else len(hub.subscribers(feature))
            return [
                _item(item, revisions.get(item.key), len(hub.subscribers(item.key)) if is_content else list_watchers)
                for item in hub.catalog.items(feature).snapshot()
            ]

    # Calls

    async def call_tool(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request(CALL_TOOL, name=body.get("name"), arguments=body.get("arguments"))

    async def read_resource(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request(READ_RESOURCE, uri=body.get("uri"))

    async def get_prompt(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request(GET_PROMPT, name=body.get("name"), arguments=body.get("arguments"))

    async def _request(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a request without a caller, through the server's own middleware and handlers."""
        try:
            return await self._server.list_reader.call(method, params)
        except MCPError as error:
            raise TidingsError(f"{method}: {error.error.message}") from None
        except Exception as error:  # of the user's code, or of the SDK for invalid params
            raise TidingsError(f"{method} failed: {type(error).__name__}: {error}") from None


def _webhook(durable: dict[str, Any]) -> dict[str, Any]:
    webhook = durable["webhook"]
    return {
        "name": durable["name"],
        "url": webhook["url"],
        "state": webhook["state"],
        "attempts": webhook["attempts"],
        "lastError": webhook.get("lastError"),
        "nextAttempt": webhook.get("nextAttempt"),
    }


def _item(item: Item, revision: int | None, watchers: int) -> dict[str, Any]:
    definition = item.definition
    shown: dict[str, Any] = {
        "key": item.key,
        "name": definition.get("name", item.key),
        "title": definition.get("title"),
        "description": str(definition.get("description") or "")[:_MAX_DESCRIPTION],
        "revision": revision,
        "watchers": watchers,
    }
    if "uriTemplate" in definition:
        shown["kind"] = "template"
    return shown


def _fields(change: Change) -> list[dict[str, Any]]:
    """Return the fields of an item that a change added, changed or removed. For a change of content, its metadata."""
    before = change.before.definition if change.before is not None else {}
    after = change.item.definition if change.item is not None else {}
    if not isinstance(change.topic, Feature) and change.metadata:
        after = {"metadata": dict(change.metadata)}
    return [_field(each) for each in islice(compare_fields(before, after), _MAX_FIELDS)]


def _field(field: FieldChange) -> dict[str, Any]:
    values = {"before": field.before, "after": field.after}
    return {"path": field.path} | {name: _short(value) for name, value in values.items() if value is not ABSENT}


def _short(value: Any) -> Any:
    text = safe_json(value)
    if len(text) <= _MAX_VALUE:
        return value
    return f"{value if isinstance(value, str) else text.decode(errors='replace'):.{_MAX_VALUE}}…"


def _filter(filter: Filter | None) -> dict[str, Any] | None:
    if filter is None:
        return None
    shown = {
        "operations": sorted(each.value for each in filter.operations) if filter.operations is not None else None,
        "names": list(filter.names) if filter.names is not None else None,
        "uris": list(filter.uris) if filter.uris is not None else None,
        "also": _filter(filter.also),
    }
    return {name: value for name, value in shown.items() if value is not None}


def _client_id(client: RecordedClient) -> str:
    return f"c{client.id}"


def _name(client: RecordedClient) -> str:
    return client.identity.name or client.label or "a subscriber"


def _topic(topic: Topic) -> str:
    return topic.value if isinstance(topic, Feature) else topic


def _topic_of(feature: Feature, key: str) -> Topic:
    """Return the topic whose subscribers count as watchers of an item: the content of a resource, or else the list."""
    return key if feature is Feature.RESOURCES else feature


def _version(version: Version) -> dict[str, Any]:
    return {"revision": version.revision, "digest": version.digest}


def _integer(params: Mapping[str, str], name: str, default: int) -> int:
    text = params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise TidingsError(f"{name}={text[:40]}: give a number")
    return int(text)
