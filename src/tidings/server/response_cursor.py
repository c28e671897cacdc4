"""The cursor on a response: the version of the topic that its reader sees, if that is certain.

* A version that is too new would hide a change from the reader.
* One that is too old would hide that a change was reverted: a reader that has B, and says that it knows A, gets no
  notification when the topic is A again.

So a response during which the topic changed has no version, and a client that returns with it is told to refetch. For
the same reason the hub records which versions clients may have fetched, from the start of each response.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Self

from tidings.core.cursor import Cursor
from tidings.core.hub import Hub
from tidings.core.model import Feature, Topic, Version
from tidings.server.list_reader import ListReader

__all__ = ["ResponseCursor"]


class ResponseCursor:
    """The topics of one response, from its start until it is made or fails."""

    __slots__ = ("_before", "_fetched", "_hub", "_reader")

    def __init__(self, hub: Hub, reader: ListReader, topics: Collection[Topic], *, is_internal: bool) -> None:
        """`is_internal` says that no client gets this response yet."""
        self._hub = hub
        self._reader = reader
        self._fetched = None if is_internal else hub.notifications.fetched
        self._before = self._read_versions(topics)

    def __enter__(self) -> Self:
        if self._fetched is not None:
            for topic, version in self._before.items():
                self._fetched.begin_fetch(topic, version.revision)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._fetched is not None:
            for topic, version in self._before.items():
                self._fetched.end_fetch(topic, version.revision)

    @property
    def revisions(self) -> dict[Topic, int]:
        """The revision of each topic when the response was begun. The response has it, or a later one."""
        return {topic: version.revision for topic, version in self._before.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the cursor, after the response was made."""
        after = self._read_versions(self._before)
        known = {topic: after[topic] if self._is_certain(topic, after[topic]) else None for topic in after}
        if self._fetched is not None:
            for topic, version in known.items():
                self._fetched.record(topic, version or Version(after[topic].revision, ""))
        return Cursor(self._hub.catalog.epoch, known).as_json()

    def _read_versions(self, topics: Collection[Topic]) -> dict[Topic, Version]:
        if not topics:
            return {}
        # From the catalog, which may be ahead of what was published, as the response is. With its lock, under which a
        # source changes its items and the catalog together.
        with self._hub.catalog.lock:
            return {topic: self._hub.catalog.version(topic) for topic in topics}

    def _is_certain(self, topic: Topic, version: Version) -> bool:
        is_current = self._reader.is_current(topic) if isinstance(topic, Feature) else True
        return is_current and version == self._before[topic]
