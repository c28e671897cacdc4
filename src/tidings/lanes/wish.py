"""What a client asks for beyond the specification: to go on from a cursor, and how it wants to be told.

It asks in the `_meta` of `subscriptions/listen`, or of `initialize`. A client whose SDK lets it put nothing there (the
Python SDK's `Client` for one) says the same in its settings of the extension: `capabilities.extensions` (or, legacy,
`experimental`) with `{"dev.tidings/changes": {"resume": …, "filter": …}}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tidings.cursor import told_by
from tidings.frames import CURSOR_KEY, EXTENSION, FILTER_KEY, RESUME_KEY, Shape
from tidings.model import Topic, Version
from tidings.terms import Terms

if TYPE_CHECKING:
    from tidings.gate import Principal
    from tidings.live import Live

__all__ = ["Wish"]

_ABSENT: Any = object()


class Wish:
    """What one client asks for, as far as it is honoured."""

    __slots__ = ("_later", "_live", "_resume", "_says_terms", "filter", "is_extended", "policy", "terms")

    def __init__(self, live: Live, meta: object, capabilities: object, principal: Principal | None) -> None:
        """`meta` and `capabilities` are the client's: any JSON at all, or nothing."""
        asked = meta if isinstance(meta, Mapping) else {}
        settings = _settings(capabilities)
        self.is_extended = settings is not None
        """Whether the client declared `dev.tidings/changes`."""
        self._live = live
        self._later: dict[Topic, Version | None] | None = None
        self._resume = asked.get(RESUME_KEY, (settings or {}).get("resume", _ABSENT))
        wanted = asked.get(FILTER_KEY, (settings or {}).get("filter", _ABSENT))
        bounds = live.terms_of(principal)
        self._says_terms = wanted is not _ABSENT or bounds is not None
        self.terms = Terms.parse(wanted, live.policy)
        self.filter = self.terms.filter
        if bounds is not None:
            # Both filters count, also where both name patterns, which no single list of patterns could say.
            self.filter = self.filter.narrowed(bounds.filter) if self.filter else bounds.filter
            self.terms = self.terms.within(bounds, live.policy)
        self.policy = self.terms.policy(live.policy)

    def shape(self, *, is_sse: bool = False, is_tagged: bool = False) -> Shape:
        policy = self.policy
        return Shape(policy.detail, policy.max_changes_per_frame, is_sse, is_tagged, self.is_extended, self._live.epoch)

    @property
    def is_special(self) -> bool:
        """Whether the client knows of any of this, and will look for an answer."""
        return self.is_extended or self._says_terms or self._resume is not _ABSENT

    def told(self, topics: Iterable[Topic]) -> dict[Topic, Version | None] | None:
        """What the client was told last of what it watches, if it comes back: for `hub.subscribe(told=…)`."""
        return told_by(self._resume, self._live.epoch, topics) if self._resume is not _ABSENT else None

    def told_once(self, uri: str) -> dict[Topic, Version | None]:
        """The same for a content that a session subscribes to later: afterwards, the hub knows better."""
        if self._later is None:
            told = self.told(()) or {}
            self._later = {topic: told[topic] for topic in told if isinstance(topic, str)}
        return {uri: self._later.pop(uri)} if uri in self._later else {}

    def acknowledged(self, topics: Iterable[Topic]) -> dict[str, Any]:
        """What the `_meta` of the acknowledgement says: where the client stands, and what was honoured."""
        topics = list(topics)
        # What it is about to be told, it does not know yet: its stream may break before.
        said: dict[str, Any] = {CURSOR_KEY: self._live.cursor(topics, self.told(topics))}
        return said | {FILTER_KEY: self.terms.as_json()} if self._says_terms else said


def _settings(capabilities: object) -> Mapping[str, Any] | None:
    """Those of the extension; None if the client did not declare it."""
    if not isinstance(capabilities, Mapping):
        return None
    for declared in (capabilities.get("extensions"), capabilities.get("experimental")):
        if isinstance(declared, Mapping) and EXTENSION in declared:
            return declared[EXTENSION] if isinstance(declared[EXTENSION], Mapping) else {}
    return None
