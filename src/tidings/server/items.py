"""`live.tools`, `live.prompts` and `live.resources`: changes that every client is told of, whatever the server is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidings.core.model import Change, Feature

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["LiveItems", "LiveResources"]


class LiveItems:
    """`live.tools` and `live.prompts`: changes that every client is told of.

    Each looks at what is there and changes it with the catalog's lock, as one thing, whatever other threads change."""

    def __init__(self, live: Live, feature: Feature) -> None:
        self._live = live
        self._feature = feature

    def add(self, thing: Any, *, replace: bool = False, **options: Any) -> None:
        """Add a function, with the options of the server's own decorator, or an item of the server's own class.

        A low-level server takes a definition, and `handler=`.
        """
        with self._live.catalog.lock:
            self._live.source.add(self._feature, thing, replace=replace, **options)

    def remove(self, key: str) -> None:
        with self._live.catalog.lock:
            self._live.source.remove(self._feature, key)

    def update(self, key: str, fields: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Change only the fields given."""
        with self._live.catalog.lock:
            self._live.source.update(self._feature, key, {**(fields or {}), **more})

    def __contains__(self, key: object) -> bool:
        return key in self._live.catalog.items(self._feature)

    def __len__(self) -> int:
        return len(self._live.catalog.items(self._feature))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._live.catalog.items(self._feature))


class LiveResources(LiveItems):
    """`live.resources`: the list, and the contents behind it."""

    def __init__(self, live: Live) -> None:
        super().__init__(live, Feature.RESOURCES)

    def updated(self, uri: str, *, etag: str | None = None, **metadata: Any) -> Sequence[Change]:
        """The content of `uri` is another one: its subscribers are told."""
        return self._live.catalog.resources.updated(self._live.source.address(uri), etag=etag, **metadata)

    def deleted(self, uri: str) -> Sequence[Change]:
        """The resource is gone: its subscribers are told, and it leaves the list.

        What a low-level server's own handler lists comes back when that has once not listed it, and lists it again."""
        uri = self._live.source.address(uri)
        with self._live.catalog.batch() as changes:
            if uri in self:
                self._live.source.delete(uri)
            self._live.catalog.resources.deleted(uri)
        return changes
