"""Where the reader of an answer stands: the version of what it is shown, where that is known for sure.

A version too new would hide a change from its reader. One too old hides that a change was taken back: who holds B and
says that it knows A hears nothing when A is there again. So an answer that was made while its topic changed has no
version, and whoever comes back with that is told to refetch. For the same reason the hub is told what is shown, from
when the answer is begun: who was told A and may hold B hears of it when A is there again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Self

from tidings.core.cursor import Cursor
from tidings.core.model import Feature, Topic, Version

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["Sight"]


class Sight:
    """One answer, from before it is made until it is, or never will be."""

    __slots__ = ("_before", "_live", "_shown")

    def __init__(self, live: Live, topics: Collection[Topic], *, is_for_us: bool = False) -> None:
        """`is_for_us`: nobody is shown this answer yet."""
        self._live = live
        self._shown = None if is_for_us else live.hub.notifications.fetched
        self._before = self._look(topics)

    def __enter__(self) -> Self:
        if self._shown is not None:
            for topic, version in self._before.items():
                self._shown.begin_fetch(topic, version.revision)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown is not None:
            for topic, version in self._before.items():
                self._shown.end_fetch(topic, version.revision)

    def cursor(self) -> dict[str, Any]:
        """Where whoever reads the answer stands, now that it is made."""
        after = self._look(self._before)
        known = {topic: after[topic] if self._is_sure(topic, after[topic]) else None for topic in after}
        if self._shown is not None:
            for topic, version in known.items():
                self._shown.record(topic, version or Version(after[topic].revision, ""))
        return Cursor(self._live.epoch, known).as_json()

    def _look(self, topics: Collection[Topic]) -> dict[Topic, Version]:
        if not topics:
            return {}
        # Of the catalog, which may be ahead of what was published, as the answer is. With its lock: a source changes
        # what it serves and the catalog under that.
        with self._live.catalog.lock:
            return {topic: self._live.catalog.version(topic) for topic in topics}

    def _is_sure(self, topic: Topic, version: Version) -> bool:
        is_known = self._live.knows(topic) if isinstance(topic, Feature) else True
        return is_known and version == self._before[topic]
