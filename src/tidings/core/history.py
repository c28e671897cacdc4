"""What happened: past Changes, as far as the journal remembers them, and their form in JSON.

Not a log for audits: the journal forgets, by count and by age, and an answer says when it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tidings.core.cursor import Cursor
from tidings.core.hub import Hub
from tidings.core.model import Change, Feature, Topic, Version

__all__ = ["ChangeHistory", "as_json", "moment", "recall", "since_told"]


class ChangeHistory(NamedTuple):
    """Changes, the oldest first."""

    changes: tuple[Change, ...]
    complete: bool
    """Whether these are all that was asked for: nothing of it is forgotten, or was cut off by a limit."""

    def newest(self, limit: int) -> ChangeHistory:
        if len(self.changes) <= limit:
            return self
        return ChangeHistory(self.changes[len(self.changes) - limit :], complete=False)


def recall(hub: Hub, epoch: str, topic: Topic | None, since: int | Cursor | None) -> ChangeHistory:
    """What is remembered of one topic, or of all, after a revision or since a cursor."""
    with hub.catalog.lock:
        journal = hub.journal
        journal.expire(hub.catalog.now())
        if isinstance(since, Cursor):
            return since_told(journal.after(0)[0], hub.notifications.version, since.told(epoch), topic)
        found, is_whole = journal.after(since or 0, topic)
        return ChangeHistory(tuple(found), is_whole)


def since_told(
    remembered: Iterable[Change],
    current: Callable[[Topic], Version],
    told: Mapping[Topic, Version | None],
    topic: Topic | None = None,
) -> ChangeHistory:
    """Of the changes that are remembered, those of one topic, or of all, since each was told in the version given.

    None stands for a version that nobody knows. A topic that is not in `told` counts as known.
    """
    wanted = {each: version for each, version in told.items() if topic is None or each == topic}
    begins = {each: _begin(version, current(each)) for each, version in wanted.items()}
    changes = tuple(change for change in remembered if change.revision > begins.get(change.topic, math.inf))
    # From the newest on, so that the first of each topic stays.
    known = {change.topic: change.previous for change in reversed(changes)}
    complete = all(
        version is not None and version.digest == known.get(each, current(each)).digest
        for each, version in wanted.items()
    )
    return ChangeHistory(changes, complete)


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
        "time": moment(change.time),
        "origin": change.origin,
    }
    if is_full:
        if (item := change.item or change.before) is not None:
            described["item"] = item.definition
        if change.metadata:
            described["metadata"] = dict(change.metadata)
    return described


def moment(time: float) -> str:
    """As ISO 8601 has it, in UTC."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
