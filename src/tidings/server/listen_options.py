"""What a client asks for beyond the specification: to go on from a cursor or under a name, and how it wants to be told.

It asks in the `_meta` of `subscriptions/listen`, or of `initialize`. A client whose SDK lets it put nothing there (the
Python SDK's `Client` for one) says the same in its settings of the extension: `capabilities.extensions` (or, legacy,
`experimental`) with `{"dev.tidings/changes": {"resume": …, "filter": …, "durable": …}}`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tidings.core.cursor import Cursor
from tidings.core.filters import Terms
from tidings.core.frames import CURSOR_KEY, DURABLE_KEY, EXTENSION, FILTER_KEY, REFETCH_KEY, RESUME_KEY, FrameFormat
from tidings.core.model import Feature, Topic, Version
from tidings.core.resume import Resumed, resume, watch_predicate
from tidings.core.subscriber import Subscriber
from tidings.store.durable import Owner
from tidings.store.durable_connection import DurableConnection

if TYPE_CHECKING:
    from tidings.live import Live
    from tidings.server.authorization import Principal

__all__ = ["ListenOptions", "from_any_thread"]

_ABSENT: Any = object()
_NO_TERMS = Terms()


class ListenOptions:
    """What one client asks for, as far as it is honoured."""

    __slots__ = (
        "_durable",
        "_live",
        "_once",
        "_owner",
        "_resume",
        "_says_terms",
        "_visit",
        "filter",
        "is_extended",
        "may",
        "policy",
        "terms",
    )

    def __init__(self, live: Live, meta: object, capabilities: object, principal: Principal | None) -> None:
        """`meta` and `capabilities` are the client's: any JSON at all, or nothing."""
        asked = meta if isinstance(meta, Mapping) else {}
        settings = _settings(capabilities)
        self.is_extended = settings is not None
        """Whether the client declared `dev.tidings/changes`."""
        self._live = live
        self.may = live.gate.predicate(principal)
        """Whether the client may be told of a resource that it did not name itself."""
        self._once: set[str] = set()
        """What a session has come back to."""
        self._resume = asked.get(RESUME_KEY, (settings or {}).get("resume", _ABSENT))
        self._durable = asked.get(DURABLE_KEY, (settings or {}).get("durable", _ABSENT))
        self._owner: Owner = principal.who if principal is not None else None
        self._visit: DurableConnection | None = None
        kept = live.durables.terms(self._durable, self._owner) or _ABSENT
        wanted = asked.get(FILTER_KEY, (settings or {}).get("filter", kept))
        bounds = live.terms_of(principal)
        self._says_terms = wanted is not _ABSENT or bounds is not None
        if not self._says_terms:
            self.terms, self.filter, self.policy = _NO_TERMS, None, live.policy
            return
        self.terms = Terms.parse(wanted, live.policy)
        self.filter = self.terms.filter
        if bounds is not None:
            # Both filters count, also where both name patterns, which no single list of patterns could say.
            self.filter = self.filter.narrowed(bounds.filter) if self.filter else bounds.filter
            self.terms = self.terms.within(bounds, live.policy)
        self.policy = self.terms.policy(live.policy)

    def shape(self, *, is_sse: bool = False, is_tagged: bool = False) -> FrameFormat:
        policy, is_brief = self.policy, self.terms.detail in ("summary", "none")
        most, epoch = policy.max_changes_per_frame, self._live.epoch
        return FrameFormat(policy.detail, most, is_sse, is_tagged, self.is_extended, epoch, is_brief)

    @property
    def is_special(self) -> bool:
        """Whether the client knows of any of this, and will look for an answer."""
        return self.is_extended or self._says_terms or self._resume is not _ABSENT or self._durable is not _ABSENT

    @property
    def kept_uris(self) -> tuple[str, ...]:
        """What the durable subscription that is asked for watches already. A session's is nowhere else."""
        name = self._durable.get("name") if isinstance(self._durable, Mapping) else None
        known = self._live.durables.get((self._owner, name)) if isinstance(name, str) else None
        return known.uris if known is not None else ()

    def enter(self, topics: Iterable[Topic], end: Callable[[], None]) -> None:
        """Take the durable subscription that is asked for, if any is. `end` is called when somebody else takes it."""
        if self._durable is _ABSENT or self._live.is_stopping:
            return
        topics = list(topics)
        features = [topic for topic in topics if isinstance(topic, Feature)]
        uris = [topic for topic in topics if not isinstance(topic, Feature)]
        self._visit = self._live.durables.connect(
            self._durable,
            self._owner,
            features,
            uris,
            self.terms.as_json() if self._says_terms else {},
            from_any_thread(end),
        )

    def watch(self, subscriber: Subscriber) -> None:
        """Let the durable subscription remember what this subscriber is told."""
        if self._visit is not None:
            self._visit.attach(subscriber)

    def keep(self) -> None:
        """A session watches something else than before: let its durable subscription know, whether or not it is told
        anything."""
        if self._visit is not None:
            self._visit.save()

    def told(self, topics: Iterable[Topic]) -> dict[Topic, Version | None] | None:
        """What the client was told last of what it watches, if it comes back: for `hub.subscribe(told=…)`."""
        return self._resumed(topics).told if self._comes_back else None

    def told_once(self, uri: str, subscriber: Subscriber) -> Resumed:
        """Where a session stands that subscribes to contents later. What it watches already, the hub knows better."""
        told, refetch = self._by_cursor([uri])
        is_watched = watch_predicate(subscriber.uris or (), self._live.hub, self.may)
        new = {topic: told[topic] for topic in told if topic not in self._once and not is_watched(str(topic))}
        is_new = uri not in self._once and not is_watched(uri)
        self._once |= {uri, *map(str, new)}
        return Resumed(new, refetch if is_new else ())

    def acknowledged(self, topics: Iterable[Topic], *, is_session: bool = False) -> dict[str, Any]:
        """What the `_meta` of the acknowledgement says: where the client stands, and what was honoured."""
        topics = list(topics)
        told, refetch = self._resumed(topics)
        # What it is about to be told, it does not know yet: its stream may break before.
        said: dict[str, Any] = {CURSOR_KEY: self._live.cursor(topics, told, self._as_of(topics, is_session))}
        if refetch:
            said[REFETCH_KEY] = refetch
        if self._visit is not None:
            said[DURABLE_KEY] = self._visit.ack
        return said | {FILTER_KEY: self.terms.as_json()} if self._says_terms else said

    @property
    def _comes_back(self) -> bool:
        return self._resume is not _ABSENT or self._visit is not None

    def _as_of(self, topics: list[Topic], is_session: bool) -> int | None:
        if not is_session:
            return (
                None if all(isinstance(topic, Feature) for topic in topics) else self._live.hub.notifications.revision
            )
        # It comes to what it watches only later, and may leave before.
        cursor = Cursor.parse(self._resume)
        is_ours = cursor is not None and cursor.epoch == self._live.epoch
        return (
            cursor.as_of if cursor and is_ours and cursor.as_of is not None else self._live.hub.notifications.revision
        )

    def _resumed(self, topics: Iterable[Topic]) -> Resumed:
        """By the cursor, and else by what is remembered under the durable name."""
        said = self._by_cursor(topics)
        if self._visit is None:
            return said
        kept = self._visit.resumed(self.may)
        return Resumed({**kept.told, **said.told}, tuple(dict.fromkeys((*said.refetch, *kept.refetch))))

    def _by_cursor(self, topics: Iterable[Topic]) -> Resumed:
        if self._resume is _ABSENT:
            return Resumed({})
        return resume(self._resume, self._live.epoch, self._live.hub, topics, self.may)


def from_any_thread(end: Callable[[], None]) -> Callable[[], None]:
    """How to end, from whatever thread, what lives on this event loop: on this one at once, from another one soon."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def end_there() -> None:
        if threading.get_ident() == thread:
            end()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(end)

    return end_there


def _settings(capabilities: object) -> Mapping[str, Any] | None:
    """Those of the extension; None if the client did not declare it."""
    if not isinstance(capabilities, Mapping):
        return None
    for declared in (capabilities.get("extensions"), capabilities.get("experimental")):
        if isinstance(declared, Mapping) and EXTENSION in declared:
            return declared[EXTENSION] if isinstance(declared[EXTENSION], Mapping) else {}
    return None
