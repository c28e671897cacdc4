"""Resources: any file below `resources/`, what a `.meta.json` says of it, and templates of URIs.

A file without a word about it is `workspace:///` and its path. `notes.meta.json` beside `notes.txt` may give it a
name, a `uri`, a `mimeType` and so on; with a `uriTemplate` and a `path` of the same variables it stands for many files.
Nothing outside the workspace is ever read.
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

from tidings.workspace.loader import META, is_ignored
from tidings.workspace.metadata import read_meta
from tidings.workspace.problems import Broken, broken_by
from tidings.workspace.units import Piece, piece_of

__all__ = ["FileContent", "etag_of", "load_resources", "resource_piece", "template_piece"]

_HASHED = 64 << 20
"""A larger file's etag is its size and time: reading it whole at every change costs more than a notice too many."""

_ENCODED = {"gzip": "application/gzip", "bzip2": "application/x-bzip2", "xz": "application/x-xz"}
"""What is packed is of its packing's kind, whatever is inside: `notes.txt.gz` is no text."""

_FIELDS = ("title", "description", "annotations", "icons", "_meta")


def load_resources(root: Path, files: list[Path]) -> list[Piece]:
    metas = [path for path in files if path.name.endswith(META)]
    others = [path for path in files if not path.name.endswith(META)]
    pieces: list[Piece] = []
    described: set[Path] = set()
    for meta_path in metas:
        meta = read_meta(meta_path)
        if "uriTemplate" in meta:
            pieces.append(template_piece(root, meta, meta_path))
            continue
        path = _described_file(root, meta, meta_path, others)
        if path is not None:
            described.add(path)
            pieces.append(resource_piece(root, path, meta, meta_path))
    return pieces + [resource_piece(root, path, {}) for path in others if path not in described]


def resource_piece(root: Path, path: Path, meta: dict[str, Any], said_in: Path | None = None) -> Piece:
    relative = path.relative_to(root).as_posix()
    shown = relative.removeprefix("resources/")
    try:
        content = FileContent(
            uri=str(meta.get("uri") or f"workspace:///{quote(shown)}"),
            name=str(meta.get("name") or shown),
            mime_type=str(meta.get("mimeType") or _kind_of(path)),
            path=path,
            **{name.lstrip("_"): meta[name] for name in _FIELDS if meta.get(name) is not None},
        )
    except ValidationError as error:
        raise broken_by(error, said_in or path) from None
    return piece_of(content, etag=etag_of(path), files=(path,))


def etag_of(path: Path) -> str:
    state = path.stat()
    if state.st_size > _HASHED:
        return f"{state.st_size}-{state.st_mtime_ns}"
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


class FileContent(Resource):
    """A file, read when it is asked for: as text if it is UTF-8, as bytes otherwise."""

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


def template_piece(root: Path, meta: dict[str, Any], meta_path: Path) -> Piece:
    text = str(meta["uriTemplate"])
    try:
        template = UriTemplate.parse(text)
    except InvalidUriTemplate as error:
        raise Broken(meta_path, f"uriTemplate: {error}") from None
    names = [variable.name for variable in template.variables]
    if not names:
        raise Broken(meta_path, f"uriTemplate {text!r} has no variable; give it a uri instead")
    function = _reader(root, template, meta.get("path"), meta_path)
    try:
        component = ResourceTemplate.from_function(
            function,
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
        raise broken_by(error, meta_path) from None
    return piece_of(component)


def _reader(root: Path, template: UriTemplate, path: Any, meta_path: Path) -> Callable[..., Any]:
    names = [variable.name for variable in template.variables]
    pattern = str(path) if path is not None else None

    async def read(**variables: Any) -> str | bytes:
        if pattern is not None:
            place = re.sub(r"\{(\w+)\}", lambda found: str(variables.get(found[1], "")), pattern)
        else:
            place = _path_of(template.expand(variables))
        uri = template.expand(variables)
        target = root
        with suppress(OSError, ValueError):  # no file could have such a name
            target = (root / place.lstrip("/")).resolve()
        if not _is_reached(root, target):
            raise ResourceNotFoundError(f"Unknown resource: {uri}")
        return await FileContent(uri=uri, name=target.name, mime_type=_kind_of(target), path=target).read()

    # The SDK reads a template's variables from the signature of its function.
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, annotation=str) for name in names]
    read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    read.__annotations__ = dict.fromkeys(names, str)
    return read


def _is_reached(root: Path, target: Path) -> bool:
    """Whether it may be read by whoever names it: no hidden file, of which the state is one, and holds secrets."""
    try:
        return target.is_file() and not any(map(is_ignored, target.relative_to(root).parts))
    except (OSError, ValueError):
        return False


def _described_file(root: Path, meta: dict[str, Any], meta_path: Path, others: list[Path]) -> Path | None:
    """The file that a `.meta.json` speaks of: named in it, in its URI, or beside it."""
    provider = meta.get("provider", "file")
    if provider != "file":
        raise Broken(meta_path, f"provider {provider!r} is not served; only files are")
    exact = meta_path.with_name(meta_path.name[: -len(META)])
    if "path" in meta:
        path = meta_path.parent / str(meta["path"])
    elif exact in others:
        path = exact
    elif len(others) == 1:
        path = others[0]
    elif str(meta.get("uri", "")).startswith("file://"):
        path = root / _path_of(str(meta["uri"])).lstrip("/")
    else:
        raise Broken(meta_path, "which file does it speak of? Name it in path, or put one beside it")
    resolved = path.resolve()
    if not resolved.is_relative_to(root):
        raise Broken(meta_path, f"{path.name!r} leads out of the workspace")
    if not resolved.is_file():
        raise Broken(meta_path, f"there is no file {path.name!r}")
    return resolved


def _path_of(uri: str) -> str:
    """The path in a `file://` URI, relative ones (`file://./resources/a.txt`) included."""
    split = urlsplit(uri)
    return unquote(split.netloc + split.path)


def _kind_of(path: Path) -> str:
    guessed, encoding = mimetypes.guess_type(path.name)
    if encoding:
        return _ENCODED.get(encoding, "application/octet-stream")
    if guessed:
        return guessed
    try:
        with path.open("rb") as file:
            file.read(4096).decode("utf-8")
    except UnicodeDecodeError as error:
        # A character that is cut off at the end of the sample is no sign of anything.
        return "text/plain" if error.start > 4090 else "application/octet-stream"
    except OSError:
        return "application/octet-stream"
    return "text/plain"
