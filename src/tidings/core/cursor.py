"""Cursors: the versions that a client knows, and the epoch of the server that they belong to.

The client keeps the cursor and the server keeps nothing; this makes a stateless protocol resumable. So a cursor may be
old, from another server, or invalid. None of this is an error: a version that is not reliable counts as unknown, and
the client is told to refetch.

On the wire: `{"epoch": …, "asOf": 7, "topics": {"tools": {"revision": …, "digest": …}}, "uris": {"file:///a": {…}}}`. A
version of `null` means that the client was never told of the topic. It knows all other contents as of the revision
`asOf`. Without `asOf`, and for lists, it is taken to know the present version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from tidings.core.encoding import is_unicode
from tidings.core.model import UNKNOWN_REVISION, Feature, Topic, Version

__all__ = ["Cursor", "cursor_json"]

_FEATURES = {feature.value: feature for feature in Feature}
_MAX_URIS = 10_000
"""The most that one subscriber may watch. A cursor with more is invalid, and its client is told to refetch."""
_MAX_DIGEST = 128
_MAX_REVISION = 1 << 63


@dataclass(frozen=True, slots=True)
class Cursor:
    epoch: str
    versions: Mapping[Topic, Version | None] = field(default_factory=dict)
    """None for a topic of which the client was never told, or whose version is invalid."""
    as_of: int | None = None
    """The revision as of which the client knows all other contents that it watches. `UNKNOWN_REVISION` if invalid."""

    @classmethod
    def parse(cls, given: Any) -> Cursor | None:
        """Parse any JSON value. Return None if it is not a cursor."""
        if not isinstance(given, Mapping) or not isinstance(epoch := given.get("epoch"), str):
            return None
        topics, uris = given.get("topics", {}), given.get("uris", {})
        if not isinstance(topics, Mapping) or not isinstance(uris, Mapping) or len(uris) > _MAX_URIS:
            return None
        versions: dict[Topic, Version | None] = {
            feature: _version(topics[name]) for name, feature in _FEATURES.items() if name in topics
        }
        versions |= {uri: _version(version) for uri, version in uris.items() if _is_valid_text(uri)}
        as_of = given.get("asOf")
        return cls(epoch, versions, as_of if as_of is None or _is_revision(as_of) else UNKNOWN_REVISION)

    @property
    def newest(self) -> int:
        """The newest revision that the client knows."""
        revisions = [version.revision for version in self.versions.values() if version is not None]
        return max([*revisions, self.as_of or 0], default=0)

    def as_json(self) -> dict[str, Any]:
        return cursor_json(self.epoch, self.versions, self.as_of)

    def merge(self, newer: Cursor, *, is_read: bool = False) -> Cursor:
        """Return the cursor of a client after it has got a newer one.

        With `is_read`, the client has just read these versions. They replace the known ones even if they are older, as
        those of a replica that is behind, because the cursor must say what the client has."""
        known = self
        if newer.epoch != self.epoch:
            as_of = None if self.as_of is None else UNKNOWN_REVISION
            known = Cursor(newer.epoch, self._in_other_epoch(revision=0), as_of)
        as_of = known.as_of if newer.as_of is None else newer.as_of
        # A heartbeat has the told versions, which may be older than what the client has fetched since.
        taken = {
            topic: version
            for topic, version in newer.versions.items()
            if is_read or not _is_older(version, known.versions.get(topic))
        }
        return Cursor(known.epoch, {**known.versions, **taken}, as_of)

    def told(self, epoch: str) -> dict[Topic, Version | None]:
        """Return the told versions for `hub.subscribe(told=…)` of a server with this epoch."""
        return dict(self.versions) if epoch == self.epoch else self._in_other_epoch(revision=UNKNOWN_REVISION)

    def _in_other_epoch(self, revision: int) -> dict[Topic, Version | None]:
        """Return the versions for another epoch, with this revision: revisions are valid in their own epoch only.

        Equal digests of a list mean the same list in any epoch. The digest of a content may contain its revision.
        """
        return {
            topic: Version(revision, version.digest) if version is not None and isinstance(topic, Feature) else None
            for topic, version in self.versions.items()
        }


def cursor_json(epoch: str, versions: Mapping[Topic, Version | None], as_of: int | None = None) -> dict[str, Any]:
    """Return the JSON of a cursor without creating the object, because each notification has one."""
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
    if not _is_revision(revision) or not _is_valid_text(digest) or len(digest) > _MAX_DIGEST:
        return None
    return Version(revision, digest)


def _is_valid_text(given: Any) -> TypeGuard[str]:
    # Some parsers accept an unpaired surrogate, which cannot be encoded.
    return isinstance(given, str) and is_unicode(given)


def _is_revision(given: Any) -> TypeGuard[int]:
    return isinstance(given, int) and not isinstance(given, bool) and 0 <= given < _MAX_REVISION
