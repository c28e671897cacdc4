"""The versions from which a returning subscriber resumes.

For a list or an exact URI, its cursor has a version. For resources that it watches through a pattern or a parent, the
cursor has a revision as of which it knows all of them, and versions for exceptions. If the journal or the catalog no
longer reaches back to that revision, the client is told to refetch; it never gets a part of the changes as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tidings.core.cursor import Cursor
from tidings.core.model import Feature, Topic, Version
from tidings.core.patterns import compile_pattern, is_pattern
from tidings.errors import InvalidPattern

if TYPE_CHECKING:
    from tidings.core.hub import Hub

__all__ = ["Resumed", "contents_changed", "resume", "resume_from_store", "watch_predicate"]


class Resumed(NamedTuple):
    """The versions that a returning subscriber knows."""

    told: dict[Topic, Version | None]
    """The told versions, for `hub.subscribe(told=…)`."""
    refetch: tuple[str, ...] = ()
    """The URIs and patterns that it must refetch."""


def resume(
    given: Any, epoch: str, hub: Hub, topics: Iterable[Topic], is_authorized: Callable[[str], bool] | None = None
) -> Resumed:
    """Return what a client knows of the topics that it watches, from the JSON value of its cursor.

    `is_authorized` says whether it may see a resource that it did not name.
    """
    topics = list(topics)
    uris = [topic for topic in topics if not isinstance(topic, Feature)]
    cursor = Cursor.parse(given)
    if cursor is None:
        return _combine(None, dict.fromkeys(topic for topic in topics if not is_pattern(topic)), uris)
    is_watched = watch_predicate(uris, hub, is_authorized)
    told = {
        topic: None if _is_forgotten(version, hub) else version
        for topic, version in cursor.told(epoch).items()
        if (topic in topics if isinstance(topic, Feature) else is_watched(topic))
    }
    if cursor.as_of is None:
        return Resumed(told)
    changed = contents_changed(hub, uris, cursor.as_of, is_authorized) if cursor.epoch == epoch else None
    return _combine(changed, told, uris)


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


def contents_changed(
    hub: Hub, uris: Collection[str], as_of: int, is_authorized: Callable[[str], bool] | None = None
) -> dict[str, Version | None] | None:
    """Return the contents that changed after a revision and are watched by these URIs and patterns, with the version
    before (None if the journal does not reach back). Return None if that is unknown, or if they are too many."""
    if not uris:
        return {}
    if not hub.catalog.resources.forgotten <= as_of <= hub.notifications.revision:
        return None
    is_watched = watch_predicate(uris, hub, is_authorized)
    changed = [uri for uri in hub.notifications.contents_since(as_of) if is_watched(uri)]
    if len(changed) > hub.policy.max_pending:
        return None
    before: dict[str, Version] = {}
    for change in (hub.journal.contents_since(as_of) or ()) if changed else ():
        before.setdefault(change.key, change.previous)
    return {uri: before.get(uri) for uri in reversed(changed)}


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


def watch_predicate(
    uris: Collection[str], hub: Hub, is_authorized: Callable[[str], bool] | None = None
) -> Callable[[str], bool]:
    """Return a predicate for the resources that these URIs and patterns watch."""
    exact = frozenset(uris)
    folders = tuple(uri if uri.endswith("/") else f"{uri}/" for uri in exact) if hub.policy.subresources else ()
    matches = []
    for uri in uris:
        if is_pattern(uri):
            try:
                matches.append(compile_pattern(uri, hub.templates))
            except InvalidPattern:
                continue  # from a server with other templates

    def is_watched(uri: str) -> bool:
        if uri in exact:
            return not is_pattern(uri)
        return (uri.startswith(folders) or any(match(uri) for match in matches)) and (
            is_authorized is None or is_authorized(uri)
        )

    return is_watched
