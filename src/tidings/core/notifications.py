"""What there is to say: the versions as far as they were published, and the notifications about them, built once.

The catalog may be ahead: a subscriber may change it while others are still being told of an earlier change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby, takewhile
from operator import attrgetter

from tidings.core.catalog import UNKNOWN, Catalog
from tidings.core.counts import SuppressionReason
from tidings.core.fetched import FetchedVersions
from tidings.core.filters import Filter
from tidings.core.journal import Journal, net_changes
from tidings.core.mailbox import Entry
from tidings.core.model import Change, Feature, Notification, Topic, Version
from tidings.policy import Policy

__all__ = ["Notifications", "by_topic"]

_MOST_BUILT = 256
"""Notifications kept per list: readers that fell behind at the same time share one, and there are few such times."""


class Notifications:
    def __init__(self, catalog: Catalog, policy: Policy, journal: Journal | None = None) -> None:
        # An empty journal is falsy, and still the one that was given.
        self.journal = Journal(policy, since=catalog.revision) if journal is None else journal
        self._catalog = catalog
        self._most_contents = policy.max_contents
        self._revision = catalog.revision
        self._versions = {feature: catalog.version(feature) for feature in Feature}
        self._contents = catalog.resources.contents()
        begun: dict[Topic, int] = {topic: version.revision for topic, version in self._contents.items()}
        begun.update((feature, version.revision) for feature, version in self._versions.items())
        self.fetched = FetchedVersions(catalog.lock, begun)
        self._built: dict[Feature, dict[tuple[int, Filter | None], Notification]] = {feature: {} for feature in Feature}
        """By the revision as of which a list is known, and the filter."""
        self._hides: dict[Feature, dict[tuple[int, Filter], bool]] = {feature: {} for feature in Feature}
        """By the same, whether something came and went of which the notification says nothing."""

    @property
    def revision(self) -> int:
        """Everything until here was published."""
        return self._revision

    def version(self, topic: Topic) -> Version:
        return self._versions[topic] if isinstance(topic, Feature) else self._contents.get(topic, UNKNOWN)

    @property
    def newest_content(self) -> int:
        """The revision of the content that changed last: unlike the catalog's, the same after a restart."""
        return next((version.revision for version in reversed(self._contents.values())), 0)

    def contents_since(self, revision: int) -> list[str]:
        """The contents that changed after `revision`, the newest first."""
        return [uri for uri, _ in takewhile(lambda each: each[1].revision > revision, reversed(self._contents.items()))]

    def publish(self, changes: tuple[Change, ...]) -> Notification:
        """Take in the changes of one topic; returns what to tell those who knew it as it was."""
        # Each topic by itself: whoever is told of one list now must not hear of another one's changes before its turn.
        self.journal.append(changes)
        topic, version, since = changes[0].topic, changes[-1].version, changes[0].previous.revision
        self._revision = version.revision
        notification = Notification(topic, version, changes, since=since)
        if isinstance(topic, str):
            contents = self._contents
            contents.pop(topic, None)
            contents[topic] = version
            while len(contents) > self._most_contents:
                del contents[next(iter(contents))]
        else:
            self._versions[topic] = version
            self._built[topic] = {(since, None): notification}
            self._hides[topic] = {}
        return notification

    def since(self, topic: Topic, version: Version | None) -> Notification:
        """What to tell one who says that it was told this version, whether or not that ever was."""
        self.journal.expire(self._catalog.now())
        changes = None if version is None else self.journal.since(version.revision, topic)
        is_known = bool(changes) and changes is not None and changes[0].previous == version
        return self.missed(topic, version.revision if version is not None and is_known else -1)

    def held(self, told: Mapping[Topic, Version | None]) -> dict[Topic, Version | None]:
        """What somebody holds who was away, and by our own books was told this last: None where that is true again, but
        was not all the time, and it may have looked then."""
        misleads = self.fetched.may_be_outdated
        return {
            topic: None if version is not None and misleads(topic, version, self.version(topic)) else version
            for topic, version in told.items()
        }

    def pending(self, topic: Topic, entry: Entry, filter: Filter | None) -> Notification | SuppressionReason:
        """Return what to tell a subscriber in whose mailbox this waits, or why there is nothing to tell."""
        told, latest = entry.told, entry.latest
        if told and entry.is_true_still and not self.fetched.may_differ(topic, latest, told.revision):
            return SuppressionReason.SAME_DIGEST
        notification = entry.content or self.missed(topic, entry.since, filter)
        if entry.content is not None or not notification.complete or (notification.changes and filter is None):
            return notification
        # Of what came and went nothing is left, seen at once; but somebody has seen it one by one. Where something else
        # is left, the digest says so, unless a filter hides what it is of.
        if self.fetched.may_differ(topic, latest, entry.since) and self._hides_any(
            topic, entry.since, filter, notification
        ):
            return self.missed(topic, -1)
        return notification if notification.changes else SuppressionReason.FILTERED

    def _hides_any(self, topic: Topic, since: int, filter: Filter | None, left: Notification) -> bool:
        """Whether any item changed after a revision, in a way that a filter lets pass, and nothing of that is left."""
        if filter is None or not isinstance(topic, Feature):  # filters are of lists
            return True
        hides = self._hides[topic]
        found = hides.get((since, filter))
        if found is None:
            changes = self.journal.since(since, topic)
            passed = {change.key for change in changes or () if filter.passes(change)}
            # What was built before the journal forgot is still told; of what it hides, nobody knows any more.
            found = changes is None or not passed <= {change.key for change in left.changes}
            if len(hides) < _MOST_BUILT:
                hides[since, filter] = found
        return found

    def missed(self, topic: Topic, since: int, filter: Filter | None = None) -> Notification:
        """What to tell one who knows a topic as of a revision."""
        if not isinstance(topic, Feature):
            found = self.journal.since(since, topic)
            version = self._contents.get(topic) or Version(self._revision, UNKNOWN.digest)
            return Notification(topic, version, tuple(found or ())[-1:], since=since, complete=bool(found))
        built = self._built[topic]
        notification = built.get((since, filter))
        if notification is None:
            notification = self._build(topic, since, filter)
            if len(built) < _MOST_BUILT:
                built[since, filter] = notification
        return notification

    def _build(self, feature: Feature, since: int, filter: Filter | None) -> Notification:
        whole = self._built[feature].get((since, None))
        if whole is not None:
            changes, complete = whole.changes, whole.complete
        else:
            found = self.journal.since(since, feature)
            changes, complete = net_changes(found or ()), found is not None
        if filter is not None:
            changes = tuple(change for change in changes if filter.passes(change))
        return Notification(feature, self._versions[feature], changes, since=since, complete=complete)


def by_topic(changes: tuple[Change, ...]) -> Iterable[tuple[Change, ...]]:
    """Those of one topic that come one after the other."""
    if len(changes) == 1:  # most often
        return (changes,)
    return (tuple(group) for _, group in groupby(changes, attrgetter("topic")))
