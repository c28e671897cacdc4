"""Subscriptions that outlive their connection, and with a store their server.

A durable subscription has a name that its client chose, bound to the client's principal. It keeps what it watches, on
which terms, and what it was last told; whoever comes back under its name is told what differs. It is forgotten after a
time without its client. Not a queue: like every subscriber it remembers versions, and no events.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import structs

from tidings.errors import InvalidPattern, LimitReached
from tidings.model import Feature, Notification, Topic, Version
from tidings.patterns import compile_pattern, is_pattern
from tidings.subscriber import Subscriber

if TYPE_CHECKING:
    from tidings.hub import Hub

__all__ = ["SERVER", "Durable", "Durables", "Key", "Owner", "Visit", "Webhook"]

logger = logging.getLogger(__name__)

Owner: TypeAlias = tuple[str, str | None] | None
"""Whose it is: `Principal.who`, or None where nobody has to say who they are."""

SERVER: Owner = ("", "")
"""Of those that the server's own code has put, or whoever runs it: no caller's, so that none can take them over."""

Key: TypeAlias = tuple[Owner, str]
"""Owner and name."""


class Webhook(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a durable subscription is delivered to without a stream, and how that goes."""

    url: str
    secret: str
    """One, or several with spaces between them while one takes the place of another."""
    scopes: tuple[str, ...] = ()
    """What its owner's token allowed when it was put: `authorize` is asked again at every start."""
    attempts: int = 0
    """How many in a row have failed."""
    next_attempt: float | None = None
    last_success: float | None = None
    last_error: str | None = None
    is_dead: bool = False
    """Given up: nothing is sent until somebody puts the subscription anew."""

    def revived(self) -> Webhook:
        return structs.replace(self, attempts=0, next_attempt=None, is_dead=False)


class Durable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One durable subscription as it is kept. Times are the catalog's, in seconds since 1970."""

    name: str
    owner: Owner = None
    features: tuple[Feature, ...] = ()
    uris: tuple[str, ...] = ()
    """URIs and patterns."""
    terms: dict[str, Any] = {}
    """What was honoured of `dev.tidings/filter`, in the wire's own words."""
    as_of: int = 0
    """The revision as of which it knows everything that it watches, but for the following."""
    lists: dict[Feature, Version | None] = {}
    """What it was last told of each list; None for never."""
    contents: dict[str, Version | None] = {}
    """The same of contents, where `as_of` does not say it."""
    ttl: float = 0.0
    created: float = 0.0
    expires: float | None = None
    """None while its client is there."""
    webhook: Webhook | None = None

    @property
    def told(self) -> dict[Topic, Version | None]:
        told: dict[Topic, Version | None] = {}
        told.update(self.lists.items())
        told.update(self.contents.items())
        return told

    @property
    def key(self) -> Key:
        return (self.owner, self.name)


_MOST_NAME = 256
"""Characters of a name: a client chooses it."""

_MOST_CONTENTS = 256
"""Watched URIs whose version is kept by itself. Of more, `as_of` and the journal know enough; at worst one is told of a
content that came to be what it was before."""

_SLICE = 64
"""Subscriptions that are looked at without letting others at the hub."""

Sink: TypeAlias = Callable[[Key, Durable | None], None]


class Durables:
    """The durable subscriptions of one hub, connected or not. Shares its lock, so it may be used from any thread."""

    def __init__(self, hub: Hub, kept: Iterable[Durable] = (), *, rouse: Callable[[], None] | None = None) -> None:
        """`kept` is what an earlier life left; `rouse` is called when there is something to `collect`."""
        self.hub = hub
        self.rouse = rouse
        self._lock = hub.catalog.lock
        self._now = hub.catalog.now
        self._kept: dict[Key, Durable] = {}
        self._owned: Counter[Owner] = Counter()
        self._visits: dict[Key, Visit] = {}
        self._marked: dict[Key, None] = {}
        """What is to be collected."""
        self._sinks: list[Sink] = []
        self._next_expiry = 0.0
        for durable in kept:
            # Whose client was there when the server ended gets its whole time to come back.
            expires = self._now() + durable.ttl if durable.expires is None else durable.expires
            self._set(structs.replace(durable, expires=expires))

    # Asking

    def all(self, owner: Owner | EllipsisType = ...) -> list[Durable]:
        """Those of one owner, or of all, in the order of their names."""
        with self._lock:
            self._expire()
            found = [each for each in self._kept.values() if owner is ... or each.owner == owner]
            return sorted(found, key=lambda each: (each.name, each.owner or ("", None)))

    def get(self, key: Key) -> Durable | None:
        with self._lock:
            self._expire()
            return self._kept.get(key)

    def is_connected(self, key: Key) -> bool:
        with self._lock:
            return key in self._visits

    def __len__(self) -> int:
        return len(self._kept)

    def follow(self, sink: Sink) -> Callable[[], None]:
        """Call `sink` with each one that is put or removed (None), by whomever; returns how to stop it."""
        self._sinks.append(sink)
        return lambda: self._sinks.remove(sink) if sink in self._sinks else None

    # Changing

    def put(self, durable: Durable) -> Durable:
        """Set one, new or not. A new one knows everything as of now. Raises `LimitReached`."""
        with self._lock:
            self._expire()
            known = self._kept.get(durable.key)
            if known is None:
                self._check_limits(durable.owner)
                durable = self._begun(durable)
            else:
                durable = self._carried_on(known, durable)
            self._set(durable)
            self._mark(durable.key)
            self._tell(durable.key, durable)
            return durable

    def change(self, key: Key, **fields: Any) -> Durable | None:
        """Change some fields of one that is there."""
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                return None
            durable = structs.replace(known, **fields)
            self._set(durable)
            self._mark(key)
            return durable

    def remove(self, key: Key) -> bool:
        """Forget one, and end its connection; whether there was one."""
        with self._lock:
            visit = self._visits.pop(key, None)
            if visit is not None:
                visit.let_go()
            if self._kept.pop(key, None) is None:
                return False
            self._owned[key[0]] -= 1
            self._mark(key)
            self._tell(key, None)
        if visit is not None:
            visit.end()
        return True

    # For lanes

    def terms(self, asked: Any, owner: Owner) -> dict[str, Any]:
        """The terms that the one that is asked for had, for a client that names none this time."""
        name = asked.get("name") if isinstance(asked, Mapping) else None
        known = self.get((owner, name)) if isinstance(name, str) else None
        return known.terms if known else {}

    def enter(
        self,
        asked: Any,
        owner: Owner,
        features: Iterable[Feature],
        uris: Iterable[str],
        terms: Mapping[str, Any],
        end: Callable[[], None],
    ) -> Visit | None:
        """A client is here, and asks (`{"name": …, "ttl": …}`, or anything at all) for its durable subscription; None
        if there can't be one. Whoever was here under the name before is ended: the newer connection has it."""
        name = asked.get("name") if isinstance(asked, Mapping) else None
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
            return None
        longest = self.hub.policy.durable_ttl
        ttl = asked.get("ttl")
        is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl >= 0
        fields: dict[str, Any] = {
            "features": tuple(features),
            "uris": tuple(uris),
            "terms": dict(terms),
            "ttl": min(float(ttl), longest) if is_number else longest,
            "expires": None,
        }
        key = (owner, name)
        with self._lock:
            self._expire()
            former = self._visits.pop(key, None)
            if former is not None:
                former.remember()
                former.let_go()
            known = self._kept.get(key)
            if known is None:
                try:
                    self._check_limits(owner)
                except LimitReached as error:
                    logger.warning("%r is not made durable: %s", name, error)
                    return None
                durable = self._begun(Durable(name=name, owner=owner, **fields))
            else:
                durable = self._carried_on(known, structs.replace(known, **fields))
            self._set(durable)
            visit = self._visits[key] = Visit(self, durable, known, end)
            self._mark(key)
        if former is not None:
            former.end()
        return visit

    # For a store

    def collect(self) -> dict[Key, Durable | None]:
        """What changed since the last time; None for what was removed. On any thread, and never long at a time."""
        found: dict[Key, Durable | None] = {}
        with self._lock:
            self._expire()
            marked = list(self._marked)
        for start in range(0, len(marked), _SLICE):
            with self._lock:
                for key in islice(marked, start, start + _SLICE):
                    visit = self._visits.get(key)
                    if visit is None or visit.remember():
                        self._marked.pop(key, None)
                    found[key] = self._kept.get(key)
        return found

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to collect that could not be yet: a reader still has to take it."""
        return bool(self._marked)

    # Inside

    def _begun(self, durable: Durable) -> Durable:
        """As one that knows everything as of now."""
        news = self.hub.news
        return structs.replace(
            durable,
            as_of=news.revision,
            lists={feature: news.version(feature) for feature in durable.features},
            contents={},
            created=durable.created or self._now(),
        )

    def _carried_on(self, known: Durable, durable: Durable) -> Durable:
        """With what the former one was told; what that did not watch is known as of now."""
        news = self.hub.news
        lists = {feature: known.lists.get(feature, news.version(feature)) for feature in durable.features}
        new = [uri for uri in durable.uris if uri not in known.uris and not is_pattern(uri)]
        contents = {uri: news.version(uri) for uri in new[:_MOST_CONTENTS]}
        return structs.replace(
            durable,
            as_of=known.as_of,
            lists=lists,
            contents={**contents, **known.contents},
            created=known.created,
        )

    def _set(self, durable: Durable) -> None:
        if durable.key not in self._kept:
            self._owned[durable.owner] += 1
        self._kept[durable.key] = durable
        if durable.expires is not None:
            self._next_expiry = min(self._next_expiry or durable.expires, durable.expires)

    def _mark(self, key: Key) -> None:
        self._marked[key] = None
        if self.rouse is not None:
            self.rouse()

    def _tell(self, key: Key, durable: Durable | None) -> None:
        for sink in tuple(self._sinks):
            try:
                sink(key, durable)
            except Exception:  # as a sink of the catalog
                logger.exception("a sink of the durable subscriptions failed; going on")

    def _check_limits(self, owner: Owner) -> None:
        policy = self.hub.policy
        counts = {"max_durables": len(self._kept)}
        if owner is not None:
            counts["max_durables_per_principal"] = self._owned[owner]
        for name, count in counts.items():
            if count >= getattr(policy, name):
                raise LimitReached(
                    f"there are {count} durable subscriptions; Policy.{name} allows {getattr(policy, name)}"
                )

    def _expire(self) -> None:
        now = self._now()
        if not self._next_expiry or now < self._next_expiry:
            return
        for key, each in list(self._kept.items()):
            if each.expires is not None and each.expires <= now:
                logger.info("the durable subscription %r has expired", each.name)
                self.remove(key)
        ends = [each.expires for each in self._kept.values() if each.expires is not None]
        self._next_expiry = min(ends, default=0.0)


class Visit:
    """One connection under a durable name."""

    def __init__(self, durables: Durables, durable: Durable, known: Durable | None, end: Callable[[], None]) -> None:
        self.key = durable.key
        self.ack = {"name": durable.name, "ttl": durable.ttl, "isNew": known is None}
        self.end = end
        """Ends the connection, gracefully where its lane can."""
        self._durables = durables
        self._former = known
        self._subscriber: Subscriber | None = None

    def watch(self, subscriber: Subscriber) -> None:
        """Remember from now on what this subscriber is told. Before it subscribes, so that nothing is missed."""
        self._subscriber = subscriber
        subscriber.keeper = self._leave
        deliver, mark, key = subscriber.deliver, self._durables._mark, self.key

        def deliver_and_mark(notification: Notification) -> object:
            mark(key)
            return deliver(notification)

        subscriber.deliver = deliver_and_mark

    def told(self, resume: Mapping[Topic, Version | None] | None = None) -> dict[Topic, Version | None]:
        """What the client was last told of what it watches, for `hub.subscribe`. What it says itself counts more."""
        durables = self._durables
        with durables._lock:
            durable = durables._kept.get(self.key)
            told = {} if durable is None or self._former is None else self._missed(durable, self._former)
        return {**told, **(resume or {})}

    def _missed(self, durable: Durable, former: Durable) -> dict[Topic, Version | None]:
        hub = self._durables.hub
        told = durable.told
        was_watched = _watched(former.uris, hub) if former.uris != durable.uris else None
        newer = hub.news.contents_since(durable.as_of)
        if not durable.uris or not newer:
            return told
        first: dict[str, Version] = {}
        changes = hub.journal.contents_since(durable.as_of)
        for change in changes or ():
            first.setdefault(change.key, change.previous)
        room = hub.policy.max_pending - len(told)
        for uri in newer:
            if uri not in told and (was_watched is None or was_watched(uri)):
                if room <= 0:
                    logger.warning("%r has missed more than Policy.max_pending allows to tell", durable.name)
                    break
                room -= 1
                told[uri] = first.get(uri)
        return told

    def remember(self) -> bool:
        """Take in what the subscriber knows now. False if it may not have read yet what it was told last: then nothing
        is taken in, and what is on its way counts as not told."""
        durables, subscriber = self._durables, self._subscriber
        durable = durables._kept.get(self.key)
        if subscriber is None or durable is None:
            return True
        if not subscriber.is_ready:
            return False
        hub = durables.hub
        named = [uri for uri in subscriber.uris or () if not is_pattern(uri)]
        contents: dict[str, Version | None] = {}
        for uri in named[:_MOST_CONTENTS]:
            if (version := hub.told(subscriber, uri)) is None or version.revision > 0:
                contents[uri] = version
        for topic, entry in (subscriber.mailbox.entries if subscriber.mailbox else {}).items():
            if not isinstance(topic, Feature):
                contents[topic] = entry.told
        durables._set(
            structs.replace(
                durable,
                features=tuple(feature for feature in Feature if feature in subscriber.features),
                uris=tuple(subscriber.uris or ()),
                as_of=hub.news.revision,
                lists={feature: hub.told(subscriber, feature) for feature in subscriber.features},
                contents=contents,
            )
        )
        return True

    def let_go(self) -> None:
        """The name is somebody else's now, or nobody's."""
        if self._subscriber is not None:
            self._subscriber.keeper = None
            self._subscriber = None

    def _leave(self, subscriber: Subscriber) -> None:
        """The connection ends."""
        self.remember()
        self.let_go()
        durables = self._durables
        if durables._visits.get(self.key) is self:
            del durables._visits[self.key]
            durable = durables._kept.get(self.key)
            if durable is not None:
                durables.change(self.key, expires=durables._now() + durable.ttl)


def _watched(uris: Sequence[str], hub: Hub) -> Callable[[str], bool]:
    """Whether a resource was watched by any of these."""
    exact = frozenset(uris)
    folders = tuple(uri if uri.endswith("/") else f"{uri}/" for uri in exact) if hub.policy.subresources else ()
    matches = []
    for uri in uris:
        if is_pattern(uri):
            try:
                matches.append(compile_pattern(uri, hub.templates))
            except InvalidPattern:
                continue  # of a server that knew other patterns

    def is_watched(uri: str) -> bool:
        return uri in exact or uri.startswith(folders) or any(match(uri) for match in matches)

    return is_watched
