"""The versions from which a returning subscriber resumes.

For a list or an exact URI, its cursor has a version. For resources that it watches through a pattern or a parent, the
cursor has a revision as of which it knows all of them, and versions for exceptions. If the journal or the catalog no
longer reaches back to that revision, the client is told to refetch; it never gets a part of the changes as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tidings.core.cursor import Cursor
from tidings.core.index import WatchedUris
from tidings.core.model import Feature, Topic, Version
from tidings.core.patterns import Match, is_pattern

if TYPE_CHECKING:
    from tidings.core.hub import Hub

__all__ = ["Resumed", "contents_changed", "resume", "resume_from_store", "watched_among"]

_MAX_WORK = 30_000
"""The work (see `PatternIndex.work`) of finding what a returning client has missed: less than 100 ms. The client
chooses the cursor and the patterns, and other clients wait meanwhile."""
_MAX_MISSED = 2_000
"""The contents that a client is told one by one, for the same reason."""


class Resumed(NamedTuple):
    """The versions that a returning subscriber knows."""

    told: dict[Topic, Version | None]
    """The told versions, for `hub.subscribe(told=…)`."""
    refetch: tuple[str, ...] = ()
    """The URIs and patterns that it must refetch."""


def resume(
    given: Any,
    epoch: str,
    hub: Hub,
    topics: Iterable[Topic],
    is_authorized: Callable[[str], bool] | None = None,
    *,
    matches: Mapping[str, Match] | None = None,
    priorities: int = 0,
) -> Resumed:
    """Return what a client knows of the topics that it watches, from the JSON value of its cursor.

    `is_authorized` says whether it may see a resource that it did not name. `matches` has patterns that are compiled
    already. `priorities` is the number of patterns that decide the order of delivery."""
    topics = list(topics)
    uris = [topic for topic in topics if not isinstance(topic, Feature)]
    cursor = Cursor.parse(given)
    if cursor is None:
        return _nothing_known(topics, hub, priorities)
    versions = cursor.told(epoch)
    told: dict[Topic, Version | None] = {
        topic: version for topic, version in versions.items() if isinstance(topic, Feature) and topic in topics
    }
    watched = hub.index.watched(frozenset(uris), is_authorized, matches)
    found = watched_among([topic for topic in versions if not isinstance(topic, Feature)], watched)
    if found is None:
        return _nothing_known(topics, hub, priorities)
    for uri in found:
        told[uri] = None if _is_forgotten(versions[uri], hub) else versions[uri]
    if _takes_too_long(told, hub, priorities):
        return _nothing_known(topics, hub, priorities)
    if cursor.as_of is None:
        return Resumed(told)
    changed = contents_changed(hub, uris, cursor.as_of, is_authorized, matches) if cursor.epoch == epoch else None
    resumed = _combine(changed, told, uris)
    return _nothing_known(topics, hub, priorities) if _takes_too_long(resumed.told, hub, priorities) else resumed


def resume_from_store(
    hub: Hub,
    told: Mapping[Topic, Version | None],
    uris: Collection[str],
    as_of: int,
    is_authorized: Callable[[str], bool] | None = None,
) -> Resumed:
    """Return what a client without a cursor knows, from its durable subscription: the told versions, and a revision for
    all other contents. Only a cursor would say what it has fetched."""
    known, refetch = _combine(contents_changed(hub, uris, as_of, is_authorized), told, uris)
    return Resumed(hub.notifications.without_outdated(known), refetch)


def watched_among(candidates: Iterable[str], watched: WatchedUris) -> list[str] | None:
    """Return the candidates that are watched. Return None if finding them takes more than `_MAX_WORK`."""
    found = []
    for uri in candidates:
        if uri in watched:
            found.append(uri)
        if watched.work > _MAX_WORK:
            return None
    return found


def contents_changed(
    hub: Hub,
    uris: Collection[str],
    as_of: int,
    is_authorized: Callable[[str], bool] | None = None,
    matches: Mapping[str, Match] | None = None,
) -> dict[str, Version | None] | None:
    """Return the contents that changed after a revision and are watched by these URIs and patterns, with the version
    before (None if the journal does not reach back). Return None if that is unknown, or if they are too many."""
    if not uris:
        return {}
    if not hub.catalog.resources.forgotten <= as_of <= hub.notifications.revision:
        return None
    watched = hub.index.watched(uris, is_authorized, matches)
    changed = watched_among(hub.notifications.contents_since(as_of), watched)
    if changed is None or len(changed) > hub.policy.max_pending:
        return None
    before: dict[str, Version] = {}
    for change in (hub.journal.contents_since(as_of) or ()) if changed else ():
        before.setdefault(change.key, change.previous)
    return {uri: before.get(uri) for uri in reversed(changed)}


def _nothing_known(topics: Collection[Topic], hub: Hub, priorities: int) -> Resumed:
    """Return the result for a client that must refetch everything that it watches. It gets a notification of each list
    and URI, unless these are too many."""
    uris = [topic for topic in topics if not isinstance(topic, Feature)]
    told: dict[Topic, Version | None] = dict.fromkeys(topic for topic in topics if not is_pattern(topic))
    if _takes_too_long(told, hub, priorities):
        told = dict.fromkeys(topic for topic in topics if isinstance(topic, Feature))
    return _combine(None, told, uris)


def _takes_too_long(told: Mapping[Topic, Version | None], hub: Hub, priorities: int) -> bool:
    """Return whether the contents to be delivered are too many. The client's priorities are tried for each of them."""
    version_of = hub.notifications.version
    sizes = [8 + len(str(topic)) // 2 for topic, version in told.items() if version != version_of(topic)]
    return len(sizes) > _MAX_MISSED or sum(sizes) * priorities > _MAX_WORK


def _combine(
    changed: Mapping[str, Version | None] | None, told: Mapping[Topic, Version | None], uris: Iterable[str]
) -> Resumed:
    """Combine the changed contents with the told versions. If the changed contents are unknown, the client must refetch
    all patterns, and all URIs except those whose told version is None: these get a notification."""
    if changed is None:
        unknown = {topic for topic, version in told.items() if version is None}
        return Resumed(dict(told), tuple(uri for uri in uris if is_pattern(uri) or uri not in unknown))
    known: dict[Topic, Version | None] = {}
    known.update(changed.items())
    known.update(told)
    return Resumed(known)


def _is_forgotten(version: Version | None, hub: Hub) -> bool:
    """Return whether a version stands for "content unknown" and the content may have changed since, without a trace."""
    return version is not None and not version.digest and version.revision < hub.catalog.resources.forgotten
