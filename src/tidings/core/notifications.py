"""Build notifications, and keep the published version of each topic.

The catalog and the journal may be ahead of these versions: the changes of one turn of the event loop are published
together, and a callback may make another change meanwhile. Notifications are built once and shared by all subscribers
that missed the same changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile

from tidings.core.catalog import UNKNOWN_VERSION, Catalog
from tidings.core.counts import SuppressionReason
from tidings.core.fetched import FetchedVersions
from tidings.core.filters import Filter
from tidings.core.journal import Journal, net_changes
from tidings.core.mailbox import MailboxEntry
from tidings.core.model import UNKNOWN_REVISION, Change, Feature, Notification, Topic, Version
from tidings.core.observer import Observer
from tidings.policy import Policy

__all__ = ["Notifications", "by_topic"]

_MAX_CACHED = 256
"""Notifications that are cached per list. Subscribers that became busy at the same time share one."""


class Notifications:
    def __init__(self, catalog: Catalog, policy: Policy, journal: Journal | None, observer: Observer) -> None:
        # Not `journal or …`: an empty journal is falsy.
        self.journal = Journal(policy, since=catalog.revision) if journal is None else journal
        self._catalog = catalog
        self._max_contents = policy.max_contents
        self._revision = catalog.revision
        self._versions = {feature: catalog.version(feature) for feature in Feature}
        self._contents = catalog.resources.contents()
        started: dict[Topic, int] = {topic: version.revision for topic, version in self._contents.items()}
        started.update((feature, version.revision) for feature, version in self._versions.items())
        self.fetched = FetchedVersions(catalog.lock, started, observer)
        self._cache: dict[Feature, dict[tuple[int, Filter | None], Notification]] = {feature: {} for feature in Feature}
        """By the revision that the subscriber knows, and by its filter."""
        self._hidden: dict[Feature, dict[tuple[int, Filter], bool]] = {feature: {} for feature in Feature}
        """By the same, the result of `_hides_changes`."""

    @property
    def revision(self) -> int:
        """The revision up to which everything is published."""
        return self._revision

    def version(self, topic: Topic) -> Version:
        return self._versions[topic] if isinstance(topic, Feature) else self._contents.get(topic, UNKNOWN_VERSION)

    @property
    def newest_content(self) -> int:
        """The revision of the content that changed last. Unlike the catalog's revision, it survives a restart."""
        return next((version.revision for version in reversed(self._contents.values())), 0)

    def contents_since(self, revision: int) -> list[str]:
        """Return the URIs of the contents that changed after `revision`, the newest first."""
        newer = takewhile(lambda pair: pair[1].revision > revision, reversed(self._contents.items()))
        return [uri for uri, _ in newer]

    def record(self, changes: tuple[Change, ...]) -> None:
        """Add a commit to the journal."""
        self.journal.append(changes)
        for change in changes:
            if isinstance(change.topic, Feature) and change.is_unknown:
                # Every client that knows an earlier version has to refetch.
                self.journal.forget(change.topic, change.revision)

    def publish(self, changes: tuple[Change, ...]) -> tuple[Notification, bool]:
        """Publish changes of one topic, which are in the journal. Return the notification for subscribers that know the
        version before, and whether a later change may undo an earlier one. If so, `of_entry` returns the notification
        for each subscriber instead, with the net changes."""
        # One topic at a time: a subscriber of one list must not get the changes of another one too early.
        topic, version, previous = changes[0].topic, changes[-1].version, changes[0].previous
        self._revision = version.revision
        if isinstance(topic, str):
            contents = self._contents
            contents.pop(topic, None)
            contents[topic] = version
            while len(contents) > self._max_contents:
                del contents[next(iter(contents))]
            notification = Notification(topic, version, changes[-1:], since=previous.revision)
            return notification, version.digest == previous.digest
        if any(change.is_unknown for change in changes):
            may_be_undone = False
            notification = Notification(topic, version, (), since=UNKNOWN_REVISION, complete=False)
        else:
            may_be_undone = len(changes) > 1 and len({change.key for change in changes}) < len(changes)
            notification = Notification(topic, version, changes, since=previous.revision)
        self._versions[topic] = version
        self._cache[topic] = {} if may_be_undone else {(notification.since, None): notification}
        self._hidden[topic] = {}
        return notification, may_be_undone

    def since_version(self, topic: Topic, version: Version | None) -> Notification:
        """Return the notification for a client that says that it knows this version, which may never have existed."""
        self.journal.expire(self._catalog.now())
        changes = None if version is None else self.journal.since(version.revision, topic)
        if version is None or not changes or changes[0].previous != version:
            return self.since_revision(topic, UNKNOWN_REVISION)
        return self.since_revision(topic, version.revision)

    def since_revision(self, topic: Topic, revision: int, filter: Filter | None = None) -> Notification:
        """Return the notification for a subscriber that knows a topic as of `revision`, which may be unknown."""
        if not isinstance(topic, Feature):
            version = self._contents.get(topic) or Version(self._revision, UNKNOWN_VERSION.digest)
            changes = self._published(revision, topic, version)
            return Notification(topic, version, tuple(changes or ())[-1:], since=revision, complete=bool(changes))
        cache = self._cache[topic]
        notification = cache.get((revision, filter))
        if notification is None:
            notification = self._build(topic, revision, filter)
            if len(cache) < _MAX_CACHED:
                cache[revision, filter] = notification
        return notification

    def of_entry(self, topic: Topic, entry: MailboxEntry, filter: Filter | None) -> Notification | SuppressionReason:
        """Return the notification for an entry of a mailbox, or the reason for which there is none."""
        told, latest = entry.told, entry.latest
        if told and entry.is_told_current and not self.fetched.may_differ(topic, latest, told.revision):
            return SuppressionReason.SAME_DIGEST
        notification = entry.notification or self.since_revision(topic, entry.since, filter)
        if entry.notification is not None or not notification.complete or (notification.changes and filter is None):
            return notification
        # The net change is empty, or a filter hides a part of it. A client that fetched an intermediate version has to
        # refetch.
        if self.fetched.may_differ(topic, latest, entry.since) and self._hides_changes(
            topic, entry.since, filter, notification
        ):
            return self.since_revision(topic, UNKNOWN_REVISION)
        return notification if notification.changes else SuppressionReason.FILTERED

    def without_outdated(self, told: Mapping[Topic, Version | None]) -> dict[Topic, Version | None]:
        """Replace by None the versions that an absent client was told, where it may have fetched another one since."""
        may_be_outdated = self.fetched.may_be_outdated
        return {
            topic: None if version is not None and may_be_outdated(topic, version, self.version(topic)) else version
            for topic, version in told.items()
        }

    def _published(self, revision: int, topic: Topic, version: Version) -> list[Change] | None:
        """Return the changes of a topic after a revision, up to the published version; None if some are discarded."""
        changes = self.journal.since(revision, topic)
        while changes and changes[-1].revision > version.revision:
            changes.pop()
        return changes

    def _hides_changes(self, topic: Topic, revision: int, filter: Filter | None, notification: Notification) -> bool:
        """Return whether a change after a revision passed the filter but is not in the net changes."""
        if filter is None or not isinstance(topic, Feature):  # filters apply to lists
            return True
        cache = self._hidden[topic]
        is_hidden = cache.get((revision, filter))
        if is_hidden is None:
            changes = self.journal.since(revision, topic)
            passed = {change.key for change in changes or () if filter.passes(change)}
            # The notification may be older than what the journal still has; then it is unknown what it hides.
            is_hidden = changes is None or not passed <= {change.key for change in notification.changes}
            if len(cache) < _MAX_CACHED:
                cache[revision, filter] = is_hidden
        return is_hidden

    def _build(self, feature: Feature, revision: int, filter: Filter | None) -> Notification:
        unfiltered = self._cache[feature].get((revision, None))
        if unfiltered is not None:
            changes, complete = unfiltered.changes, unfiltered.complete
        else:
            found = self._published(revision, feature, self._versions[feature])
            changes, complete = net_changes(found or ()), found is not None
        if filter is not None:
            changes = tuple(change for change in changes if filter.passes(change))
        return Notification(feature, self._versions[feature], changes, since=revision, complete=complete)


def by_topic(changes: tuple[Change, ...]) -> Iterable[tuple[Change, ...]]:
    """Group changes by topic, ordered by the last change of each topic."""
    if len(changes) == 1:  # most often
        return (changes,)
    groups: dict[Topic, list[Change]] = {}
    for change in changes:
        group = groups.pop(change.topic, [])
        group.append(change)
        groups[change.topic] = group
    return map(tuple, groups.values())
