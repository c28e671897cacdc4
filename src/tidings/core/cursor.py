"""Where a client stands: of each topic the version that it knows, and in which life of which server that was.

The client keeps it and the server keeps nothing: that is what makes a stateless protocol resumable. So whatever comes
back may be old, another server's, or garbage. None of it is an error; what can't be relied on counts as "unknown", and
its reader is told to refetch.

On the wire: `{"epoch": …, "asOf": 7, "topics": {"tools": {"revision": …, "digest": …}}, "uris": {"file:///a": {…}}}`. A
version of `null` says that the client was never told of that topic. Contents that are not there are known as of the
revision `asOf`; without that, and for lists, what is not there is taken as known now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from tidings.core.model import Feature, Topic, Version, is_unicode

__all__ = ["Cursor", "cursor_json"]

_FEATURES = {feature.value: feature for feature in Feature}
_MOST_URIS = 10_000
"""As many as one subscriber may watch. A client that claims more is told to refetch."""
_LONGEST_DIGEST = 128
_LARGEST_REVISION = 1 << 63


@dataclass(frozen=True, slots=True)
class Cursor:
    epoch: str
    versions: Mapping[Topic, Version | None] = field(default_factory=dict)
    """None for a topic of which the client was never told, or says something that can't be read."""
    as_of: int | None = None
    """The revision as of which the client knows all other contents that it watches; -1 for one that can't be read."""

    @classmethod
    def parse(cls, given: Any) -> Cursor | None:
        """From any JSON value at all; None for one that says nothing of where its client stands."""
        if not isinstance(given, Mapping) or not isinstance(epoch := given.get("epoch"), str):
            return None
        topics, uris = given.get("topics", {}), given.get("uris", {})
        if not isinstance(topics, Mapping) or not isinstance(uris, Mapping) or len(uris) > _MOST_URIS:
            return None
        versions: dict[Topic, Version | None] = {
            feature: _version(topics[name]) for name, feature in _FEATURES.items() if name in topics
        }
        versions |= {uri: _version(version) for uri, version in uris.items() if _is_text(uri)}
        as_of = given.get("asOf")
        return cls(epoch, versions, as_of if as_of is None or _is_revision(as_of) else -1)

    def as_json(self) -> dict[str, Any]:
        return cursor_json(self.epoch, self.versions, self.as_of)

    def then(self, newer: Cursor) -> Cursor:
        """For a client: where it stands once it has read something newer."""
        known = self if newer.epoch == self.epoch else self._carried_over(newer.epoch)
        as_of = known.as_of if newer.as_of is None else newer.as_of
        # A bookmark says what its reader was told, and that may be older than what it has looked at since.
        kept = {topic for topic, version in newer.versions.items() if _is_older(version, known.versions.get(topic))}
        read = {topic: version for topic, version in newer.versions.items() if topic not in kept}
        return Cursor(known.epoch, {**known.versions, **read}, as_of)

    def _carried_over(self, epoch: str) -> Cursor:
        """The same to a server of another epoch. What the client still holds must not be taken as known now."""
        versions = {
            topic: Version(0, version.digest) if version is not None and isinstance(topic, Feature) else None
            for topic, version in self.versions.items()
        }
        return Cursor(epoch, versions, None if self.as_of is None else -1)

    def told(self, epoch: str) -> dict[Topic, Version | None]:
        """What the client was told last, in the terms of the hub of this epoch: `hub.subscribe(told=…)`.

        The digest of a list is of its content, so an equal one means the same list in any epoch. A content's may be
        made of its revision, and means something in its own epoch only.
        """
        if epoch == self.epoch:
            return dict(self.versions)
        return {
            topic: Version(-1, version.digest) if version is not None and isinstance(topic, Feature) else None
            for topic, version in self.versions.items()
        }


def cursor_json(epoch: str, versions: Mapping[Topic, Version | None], as_of: int | None = None) -> dict[str, Any]:
    """A cursor as it is written, without the object: there is one in each notification."""
    written: dict[str, Any] = {"epoch": epoch}
    if as_of is not None:
        written["asOf"] = as_of
    for topic, version in versions.items():
        member, name = ("topics", topic.value) if isinstance(topic, Feature) else ("uris", topic)
        known = None if version is None else {"revision": version.revision, "digest": version.digest}
        written.setdefault(member, {})[name] = known
    return written


def _is_older(version: Version | None, known: Version | None) -> bool:
    return version is not None and known is not None and version.revision < known.revision


def _version(given: Any) -> Version | None:
    if not isinstance(given, Mapping):
        return None
    revision, digest = given.get("revision"), given.get("digest")
    if not _is_revision(revision) or not _is_text(digest) or len(digest) > _LONGEST_DIGEST:
        return None
    return Version(revision, digest)


def _is_text(given: Any) -> TypeGuard[str]:
    # Some parsers let half a character through, which nobody could write back.
    return isinstance(given, str) and is_unicode(given)


def _is_revision(given: Any) -> TypeGuard[int]:
    return isinstance(given, int) and not isinstance(given, bool) and 0 <= given < _LARGEST_REVISION
