"""Which versions of a topic somebody was shown: in a list, or in what was read of a resource.

Who was told A and finds A again needs no telling, unless its client has looked in between: then it holds B, and nothing
would ever say so. Over a stateless protocol nobody knows who it was that looked, so what was shown to anyone counts for
all. Only where silence would follow from equal content is this asked.

Not a log: of each topic the version that was shown last, and the last one before it with another digest. No more is
needed to know whether anything but a given content was shown after a revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tidings.core.model import Feature, Topic, Version

if TYPE_CHECKING:
    from tidings.core.observer import EventSink

__all__ = ["FetchedVersions"]

_MOST_CONTENTS = 4096
"""Contents of which it is known what was shown. Of those forgotten, it is taken that anything was."""


class FetchedVersions:
    def __init__(self, lock: AbstractContextManager[Any], begun: Mapping[Topic, int] | None = None) -> None:
        """What was shown before the revisions that this life has `begun` with, nobody knows."""
        self._lock = lock
        self._begun = begun or {}
        self._lists: dict[Topic, tuple[Version, Version | None]] = {}
        self._contents: dict[Topic, tuple[Version, Version | None]] = {}
        """In the order in which a new version was shown, so that the one longest unchanged is forgotten first."""
        self._forgotten = 0
        """The revision until which something may have been shown of contents that are forgotten."""
        self._in_progress: dict[Topic, list[int]] = {}
        """The revisions at which answers were begun that are not given yet: they may show anything since."""
        self._events: EventSink | None = None

    def send_events_to(self, events: EventSink) -> None:
        """Send every event to a sink, beginning with the fetches that have started and not ended."""
        self._events = events
        for topic, revisions in self._in_progress.items():
            for revision in revisions:
                events.fetch_started(topic, revision)

    def begin_fetch(self, topic: Topic, revision: int) -> None:
        """An answer is being made that will show what a topic is."""
        with self._lock:
            self._in_progress.setdefault(topic, []).append(revision)
            if self._events is not None:
                self._events.fetch_started(topic, revision)

    def end_fetch(self, topic: Topic, revision: int) -> None:
        """It is made, or never will be."""
        with self._lock:
            begun = self._in_progress[topic]
            begun.remove(revision)
            if not begun:
                del self._in_progress[topic]
            if self._events is not None:
                self._events.fetch_ended(topic, revision)

    def record(self, topic: Topic, version: Version) -> None:
        """Somebody is shown this version, or, with an empty digest, any one until its revision."""
        if not version.revision:
            return  # nobody was ever told less
        with self._lock:
            if self._events is not None:
                self._events.fetched(topic, version)
            shown = self._lists if isinstance(topic, Feature) else self._contents
            last, other = shown.get(topic) or (None, self._in_doubt(topic, version))
            if last == version:
                return
            shown.pop(topic, None)
            shown[topic] = (version, other if last is None or last.digest == version.digest else last)
            if len(self._contents) > _MOST_CONTENTS:
                forgotten, _ = self._contents.pop(next(iter(self._contents)))
                self._forgotten = max(self._forgotten, forgotten.revision)

    def may_differ(self, topic: Topic, now: Version, since: int) -> bool:
        """Whether anybody who looked after the revision `since` may hold something else than is there now."""
        if since >= now.revision:
            return False
        if any(begun < now.revision for begun in self._in_progress.get(topic, ())):
            return True
        is_list = isinstance(topic, Feature)
        last, other = (self._lists if is_list else self._contents).get(topic) or (None, None)
        if last is None:
            return not is_list and self._forgotten > since
        found = other if last.digest == now.digest else last
        return found is not None and found.revision > since

    def _in_doubt(self, topic: Topic, version: Version) -> Version | None:
        """What may have been shown before a version, of a topic of which nothing is known."""
        if isinstance(topic, Feature) or not self._forgotten:
            return None
        return Version(min(self._forgotten, version.revision), "")

    def may_be_outdated(self, topic: Topic, told: Version, now: Version) -> bool:
        """Whether one who was away, and was told what is true again, may hold something else all the same."""
        if told.digest != now.digest or told.revision >= now.revision:
            return False
        return told.revision < self._begun.get(topic, 0) or self.may_differ(topic, now, told.revision)
