"""The one way to open a subscription, for every transport.

1. `await subscriptions.prepare(…)` checks the limits, reads the client's options and asks for authorization.
2. `prepared.acknowledge(end)` takes over the durable subscription that the client names, if it names one, and returns
   what the client is told first. A webhook has no acknowledgement, and calls `prepared.connect(end, …)` instead.
3. `prepared.subscribe(deliver, …)` opens the subscriber, which watches the granted topics from then on.

Steps 2 and 3 do not await. If a transport does not await between them either, no change can fall between the
acknowledgement and the subscription. A transport supplies only `deliver`: how bytes reach its client.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from tidings.core.cursor import Cursor
from tidings.core.encoding import is_unicode, iso_time
from tidings.core.filters import Terms
from tidings.core.frames import (
    AUTHORIZED_UNTIL_KEY,
    CURSOR_KEY,
    DURABLE_KEY,
    FILTER_KEY,
    REFETCH_KEY,
    FrameFormat,
)
from tidings.core.hub import Hub
from tidings.core.index import check_limit
from tidings.core.mailbox import IsMuted
from tidings.core.model import Feature, Reason, Topic, Version
from tidings.core.patterns import Match, is_pattern
from tidings.core.resume import Resumed, resume
from tidings.core.subscriber import ConnectionKind, Deliver, OnClose, Subscriber
from tidings.errors import InvalidPattern
from tidings.server.authorization import Authorization, Principal, owner_of
from tidings.server.authorized_streams import AuthorizedStreams
from tidings.server.client_identity import ClientObserver
from tidings.server.granted_topics import GrantedTopics, RequestedTopics
from tidings.server.listen_options import ABSENT, ListenOptions
from tidings.server.loop_bridge import LoopBridge
from tidings.server.stream_limits import StreamLimits, StreamSlot
from tidings.store.durable import SERVER, DurableSubscription, Owner
from tidings.store.durable_connection import DurableConnection
from tidings.store.durable_registry import DurableSubscriptions

__all__ = ["PreparedSubscription", "Subscriptions", "TermsOf"]

logger = logging.getLogger(__name__)

TermsOf = Callable[[Principal | None], Terms | None]
"""Returns the terms that the server sets for a caller."""


class Subscriptions:
    """Opens the subscriptions of one server. The hub holds them."""

    def __init__(
        self,
        hub: Hub,
        bridge: LoopBridge,
        durables: DurableSubscriptions,
        limits: StreamLimits,
        authorization: Authorization,
        *,
        serves: Callable[[Feature], bool],
        serves_contents: Callable[[], bool],
        terms: TermsOf | None = None,
    ) -> None:
        self.hub = hub
        self.policy = hub.policy
        self.bridge = bridge
        self.durables = durables
        self.limits = limits
        self.authorization = authorization
        self.authorized_streams = AuthorizedStreams(hub, bridge, authorization)
        self.serves = serves
        self.serves_contents = serves_contents
        self.catch_up: Callable[[int], Awaitable[None]] | None = None
        """Waits until a replica knows a revision that its client has seen on another one."""
        self.client_observer: ClientObserver | None = None
        """Learns which clients subscribe and fetch; None if nobody asks."""
        self.is_stopping = False
        """Whether the server stops: streams that open now end immediately, and take over no durable subscription."""
        self._terms = terms

    @property
    def epoch(self) -> str:
        return self.hub.catalog.epoch

    def stop(self) -> None:
        self.is_stopping = True

    def restart(self) -> None:
        self.is_stopping = False

    async def prepare(
        self,
        requested: RequestedTopics | None,
        principal: Principal | None,
        *,
        meta: object,
        capabilities: object,
        address: str | None,
    ) -> PreparedSubscription:
        """Prepare the subscription of a client. Without `requested`, it is a legacy session, which watches all lists
        and what its durable subscription watches.

        Raise `TooManyStreams` if no more stream may be opened, and `LimitReached` if this one asks for too much. The
        caller calls `prepared.slot.release()` when the stream ends."""
        slot = self.limits.reserve(principal, address)
        try:
            owner = owner_of(principal)
            options = self._read_options(meta, capabilities, principal, owner)
            if self.catch_up is not None and (cursor := Cursor.parse(options.resume)) and cursor.epoch == self.epoch:
                await self.catch_up(cursor.newest)
            if requested is not None:
                granted = await self.grant(requested, principal)
            else:
                features = [feature for feature in Feature if self.serves(feature)]
                topics: list[Topic] = [*features, *self._remembered(options, owner).uris]
                granted = GrantedTopics(await self.authorization.filter(principal, topics))
            slot.watch(granted.uris)
        except BaseException:
            slot.release()
            raise
        return PreparedSubscription(self, options, granted, principal, owner, slot)

    async def prepare_webhook(self, durable: DurableSubscription) -> PreparedSubscription:
        """Prepare the subscription of a webhook or an event, which is not a stream and has no limit of its own."""
        topics: list[Topic] = [*durable.features, *durable.uris]
        meta: dict[str, Any] = {DURABLE_KEY: {"name": durable.name, "ttl": durable.ttl}}
        if durable.terms:
            meta[FILTER_KEY] = durable.terms
        owner, principal = durable.owner, None
        if owner != SERVER:
            principal = Principal(*owner, durable.scopes) if owner is not None else None
            topics = await self.authorization.filter(principal, topics)
        options = self._read_options(meta, None, principal, owner)
        slot = StreamSlot(None, None, None)
        return PreparedSubscription(self, options, GrantedTopics(topics), principal, owner, slot)

    async def grant(self, requested: RequestedTopics, principal: Principal | None) -> GrantedTopics:
        """Return the requested topics that this server can send and this caller may watch.

        Raise `LimitReached` if more are requested than the policy allows."""
        topics: list[Topic] = [feature for feature in requested.features if self.serves(feature)]
        matches: dict[str, Match] = {}
        if requested.resource_subscriptions:
            uris = list(dict.fromkeys(requested.resource_subscriptions))
            check_limit(self.policy, None, uris)
            if self.serves_contents():
                matches = self._compile_patterns(uris)
                topics += [uri for uri in uris if (uri in matches if is_pattern(uri) else is_unicode(uri))]
        return GrantedTopics(await self.authorization.filter(principal, topics), matches)

    async def allows_uri(self, principal: Principal | None, uri: str) -> bool:
        """Return whether a caller may watch a URI or pattern."""
        if is_pattern(uri) and not self.authorization.allows_patterns:
            return False
        return bool(await self.authorization.filter(principal, [uri]))

    def cursor(
        self, topics: Iterable[Topic], told: Mapping[Topic, Version | None] | None = None, as_of: int | None = None
    ) -> dict[str, Any]:
        """Return the cursor of a client that knows the present versions of these topics, or was last `told` others.

        Patterns have no version: a client that watches one knows what it matches as of a revision."""
        version_of = self.hub.notifications.version
        known: dict[Topic, Version | None] = {
            topic: version_of(topic) for topic in topics if isinstance(topic, Feature) or not is_pattern(topic)
        }
        for topic, version in (told or {}).items():
            if version is None or version.digest != version_of(topic).digest:
                known[topic] = version if version is not None and version.revision >= 0 else None
        return Cursor(self.epoch, known, as_of).as_json()

    def cursor_of(self, subscriber: Subscriber) -> Cursor:
        """Return the cursor of a subscriber, for a heartbeat."""
        as_of = self.hub.notifications.revision if subscriber.uris else None
        return Cursor(self.epoch, self.hub.known_versions(subscriber), as_of)

    def _read_options(
        self, meta: object, capabilities: object, principal: Principal | None, owner: Owner
    ) -> ListenOptions:
        options = ListenOptions(meta, capabilities)
        options.grant(self.hub, self._terms_of(principal), self._remembered(options, owner).terms)
        return options

    def _remembered(self, options: ListenOptions, owner: Owner) -> DurableSubscription:
        """Return the durable subscription that a client names; an empty one if it does not exist."""
        name = options.durable_name
        known = self.durables.get((owner, name)) if name is not None else None
        return known or _NO_DURABLE

    def _terms_of(self, principal: Principal | None) -> Terms | None:
        if self._terms is None:
            return None
        try:
            terms = self._terms(principal)
            if terms is not None:
                terms.policy(self.policy)
            return terms
        except Exception:  # the user's function; the caller gets the defaults
            self.hub.counts.failures["terms"] += 1
            logger.exception("terms() failed for %r; using the defaults", principal)
            return None

    def _compile_patterns(self, uris: Iterable[str]) -> dict[str, Match]:
        """Return the valid patterns among some URIs, compiled."""
        matches: dict[str, Match] = {}
        for uri in filter(is_pattern, uris) if self.authorization.allows_patterns else ():
            with suppress(InvalidPattern):
                matches[uri] = self.hub.index.compile_pattern(uri)
        return matches


_NO_DURABLE = DurableSubscription(name="")


class PreparedSubscription:
    """A subscription that was checked and authorized, to be acknowledged and opened."""

    __slots__ = (
        "_connection",
        "_is_acknowledged",
        "_owner",
        "_resumed",
        "_resumed_uris",
        "_subscriptions",
        "granted",
        "is_authorized",
        "options",
        "principal",
        "slot",
    )

    def __init__(
        self,
        subscriptions: Subscriptions,
        options: ListenOptions,
        granted: GrantedTopics,
        principal: Principal | None,
        owner: Owner,
        slot: StreamSlot,
    ) -> None:
        self._subscriptions = subscriptions
        self._owner = owner
        self._connection: DurableConnection | None = None
        self._is_acknowledged = False
        self._resumed: Resumed | None = None
        """The versions in the acknowledgement, kept for `subscribe`."""
        self._resumed_uris: set[str] = set()
        self.options = options
        self.granted = granted
        self.principal = principal
        self.is_authorized = subscriptions.authorization.predicate(principal) if owner != SERVER else None
        """Whether the client may be notified of a URI that it did not name itself."""
        self.slot = slot

    def frame_format(self, *, is_sse: bool = False, is_tagged: bool = False) -> FrameFormat:
        subscriptions = self._subscriptions
        return self.options.frame_format(subscriptions.policy, subscriptions.epoch, is_sse=is_sse, is_tagged=is_tagged)

    def connect(self, end: Callable[[], None], terms: Mapping[str, Any] | None = None) -> None:
        """Take over the durable subscription that the client names, if it names one.

        `end` is called on the event loop when another connection takes it over from this one. `terms` are to be
        remembered, by default those that were granted."""
        options, subscriptions = self.options, self._subscriptions
        if options.durable is ABSENT or subscriptions.is_stopping:
            return
        if terms is None:
            terms = options.terms.as_json() if options.has_terms else {}
        self._connection = subscriptions.durables.connect(
            options.durable,
            self._owner,
            self.granted.features,
            self.granted.uris,
            terms,
            partial(subscriptions.bridge.call, end),
        )

    @property
    def expires_at(self) -> int | None:
        """When the caller's token expires."""
        return self.principal.expires_at if self.principal is not None else None

    @property
    def is_durable(self) -> bool:
        return self._connection is not None

    def acknowledge(self, end: Callable[[], None], *, is_session: bool = False) -> dict[str, Any]:
        """Return the `_meta` of the acknowledgement: the client's cursor, and what was granted of its options.

        Take over the durable subscription before: see `connect`. A legacy session gets an acknowledgement only if it
        gave options, and keeps its durable subscription even if it watches no list, because it may add URIs."""
        self.publish_earlier()
        if self.granted or is_session:
            self.connect(end)
        if is_session and not self.options.uses_extension:
            return {}
        self._is_acknowledged = True
        topics = self.granted.topics
        self._resumed = self._resume(topics)
        told, refetch = self._resumed
        # The cursor has the versions before the notifications that follow, because the stream may break before them.
        cursor = self._subscriptions.cursor(topics, told, self._as_of(topics, is_session))
        meta: dict[str, Any] = {CURSOR_KEY: cursor}
        if refetch:
            meta[REFETCH_KEY] = refetch
        if self._connection is not None:
            meta[DURABLE_KEY] = self._connection.ack
        if self.options.has_terms:
            meta[FILTER_KEY] = self.options.terms.as_json()
        if self.expires_at is not None and not is_session:
            meta[AUTHORIZED_UNTIL_KEY] = iso_time(self.expires_at)
        return meta

    def subscribe(
        self,
        deliver: Deliver,
        *,
        label: str,
        kind: ConnectionKind,
        on_close: OnClose | None = None,
        is_muted: IsMuted | None = None,
        is_ready: bool = True,
        merges_on_overflow: bool = False,
        confirms: bool = False,
        announces: bool = False,
    ) -> Subscriber:
        """Open a subscriber that watches the granted topics. It may be closed already: it missed too much.

        It gets no notification before `hub.wake(subscriber)` unless it `is_ready`. With `merges_on_overflow`, too many
        pending contents become one change of the list instead of closing it. `confirms` says that the transport knows
        when a notification was received. With `announces`, it is notified of each list once."""
        options, granted, hub = self.options, self.granted, self._subscriptions.hub
        subscriber = hub.open(
            deliver,
            label=label,
            kind=kind,
            settings=options.settings,
            filter=options.filter,
            is_muted=is_muted,
            on_close=on_close,
        )
        subscriber.is_authorized = self.is_authorized
        subscriber.merges_on_overflow = merges_on_overflow
        if not is_ready:
            subscriber.pause()
        if self._connection is not None:
            self._connection.attach(subscriber, confirms_receipt=confirms)
        try:
            told = self._told(granted.topics)
            if announces:
                announced: dict[Topic, Version | None] = dict.fromkeys(granted.features)
                told = announced | (told or {})
            return hub.subscribe(subscriber, *granted.features, uris=granted.uris, told=told, matches=granted.matches)
        except BaseException:
            hub.close(subscriber, Reason.DISCONNECTED)
            self.slot.release()
            raise

    async def renew_authorization(self, subscriber: Subscriber, principal: Principal | None) -> None:
        """Use the rights of the present token of a legacy session. If it is another principal, or has other scopes, end
        the subscriptions that `authorize` refuses."""
        is_changed = principal != self.principal
        self.principal = principal
        self.is_authorized = subscriber.is_authorized = self._subscriptions.authorization.predicate(principal)
        if is_changed:
            await self._subscriptions.authorized_streams.check(subscriber)

    def notify_again(self, subscriber: Subscriber, told: Mapping[Topic, Version | None], uris: Iterable[str]) -> None:
        """Notify the subscriber of a legacy session again of what its client has not read.

        `told` are the versions that the client has read, and `uris` the subscriptions that ended since then. Raise
        `LimitReached` if these would be too many."""
        hub = self._subscriptions.hub
        # The client may have fetched other versions since then.
        hub.subscribe(subscriber, uris=uris, told=hub.notifications.without_outdated(told))

    def add_uri(self, subscriber: Subscriber, uri: str) -> dict[str, Any] | None:
        """Let the subscriber of a legacy session watch one more URI; return the `_meta` of the response.

        Raise `InvalidPattern` or `LimitReached`, and then change nothing."""
        self.publish_earlier()
        told, refetch = self._resume_uri(subscriber, uri)
        meta: dict[str, Any] = {CURSOR_KEY: self._subscriptions.cursor([uri], told)}
        if refetch:
            meta[REFETCH_KEY] = refetch
        self.slot.watch({**(subscriber.uris or {}), uri: None})
        try:
            self._subscriptions.hub.subscribe(subscriber, uris=[uri], told=told)
        except BaseException:
            self.slot.watch(subscriber.uris or ())
            raise
        self.save()
        return meta if self.options.uses_extension else None

    def remove_uri(self, subscriber: Subscriber, uri: str) -> None:
        self._subscriptions.hub.unsubscribe(subscriber, uris=[uri])
        self.slot.watch(subscriber.uris or ())
        self.save()

    def save(self) -> None:
        """Save the durable subscription: the client watches other URIs, or has confirmed a notification."""
        if self._connection is not None:
            self._connection.save()

    def publish_earlier(self) -> None:
        """Publish the earlier commits of this turn of the event loop: a new subscription must not get them.

        Not after the acknowledgement: it must get what another thread commits since then."""
        self._subscriptions.bridge.publish_queued()

    def _told(self, topics: list[Topic]) -> dict[Topic, Version | None] | None:
        """Return the versions that the client was told last, if it returns."""
        if self._connection is not None and not self._is_acknowledged:
            return self._connection.told()
        is_returning = self.options.resume is not ABSENT or self._connection is not None
        resumed, self._resumed = self._resumed, None
        return (resumed or self._resume(topics)).told if is_returning else None

    def _resume(self, topics: list[Topic]) -> Resumed:
        """Return the versions that the client knows, from its cursor and from its durable subscription."""
        by_cursor = self._resume_by_cursor(topics)
        if self._connection is None:
            return by_cursor
        remembered = self._connection.resumed(self.is_authorized)
        refetch = tuple(dict.fromkeys((*by_cursor.refetch, *remembered.refetch)))
        return Resumed({**remembered.told, **by_cursor.told}, refetch)

    def _resume_by_cursor(self, topics: list[Topic]) -> Resumed:
        if self.options.resume is ABSENT:
            return Resumed({})
        subscriptions = self._subscriptions
        return resume(
            self.options.resume,
            subscriptions.epoch,
            subscriptions.hub,
            topics,
            self.is_authorized,
            matches=self.granted.matches,
            priorities=len(self.options.settings.priorities),
        )

    def _resume_uri(self, subscriber: Subscriber, uri: str) -> Resumed:
        """Return what a session knows of a URI that it subscribes to after the handshake. Leave out the resources that
        it already watches: the hub has their versions."""
        told, refetch = self._resume_by_cursor([uri])
        watched = self._subscriptions.hub.index.watched(subscriber.uris or {}, self.is_authorized)
        known = self._resumed_uris
        new = {topic: told[topic] for topic in told if topic not in known and str(topic) not in watched}
        is_new = uri not in known and uri not in watched
        known |= {uri, *map(str, new)}
        return Resumed(new, refetch if is_new else ())

    def _as_of(self, topics: list[Topic], is_session: bool) -> int | None:
        """Return the revision as of which the client knows the contents that it does not name."""
        revision = self._subscriptions.hub.notifications.revision
        if not is_session:
            return None if all(isinstance(topic, Feature) for topic in topics) else revision
        # A session subscribes to contents later, and may end before.
        cursor = Cursor.parse(self.options.resume)
        if cursor is None or cursor.epoch != self._subscriptions.epoch or cursor.as_of is None:
            return revision
        return cursor.as_of
