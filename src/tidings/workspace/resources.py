"""Resources: the files below `resources/`, their `.meta.json`, and URI templates.

A file without metadata has the URI `workspace:///PATH`. `notes.meta.json` beside `notes.txt` may set its name, `uri`,
`mimeType` and so on. With a `uriTemplate`, and a `path` with the same variables, it describes many files. Files outside
the workspace are never read.
"""

from __future__ import annotations

import inspect
import mimetypes
import re
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import anyio
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp.server.mcpserver.resources import Resource, ResourceTemplate
from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate
from pydantic import ValidationError

from tidings.workspace.files import is_ignored
from tidings.workspace.items import LoadedItem, make_item
from tidings.workspace.metadata import META_SUFFIX, read_meta, require_inside, split_meta
from tidings.workspace.problems import InvalidFile, invalid_model

__all__ = ["FileResource", "compute_etag", "load_resources", "make_resource", "make_template"]

_MAX_HASHED = 64 << 20
"""Bytes. The etag of a larger file is its size and time: a superfluous notification costs less than reading it."""

_COMPRESSED = {"gzip": "application/gzip", "bzip2": "application/x-bzip2", "xz": "application/x-xz"}
"""The MIME type of a compressed file is that of the compression: `notes.txt.gz` is not text."""

_OPTIONAL_FIELDS = ("title", "description", "annotations", "icons", "_meta")


def load_resources(root: Path, files: list[Path]) -> list[LoadedItem]:
    metas, others = split_meta(files)
    items: list[LoadedItem] = []
    described: set[Path] = set()
    for meta_path in metas:
        meta = read_meta(meta_path)
        if "uriTemplate" in meta:
            items.append(make_template(root, meta, meta_path))
        else:
            path = _find_described(root, meta, meta_path, others)
            described.add(path)
            items.append(make_resource(root, path, meta, meta_path))
    return items + [make_resource(root, path, {}) for path in others if path not in described]


def make_resource(root: Path, path: Path, meta: dict[str, Any], meta_path: Path | None = None) -> LoadedItem:
    name = path.relative_to(root).as_posix().removeprefix("resources/")
    try:
        resource = FileResource(
            uri=str(meta.get("uri") or f"workspace:///{quote(name)}"),
            name=str(meta.get("name") or name),
            mime_type=str(meta.get("mimeType") or _guess_mime_type(path)),
            path=path,
            **{field.lstrip("_"): meta[field] for field in _OPTIONAL_FIELDS if meta.get(field) is not None},
        )
    except ValidationError as error:
        raise invalid_model(meta_path or path, error) from None
    return make_item(resource, etag=compute_etag(path), files=(path,))


def compute_etag(path: Path) -> str:
    state = path.stat()
    if state.st_size > _MAX_HASHED:
        return f"{state.st_size}-{state.st_mtime_ns}"
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


class FileResource(Resource):
    """A file that is read on each request: as text if it is UTF-8, else as bytes."""

    path: Path

    @property
    def size(self) -> int | None:
        try:
            return self.path.stat().st_size
        except OSError:
            return None

    async def read(self) -> str | bytes:
        try:
            content = await anyio.to_thread.run_sync(self.path.read_bytes)
        except FileNotFoundError:
            raise ResourceNotFoundError(f"Unknown resource: {self.uri}") from None
        if self.mime_type == "application/octet-stream":
            return content
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return content


def make_template(root: Path, meta: dict[str, Any], meta_path: Path) -> LoadedItem:
    text = str(meta["uriTemplate"])
    try:
        template = UriTemplate.parse(text)
    except InvalidUriTemplate as error:
        raise InvalidFile(meta_path, f"uriTemplate: {error}") from None
    if not template.variables:
        raise InvalidFile(meta_path, f"uriTemplate {text!r} has no variable; use uri instead")
    try:
        component = ResourceTemplate.from_function(
            _make_reader(root, template, meta.get("path")),
            uri_template=text,
            name=str(meta.get("name") or text),
            title=meta.get("title"),
            description=meta.get("description"),
            mime_type=meta.get("mimeType") or "application/octet-stream",
            annotations=meta.get("annotations"),
            icons=meta.get("icons"),
            meta=meta.get("_meta"),
        )
    except ValidationError as error:
        raise invalid_model(meta_path, error) from None
    return make_item(component)


def _make_reader(root: Path, template: UriTemplate, path_pattern: Any) -> Callable[..., Any]:
    async def read(**variables: Any) -> str | bytes:
        uri = template.expand(variables)
        if path_pattern is not None:
            path = re.sub(r"\{(\w+)\}", lambda found: str(variables.get(found[1], "")), str(path_pattern))
        else:
            path = _get_uri_path(uri)
        target = root
        with suppress(OSError, ValueError):  # no file can have this name
            target = (root / path.lstrip("/")).resolve()
        if not _is_public(root, target):
            raise ResourceNotFoundError(f"Unknown resource: {uri}")
        return await FileResource(uri=uri, name=target.name, mime_type=_guess_mime_type(target), path=target).read()

    # The SDK takes a template's variables from the signature of its function.
    names = [variable.name for variable in template.variables]
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=str) for name in names]
    read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    read.__annotations__ = dict.fromkeys(names, str)
    return read


def _is_public(root: Path, target: Path) -> bool:
    """Return whether a client may read the file. Hidden files are not public: `.env` and `.tidings` contain secrets."""
    try:
        return target.is_file() and not any(map(is_ignored, target.relative_to(root).parts))
    except (OSError, ValueError):
        return False


def _find_described(root: Path, meta: dict[str, Any], meta_path: Path, others: list[Path]) -> Path:
    """Return the file that a `.meta.json` describes: by `path`, by its own name, or by a `file://` URI."""
    provider = meta.get("provider", "file")
    if provider != "file":
        raise InvalidFile(meta_path, f"provider {provider!r} is not supported; only 'file' is")
    same_name = meta_path.with_name(meta_path.name.removesuffix(META_SUFFIX))
    if "path" in meta:
        path = meta_path.parent / str(meta["path"])
    elif same_name in others:
        path = same_name
    elif len(others) == 1:
        path = others[0]
    elif str(meta.get("uri", "")).startswith("file://"):
        path = root / _get_uri_path(str(meta["uri"])).lstrip("/")
    else:
        raise InvalidFile(meta_path, "describes no file; name one in path, or put one of the same name beside it")
    return require_inside(root, path, meta_path)


def _get_uri_path(uri: str) -> str:
    """Return the path of a `file://` URI; it may be relative (`file://./resources/a.txt`)."""
    parts = urlsplit(uri)
    return unquote(parts.netloc + parts.path)


def _guess_mime_type(path: Path) -> str:
    guessed, encoding = mimetypes.guess_type(path.name)
    if encoding:
        return _COMPRESSED.get(encoding, "application/octet-stream")
    if guessed:
        return guessed
    try:
        with path.open("rb") as file:
            file.read(4096).decode("utf-8")
    except UnicodeDecodeError as error:
        # The sample may end inside a character.
        return "text/plain" if error.start > 4090 else "application/octet-stream"
    except OSError:
        return "application/octet-stream"
    return "text/plain"
