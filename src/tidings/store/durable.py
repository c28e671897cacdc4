"""Subscriptions that outlive their connection, and with a store their server.

A durable subscription has a name that its client chose, bound to the client's principal. It keeps what it watches, on
which terms, and what it was last told; whoever comes back under its name is told what differs. It is forgotten after a
time without its client. Not a queue: like every subscriber it remembers versions, and no events.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import structs

from tidings.core.index import check_limit
from tidings.core.model import Feature, Topic, Version
from tidings.core.patterns import compile_pattern, is_pattern
from tidings.core.resume import Resumed, contents_changed, resume_from_store, watch_predicate
from tidings.errors import LimitReached, TidingsError

if TYPE_CHECKING:
    from tidings.core.hub import Hub
    from tidings.store.durable_connection import DurableConnection

__all__ = ["MOST_CONTENTS", "SERVER", "DurableSubscription", "DurableSubscriptions", "Key", "Owner", "Webhook"]

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
    refetch: tuple[str, ...] = ()
    """URIs and patterns of which it missed more than anybody knows, and was not told so yet: it last was then."""
    last_refetch: float | None = None

    def revived(self) -> Webhook:
        return structs.replace(self, attempts=0, next_attempt=None, is_dead=False)


class DurableSubscription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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

MOST_CONTENTS = 256
"""Watched URIs whose version is kept by itself. Of more, `as_of` and the journal know enough; at worst one is told of a
content that came to be what it was before."""

_MOST_BYTES = 1 << 20
"""Of one as it is written: what it watches is up to its client too."""

_SLICE = 20_000
"""Topics of subscriptions that are looked at without letting others at the hub: about a millisecond."""

Sink: TypeAlias = Callable[[Key, DurableSubscription | None], None]


class DurableSubscriptions:
    """The durable subscriptions of one hub, connected or not. Shares its lock, so it may be used from any thread."""

    def __init__(
        self, hub: Hub, kept: Iterable[DurableSubscription] = (), *, rouse: Callable[[], bool] | None = None
    ) -> None:
        """`kept` is what an earlier life left; `rouse` is called when there is something to `collect`, and says whether
        somebody will."""
        self.hub = hub
        self.rouse = rouse
        self._lock = hub.catalog.lock
        self._now = hub.catalog.now
        self._kept: dict[Key, DurableSubscription] = {}
        self._owned: Counter[Owner] = Counter()
        self._visits: dict[Key, DurableConnection] = {}
        self._sinks: list[Sink] = []
        self._marked: dict[Key, bool] = {}
        """What is to be collected: for sure, or (False) if it is another one by then."""
        self._expected: dict[DurableConnection, None] = {}
        """Who was told something, which counts as read only after a while. Until then there is nothing to write: if the
        server died, all that changed after the last writing would be in doubt in any case."""
        self._next_turn = self._next_expiry = 0.0
        self._stored: set[Key] = set()  # whom the store knows
        self._unwritten: dict[
            Key, DurableSubscription | None
        ] = {}  # what was collected since the last that was written
        self._given: dict[Key, DurableSubscription | None] = {}  # what was collected last
        for durable in kept:
            self._stored.add(durable.key)
            if durable.expires is None:
                self._marked[durable.key] = True
            self._set(self._restored(durable))

    # Asking

    def all(self, owner: Owner | EllipsisType = ...) -> list[DurableSubscription]:
        """Those of one owner, or of all, in the order of their names."""
        with self._lock:
            self._expire()
            found = [each for each in self._kept.values() if owner is ... or each.owner == owner]
            return sorted(found, key=lambda each: (each.name, each.owner is not None, repr(each.owner)))

    def get(self, key: Key) -> DurableSubscription | None:
        with self._lock:
            self._expire()
            return self._kept.get(key)

    def is_connected(self, key: Key) -> bool:
        with self._lock:
            return key in self._visits

    def __len__(self) -> int:
        return len(self._kept)

    def expiry(self, durable: DurableSubscription) -> float | None:
        """When one is forgotten whose client leaves now. A webhook that is still tried is not: its receiver comes to
        nobody."""
        is_tried = durable.webhook is not None and not durable.webhook.is_dead
        return None if is_tried else self._now() + durable.ttl

    def follow(self, sink: Sink) -> Callable[[], None]:
        """Call `sink` with each one that is put or removed (None), by whomever; returns how to stop it."""
        self._sinks.append(sink)
        return lambda: self._sinks.remove(sink) if sink in self._sinks else None

    # Changing

    def put(self, durable: DurableSubscription) -> DurableSubscription:
        """Set one, new or not. A new one knows everything as of now. Whoever is here under the name, and watches
        something else, is ended. Raises `TidingsError` for one that can't be."""
        with self._lock:
            self._expire()
            self._check(durable)
            known = self._kept.get(durable.key)
            if known is None:
                self._check_limits(durable.owner)
                durable = self._begun(durable)
                former = None
            else:
                former, known = self._taken_over(known, durable)
                durable = self._carried_on(known, durable)
            if former is not None and durable.expires is None:
                durable = structs.replace(durable, expires=self.expiry(durable))
            self._set(durable)
            self._mark(durable.key)
            self._tell(durable.key, durable)
        if former is not None:
            former.end()
        return durable

    def change(self, key: Key, **fields: Any) -> DurableSubscription | None:
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
            self._unmark(key)
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
    ) -> DurableConnection | None:
        """A client is here, and asks (`{"name": …, "ttl": …}`, or anything at all) for its durable subscription; None
        if there can't be one. Whoever was here under the name before is ended: the newer connection has it."""
        from tidings.store.durable_connection import DurableConnection

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
            "ttl": float(min(ttl, longest)) if is_number else longest,
            "expires": None,
        }
        key = (owner, name)
        if (reason := _why_not_kept(DurableSubscription(name=name, owner=owner, **fields))) is not None:
            logger.warning("%r is not made durable: %s", name, reason)
            return None
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
                durable = self._begun(DurableSubscription(name=name, owner=owner, **fields))
            else:
                durable = self._carried_on(known, structs.replace(known, **fields))
            self._set(durable)
            visit = self._visits[key] = DurableConnection(self, durable, known, end)
            self._mark(key)
        if former is not None:
            former.end()
        return visit

    def missed(self, key: Key) -> Resumed:
        """Where one stands that nobody is here for."""
        with self._lock:
            durable = self._kept.get(key) or DurableSubscription(name=key[1])
            return resume_from_store(self.hub, durable.told, durable.uris, durable.as_of)

    def refetched(self, key: Key, as_of: int) -> None:
        """It was told, as of a revision, what to refetch. Of the rest it may still have to hear."""
        with self._lock:
            durable = self._kept.get(key)
            if durable is not None:
                rest = {uri: None for uri, version in durable.contents.items() if version is None}
                self.change(key, as_of=as_of, contents=rest)

    # For a store

    def collect(self, pause: Callable[[], object] | None = None) -> Mapping[Key, DurableSubscription | None]:
        """What changed since the last time that it was `written`; None for what was removed. On any thread, and never
        long at a time: `pause` is called in between, for whoever waits for the hub."""
        with self._lock:
            self._expire()
            if self._next_turn <= (now := self._now()):
                due = [visit.key for visit in self._expected if visit.turns_at <= now]
                self._marked = dict.fromkeys(due, False) | self._marked
                self._next_turn = min((visit.turns_at for visit in self._expected), default=math.inf)
            marked = iter(list(self._marked))
        while self._collect_some(marked):
            if pause is not None:
                pause()
        with self._lock:
            self._given = dict(self._unwritten)
        return self._given

    def written(self) -> None:
        """What was collected is written down."""
        given, self._given = self._given, {}
        with self._lock:
            for key, durable in given.items():
                if self._unwritten.get(key, ...) is durable:
                    del self._unwritten[key]
                (self._stored.discard if durable is None else self._stored.add)(key)
                if durable is not None and key not in self._kept:  # removed while it was being written
                    self._mark(key)

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to collect that is not settled yet: a reader may not have read it."""
        return bool(self._marked or self._expected)

    # Inside

    def _expect(self, visit: DurableConnection) -> None:
        """There will be something to collect. Who looks for others then need not be roused."""
        if self._expected or (self.rouse is not None and self.rouse()):
            self._expected[visit] = None
            self._next_turn = min(self._next_turn, visit.turns_at)

    def _collect_some(self, marked: Iterator[Key]) -> bool:
        """One slice; whether there may be more."""
        left = _SLICE
        with self._lock:
            for key in marked:
                if key not in self._marked:
                    continue  # made and removed meanwhile
                visit, before = self._visits.get(key), self._kept.get(key)
                is_settled = visit is None or visit.remember()
                now = self._kept.get(key)
                if self._marked[key] or now != before:
                    self._unwritten[key] = now
                self._marked[key] = False
                if is_settled or visit in self._expected:
                    del self._marked[key]
                left -= 64 + (len(now.uris) + len(now.contents) if now is not None else 0)
                if left <= 0:
                    return True
        return False

    def _taken_over(
        self, known: DurableSubscription, durable: DurableSubscription
    ) -> tuple[DurableConnection | None, DurableSubscription]:
        """Who has to go because the one it is here for becomes another; and what it was told until now."""
        former = self._visits.get(known.key)
        if former is None:
            return None, known
        former.remember()
        known = self._kept[known.key]
        if all(set(getattr(known, name)) == set(getattr(durable, name)) for name in ("features", "uris")) and (
            known.terms == durable.terms
        ):
            return None, known
        former.let_go()
        return self._visits.pop(known.key), known

    def _begun(self, durable: DurableSubscription) -> DurableSubscription:
        """As one that knows everything as of now."""
        notifications = self.hub.notifications
        return structs.replace(
            durable,
            as_of=notifications.revision,
            lists={feature: notifications.version(feature) for feature in durable.features},
            contents={},
            created=durable.created or self._now(),
        )

    def _restored(self, durable: DurableSubscription) -> DurableSubscription:
        """As it begins in this life."""
        if durable.webhook is None:
            return durable if durable.expires is not None else self._orphaned(durable)
        if durable.webhook.is_dead and durable.expires is not None:
            return durable
        # What it was told, it has confirmed.
        return structs.replace(durable, expires=self.expiry(durable))

    def _orphaned(self, durable: DurableSubscription) -> DurableSubscription:
        """Return a subscription whose client was connected when the server was killed, with its whole `ttl` left.

        The client may know of anything that changed after this was written, or not, even if all is now as it was: it
        has to refetch that. It may also hold a version that was never written, so no delta is sure to fit.
        """
        notifications = self.hub.notifications
        lists = {
            feature: Version(
                notifications.revision, told.digest
            )  # no change begins at this version, so there is no delta
            if told and told.digest == (now := notifications.version(feature)).digest and told.revision >= now.revision
            else None
            for feature, told in durable.lists.items()
        }
        contents = {
            uri: version if version == notifications.version(uri) else None for uri, version in durable.contents.items()
        }
        is_watched = watch_predicate(durable.uris, self.hub)
        newer = [uri for uri in notifications.contents_since(durable.as_of) if is_watched(uri)] if durable.uris else []
        contents |= dict.fromkeys(newer)
        return structs.replace(durable, lists=lists, contents=contents, expires=self.expiry(durable))

    def _carried_on(self, known: DurableSubscription, durable: DurableSubscription) -> DurableSubscription:
        """With what the former one was told; what that did not watch is known as of now."""
        notifications = self.hub.notifications
        lists = {feature: known.lists.get(feature, notifications.version(feature)) for feature in durable.features}
        as_of, contents = known.as_of, known.contents
        if not set(durable.uris) <= set(known.uris):
            since = contents_changed(self.hub, known.uris, as_of)
            if since is not None:  # else it has to refetch in any case
                as_of, contents = notifications.revision, {**since, **contents}
        is_watched = watch_predicate(durable.uris, self.hub)
        contents = {uri: version for uri, version in contents.items() if is_watched(uri)}
        return structs.replace(durable, as_of=as_of, lists=lists, contents=contents, created=known.created)

    def _set(self, durable: DurableSubscription) -> None:
        if durable.key not in self._kept:
            self._owned[durable.owner] += 1
        self._kept[durable.key] = durable
        if durable.expires is not None:
            self._next_expiry = min(self._next_expiry or durable.expires, durable.expires)

    def _mark(self, key: Key) -> None:
        if self.rouse is not None and self.rouse():
            self._marked[key] = True

    def _unmark(self, key: Key) -> None:
        """One was removed. Of one that was never written no more is noted, or names that come and go while the store
        is away would fill the memory."""
        if key in self._stored:
            self._mark(key)
        else:
            self._marked.pop(key, None)
            self._unwritten.pop(key, None)

    def _tell(self, key: Key, durable: DurableSubscription | None) -> None:
        for sink in tuple(self._sinks):
            try:
                sink(key, durable)
            except Exception:  # as a sink of the catalog
                logger.exception("a sink of the durable subscriptions failed; going on")

    def _check(self, durable: DurableSubscription) -> None:
        if not 0 < len(durable.name) <= _MOST_NAME:
            raise TidingsError(f"the name of a subscription has 1 to {_MOST_NAME} characters, not {len(durable.name)}")
        check_limit(self.hub.policy, None, list(durable.uris))
        for uri in filter(is_pattern, durable.uris):
            compile_pattern(uri, self.hub.templates)
        if (reason := _why_not_kept(durable)) is not None:
            raise TidingsError(f"the subscription {durable.name!r:.80} can't be kept: {reason}")

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
                self.hub.observer.expired(each.name)
                self.remove(key)
        ends = [each.expires for each in self._kept.values() if each.expires is not None]
        self._next_expiry = min(ends, default=0.0)


def _why_not_kept(durable: DurableSubscription) -> str | None:
    """Why a store could not write it; None if it could. Whatever a client says ends up in it."""
    try:
        size = len(msgspec.json.encode(durable))
    except UnicodeEncodeError:
        return "its name, a URI or a pattern has half a character in it, which UTF-8 can't write"
    return f"it has {size} bytes, and {_MOST_BYTES} are allowed; watch fewer URIs" if size > _MOST_BYTES else None
