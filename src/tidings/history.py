"""What happened: past Changes, as far as the journal remembers them, and their form in JSON.

Not a log for audits: the journal forgets, by count and by age, and an answer says when it did.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from tidings.model import Change, Feature, Topic

if TYPE_CHECKING:
    from tidings.journal import Journal

__all__ = ["Past", "as_json", "recall"]


class Past(NamedTuple):
    """Changes, the oldest first."""

    changes: tuple[Change, ...]
    complete: bool
    """Whether these are all that was asked for: nothing of it is forgotten, or was cut off by a limit."""

    def newest(self, limit: int) -> Past:
        if len(self.changes) <= limit:
            return self
        return Past(self.changes[len(self.changes) - limit :], complete=False)


def recall(journal: Journal, topic: Topic | None, since: int) -> Past:
    """The changes of one topic, or of all, after a revision."""
    found, is_whole = journal.after(since, topic)
    return Past(tuple(found), is_whole)


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
