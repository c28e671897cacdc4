"""The versions that clients may have fetched, in a list result or by reading a resource.

A topic may change from A to B and back to A. A client that was told A then needs no notification, unless it fetched B
in between. The protocol is stateless, so the server does not know which client fetched what: a version that one client
fetched counts for all. Delivery asks only if equal content would suppress a notification.

Not a log: it keeps for each topic the last fetched version, and the last one before it with another digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tidings.core.model import Feature, Topic, Version
from tidings.core.observer import Observer

__all__ = ["FetchedVersions"]

_MAX_CONTENTS = 4096
"""Contents whose fetched versions are kept. For others, any version may have been fetched."""


class FetchedVersions:
    def __init__(self, lock: AbstractContextManager[Any], started: Mapping[Topic, int], observer: Observer) -> None:
        """`started` has the revisions at the start of this process. Fetches before them are unknown."""
        self._lock = lock
        self._started = started
        self._observer = observer
        self._lists: dict[Topic, tuple[Version, Version | None]] = {}
        self._contents: dict[Topic, tuple[Version, Version | None]] = {}
        """Ordered by when a new version was fetched; the oldest is dropped first."""
        self._dropped = 0
        """The revision up to which contents without an entry may have been fetched."""
        self._in_progress: dict[Topic, list[int]] = {}
        """The revisions at which unfinished fetches began. They may return any version since."""

    def in_progress(self) -> Iterator[tuple[Topic, int]]:
        """Return the topics and revisions of unfinished fetches."""
        return ((topic, revision) for topic, revisions in self._in_progress.items() for revision in revisions)

    def begin_fetch(self, topic: Topic, revision: int) -> None:
        """Record that the server prepares a response with this topic."""
        with self._lock:
            self._in_progress.setdefault(topic, []).append(revision)

    def end_fetch(self, topic: Topic, revision: int) -> None:
        """Record that the response is complete, or that there will be none."""
        with self._lock:
            revisions = self._in_progress[topic]
            revisions.remove(revision)
            if not revisions:
                del self._in_progress[topic]

    def record(self, topic: Topic, version: Version) -> None:
        """Record that a client fetched this version, or, with an empty digest, any version up to its revision."""
        if not version.revision:
            return  # no client was told an earlier version
        with self._lock:
            self._observer.fetched(topic, version)
            fetched = self._lists if isinstance(topic, Feature) else self._contents
            last, other = fetched.get(topic) or (None, self._unknown_before(topic, version))
            if last == version:
                return
            fetched.pop(topic, None)
            fetched[topic] = (version, other if last is None or last.digest == version.digest else last)
            if len(self._contents) > _MAX_CONTENTS:
                dropped, _ = self._contents.pop(next(iter(self._contents)))
                self._dropped = max(self._dropped, dropped.revision)

    def may_differ(self, topic: Topic, current: Version, since: int) -> bool:
        """Return whether a client may have fetched something else than the current content after a revision."""
        if since >= current.revision:
            return False
        if any(revision < current.revision for revision in self._in_progress.get(topic, ())):
            return True
        is_list = isinstance(topic, Feature)
        last, other = (self._lists if is_list else self._contents).get(topic) or (None, None)
        if last is None:
            return not is_list and self._dropped > since
        different = other if last.digest == current.digest else last
        return different is not None and different.revision > since

    def may_be_outdated(self, topic: Topic, told: Version, current: Version) -> bool:
        """Return whether an absent client that was told the current content may have fetched something else since."""
        if told.digest != current.digest or told.revision >= current.revision:
            return False
        return told.revision < self._started.get(topic, 0) or self.may_differ(topic, current, told.revision)

    def _unknown_before(self, topic: Topic, version: Version) -> Version | None:
        """Return what may have been fetched before a version of a topic without an entry."""
        if isinstance(topic, Feature) or not self._dropped:
            return None
        return Version(min(self._dropped, version.revision), "")
