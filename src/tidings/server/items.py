"""`live.tools`, `live.prompts` and `live.resources`: change the items of a server of any kind, and notify clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidings.core.catalog import Catalog
from tidings.core.model import Change, Feature
from tidings.errors import TidingsError
from tidings.sdk.source import Editor, Source

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["LiveItems", "LiveResources"]


class LiveItems:
    """`live.tools` and `live.prompts`.

    Each method holds the lock of the catalog, so that its check and its change are one operation for other threads."""

    def __init__(self, source: Source, catalog: Catalog, feature: Feature) -> None:
        self._source = source
        self._catalog = catalog
        self._feature = feature
        self._items = catalog.items(feature)

    def add(
        self, thing: Callable[..., Any] | BaseModel | Mapping[str, Any], *, replace: bool = False, **options: Any
    ) -> None:
        """Add a function, with the options of the server's own decorator, or an item of the server's own class.

        A low-level server takes a definition, and `handler=`.
        """
        with self._catalog.lock:
            self._editor.add(self._feature, thing, replace=replace, **options)

    def remove(self, key: str) -> None:
        with self._catalog.lock:
            self._editor.remove(self._feature, key)

    def update(self, key: str, fields: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Change only the given fields."""
        with self._catalog.lock:
            self._editor.update(self._feature, key, {**(fields or {}), **more})

    @property
    def _editor(self) -> Editor:
        if self._source.editor is None:
            raise TidingsError(f"{self._feature.value}: this server is a folder; add, edit or remove its files")
        return self._source.editor

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._items)


class LiveResources(LiveItems):
    """`live.resources`: the list, and the contents of the resources."""

    def __init__(self, source: Source, catalog: Catalog) -> None:
        super().__init__(source, catalog, Feature.RESOURCES)

    def updated(self, uri: str, *, etag: str | None = None, **metadata: Any) -> Sequence[Change]:
        """Notify the subscribers of `uri` that its content has changed.

        With an `etag`, only if it differs from the last one."""
        return self._catalog.resources.updated(self._source.normalize_uri(uri), etag=etag, **metadata)

    def deleted(self, uri: str) -> Sequence[Change]:
        """Notify the subscribers of `uri` that the resource is deleted, and remove it from the list.

        A resource that a low-level server's own handler lists comes back when the handler has left it out once and then
        lists it again."""
        uri = self._source.normalize_uri(uri)
        with self._catalog.batch() as changes:
            if uri in self:
                self._editor.delete(uri)
            self._catalog.resources.deleted(uri)
        return changes
