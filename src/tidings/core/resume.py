"""What a subscriber that comes back has missed.

Of a list or a URI that it names, it knows a version, and nothing more is needed. What it watches by a pattern, or as a
part of another resource, it can't name: of that it knows everything as of a revision, but for the versions that it does
name. Where nobody knows any more what came after that revision, it is told to refetch, and never a part for the whole.
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

__all__ = ["Resumed", "contents_changed", "resume", "resume_from_store", "settled", "watch_predicate"]


class Resumed(NamedTuple):
    """Where a subscriber stands that comes back."""

    told: dict[Topic, Version | None]
    """What it was told last: `hub.subscribe(told=…)`."""
    refetch: tuple[str, ...] = ()
    """The URIs and patterns of which nobody knows what it missed."""


def resume(
    given: Any, epoch: str, hub: Hub, topics: Iterable[Topic], is_authorized: Callable[[str], bool] | None = None
) -> Resumed:
    """Where a client stands that came with any JSON value as its cursor, and watches these topics. `is_authorized` says
    whether it may hear of a resource that it did not name."""
    topics = list(topics)
    uris = [topic for topic in topics if not isinstance(topic, Feature)]
    cursor = Cursor.parse(given)
    if cursor is None:
        return settled(None, dict.fromkeys(topic for topic in topics if not _is_pattern(topic)), uris)
    is_watched = watch_predicate(uris, hub, is_authorized)
    told = {
        topic: None if _is_forgotten(version, hub) else version
        for topic, version in cursor.told(epoch).items()
        if (topic in topics if isinstance(topic, Feature) else is_watched(topic))
    }
    if cursor.as_of is None:
        return Resumed(told)
    since = contents_changed(hub, uris, cursor.as_of, is_authorized) if cursor.epoch == epoch else None
    return settled(since, told, uris)


def resume_from_store(
    hub: Hub,
    told: Mapping[Topic, Version | None],
    uris: Collection[str],
    as_of: int,
    is_authorized: Callable[[str], bool] | None = None,
) -> Resumed:
    """Where one stands that by our own books was told this last, and knows all else as of a revision. What it was told
    is not what it holds: that only a cursor says."""
    known, refetch = settled(contents_changed(hub, uris, as_of, is_authorized), told, uris)
    return Resumed(hub.notifications.without_outdated(known), refetch)


def contents_changed(
    hub: Hub, uris: Collection[str], as_of: int, is_authorized: Callable[[str], bool] | None = None
) -> dict[str, Version | None] | None:
    """The contents that these URIs and patterns cover and that changed after a revision, in the version that each had
    then (None where the journal does not reach). None if nobody knows, or they are more than may wait."""
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


def settled(
    since: Mapping[str, Version | None] | None, told: Mapping[Topic, Version | None], uris: Iterable[str]
) -> Resumed:
    """With what was missed; if nobody knows that, all of these are to be refetched, but for what is told so itself."""
    if since is None:
        return Resumed(dict(told), tuple(uri for uri in uris if is_pattern(uri) or told.get(uri, ...) is not None))
    known: dict[Topic, Version | None] = {}
    known.update(since.items())
    known.update(told)
    return Resumed(known)


def _is_forgotten(version: Version | None, hub: Hub) -> bool:
    """Whether it says that nothing was known of a content, of which something may have been known since."""
    return version is not None and not version.digest and version.revision < hub.catalog.resources.forgotten


def _is_pattern(topic: Topic) -> bool:
    return not isinstance(topic, Feature) and is_pattern(topic)


def watch_predicate(
    uris: Collection[str], hub: Hub, is_authorized: Callable[[str], bool] | None = None
) -> Callable[[str], bool]:
    """Whether a resource is watched by any of these."""
    exact = frozenset(uris)
    folders = tuple(uri if uri.endswith("/") else f"{uri}/" for uri in exact) if hub.policy.subresources else ()
    matches = []
    for uri in uris:
        if is_pattern(uri):
            try:
                matches.append(compile_pattern(uri, hub.templates))
            except InvalidPattern:
                continue  # of a server that knew other patterns

    def is_watched(uri: str) -> bool:
        if uri in exact:
            return not is_pattern(uri)
        return (uri.startswith(folders) or any(match(uri) for match in matches)) and (
            is_authorized is None or is_authorized(uri)
        )

    return is_watched
