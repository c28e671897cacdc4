"""Resources: the files below `resources/`, and their `.meta.json`.

A file without metadata has the URI `workspace:///PATH`. `notes.meta.json` beside `notes.txt` may set its name, `uri`,
`mimeType` and so on. Files outside the workspace are never read.
"""

from __future__ import annotations

import errno
import mimetypes
import os
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import anyio
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.server.mcpserver.resources import Resource

from tidings.workspace.items import LoadedItem
from tidings.workspace.metadata import META_SUFFIX, get_display_fields, require_inside
from tidings.workspace.problems import InvalidFile, make_model
from tidings.workspace.reading import open_inside, read_inside
from tidings.workspace.settings import Settings

__all__ = ["FileResource", "compute_etag", "find_described", "get_uri_path", "guess_mime_type", "make_resource"]

_MAX_HASHED = 64 << 20
"""Bytes. The etag of a larger file is its size and time: a superfluous notification costs less than reading it."""

_COMPRESSED = {"gzip": "application/gzip", "bzip2": "application/x-bzip2", "xz": "application/x-xz"}
"""The MIME type of a compressed file is that of the compression: `notes.txt.gz` is not text."""


def make_resource(
    root: Path, settings: Settings, path: Path, meta: dict[str, Any], meta_path: Path | None = None
) -> LoadedItem:
    name = path.relative_to(root).as_posix().removeprefix("resources/")
    resource = make_model(
        FileResource,
        meta_path or path,
        uri=str(meta.get("uri") or f"workspace:///{quote(name)}"),
        name=str(meta.get("name") or name),
        mime_type=str(meta.get("mimeType") or guess_mime_type(root, path)),
        path=path,
        root=root,
        max_bytes=settings.resources_max_bytes,
        **get_display_fields(meta),
    )
    return LoadedItem(resource, etags={str(resource.uri): compute_etag(root, path)}, files=(path,))


def compute_etag(root: Path, path: Path) -> str:
    with open_inside(root, path) as file:
        state = os.fstat(file.fileno())
        if state.st_size > _MAX_HASHED:
            return f"{state.st_size}-{state.st_mtime_ns}"
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


class FileResource(Resource):
    """A file that is read on each request: as text if it is UTF-8, else as bytes."""

    path: Path
    root: Path
    max_bytes: int

    @property
    def size(self) -> int | None:
        try:
            return self.path.stat().st_size
        except OSError:
            return None

    async def read(self) -> str | bytes:
        return await anyio.to_thread.run_sync(self._read)

    def _read(self) -> str | bytes:
        try:
            content = read_inside(self.root, self.path, self.max_bytes)
        except FileNotFoundError:
            raise ResourceNotFoundError(f"Unknown resource: {self.uri}") from None
        except OSError as error:
            hint = "; [resources] max_bytes in tidings.toml can raise it" if error.errno == errno.EFBIG else ""
            raise ResourceError(f"{self.uri} can't be read: {error.strerror}{hint}") from None
        if self.mime_type == "application/octet-stream":
            return content
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return content


def find_described(root: Path, meta: dict[str, Any], meta_path: Path, others: list[Path]) -> Path:
    """Return the file that a `.meta.json` describes: by `path`, by its own name, or by a `file://` URI."""
    provider = meta.get("provider", "file")
    if provider != "file":
        raise InvalidFile(meta_path, f"provider {provider!r} is not supported; only 'file' is")
    same_name = meta_path.with_name(meta_path.name.removesuffix(META_SUFFIX))
    path: Path | str
    if "path" in meta:
        path = str(meta["path"])
    elif same_name in others:
        path = same_name
    elif len(others) == 1:
        path = others[0]
    elif str(meta.get("uri", "")).startswith("file://"):
        path = get_uri_path(str(meta["uri"]))
        if not Path(path).is_relative_to(root):
            path = root / path.lstrip("/")
    else:
        raise InvalidFile(meta_path, "describes no file; name one in path, or put one of the same name beside it")
    return require_inside(root, path, meta_path)


def get_uri_path(uri: str) -> str:
    """Return the path of a `file://` URI; it may be relative (`file://./resources/a.txt`)."""
    parts = urlsplit(uri)
    return unquote(parts.netloc + parts.path)


def guess_mime_type(root: Path, path: Path) -> str:
    guessed, encoding = mimetypes.guess_type(path.name)
    if encoding:
        return _COMPRESSED.get(encoding, "application/octet-stream")
    if guessed:
        return guessed
    try:
        with open_inside(root, path) as file:
            file.read(4096).decode("utf-8")
    except UnicodeDecodeError as error:
        # The sample may end inside a character.
        return "text/plain" if error.start > 4090 else "application/octet-stream"
    except OSError:
        return "application/octet-stream"
    return "text/plain"
