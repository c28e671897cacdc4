"""What happened: past Changes, as far as the journal remembers them, and their form in JSON.

Not a log for audits: the journal forgets, by count and by age, and an answer says when it did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tidings.model import Change, Feature, Topic, Version
from tidings.news import News

__all__ = ["Past", "as_json", "recall", "recall_told"]


class Past(NamedTuple):
    """Changes, the oldest first."""

    changes: tuple[Change, ...]
    complete: bool
    """Whether these are all that was asked for: nothing of it is forgotten, or was cut off by a limit."""

    def newest(self, limit: int) -> Past:
        if len(self.changes) <= limit:
            return self
        return Past(self.changes[len(self.changes) - limit :], complete=False)


def recall(news: News, topic: Topic | None, since: int | None) -> Past:
    """The changes of one topic, or of all, after a revision."""
    found, is_whole = news.journal.after(since or 0, topic)
    return Past(tuple(found), is_whole)


def recall_told(news: News, topic: Topic | None, told: Mapping[Topic, Version | None]) -> Past:
    """The changes of one topic, or of all, since each was told in the version given; None: nobody knows which. What is
    not in `told` counts as known."""
    wanted = {each: version for each, version in told.items() if topic is None or each == topic}
    begins = {each: _begin(version, news.version(each)) for each, version in wanted.items()}
    found, _ = news.journal.after(0)
    changes = tuple(change for change in found if change.revision > begins.get(change.topic, math.inf))
    # From the newest on, so that the first of each topic stays.
    known = {change.topic: change.previous for change in reversed(changes)}
    complete = all(
        version is not None and version.digest == known.get(each, news.version(each)).digest
        for each, version in wanted.items()
    )
    return Past(changes, complete)


def _begin(told: Version | None, current: Version) -> float:
    if told is None:
        return 0
    if told.revision < 0:  # of another epoch, where revisions meant something else
        return math.inf if told.digest == current.digest else 0
    return told.revision


def as_json(change: Change, *, is_full: bool = False) -> dict[str, Any]:
    """A change as clients and scripts read it. A change of content has a URI and no feature."""
    described: dict[str, Any] = {"operation": change.operation.value}
    if isinstance(change.topic, Feature):
        described |= {"feature": change.topic.value, change.topic.key_field: change.key}
    else:
        described["uri"] = change.topic
    described |= {
        "revision": change.revision,
        "digest": change.digest,
        "time": datetime.fromtimestamp(change.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "origin": change.origin,
    }
    if is_full:
        if (item := change.item or change.before) is not None:
            described["item"] = item.definition
        if change.metadata:
            described["metadata"] = dict(change.metadata)
    return described
