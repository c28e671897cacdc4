"""URI templates: one `.meta.json` with a `uriTemplate` serves many files.

`path` has the same variables as the template, and is relative to the workspace. Without it, the path of the URI is that
of the file. A template works in both directions: from a URI to the file that a client reads, and from a file that has
changed to the URI that clients watch.
"""

from __future__ import annotations

import mimetypes
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlsplit

import anyio
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp.server.mcpserver.resources import DEFAULT_RESOURCE_SECURITY, ResourceTemplate
from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate

from tidings.workspace.files import is_ignored, load_ignore_rules, read_state, walk
from tidings.workspace.items import LoadedItem
from tidings.workspace.metadata import get_display_fields
from tidings.workspace.problems import InvalidFile, invalid_field, make_model
from tidings.workspace.reading import resolve_links
from tidings.workspace.resources import FileResource, compute_etag, get_uri_path, guess_mime_type
from tidings.workspace.settings import Settings

__all__ = ["FileTemplate", "make_template"]

_MAX_FILES = 10_000
"""Files of one template whose changes are noticed. A template for a whole disk must not make each scan read it."""

_TIME_RESOLUTION = 2.0
"""Seconds in which two edits may leave the same change time, on any file system."""

_SHARED_FIELDS = ("name", "title", "description", "annotations", "icons", "meta", "root", "max_bytes")
"""The fields that the resources of a template have from it."""

_VARIABLE = re.compile(r"\{\+?(\w+)\}")


class FileTemplate(ResourceTemplate):
    """A template whose resources are files of the workspace."""

    root: Path
    max_bytes: int
    path: str | None
    """The path of the files, with the variables of the template."""
    guesses_mime_type: bool

    async def create_resource(self, uri: str, params: dict[str, Any], context: object) -> FileResource:
        path = self.find_file(params)
        if path is None:
            raise ResourceNotFoundError(f"Unknown resource: {uri}")
        mime_type = self.mime_type
        if self.guesses_mime_type:
            mime_type = await anyio.to_thread.run_sync(guess_mime_type, self.root, path)
        return FileResource(
            uri=uri,
            mime_type=mime_type,
            path=path,
            **{name: getattr(self, name) for name in _SHARED_FIELDS},
        )

    def find_file(self, variables: dict[str, Any]) -> Path | None:
        """Return the file for the values of the variables; None if there is none that a client may read."""
        with suppress(OSError, ValueError):  # no file can have this name
            target = resolve_links(self.root / self._expand_path(variables))
            # Hidden files are not public: `.env` and `.tidings` contain secrets.
            relative = target.relative_to(self.root)
            if target.is_file() and not any(map(is_ignored, relative.parts)):
                return None if load_ignore_rules(self.root)(relative.as_posix()) else target
        return None

    def find_uri(self, path: PurePosixPath) -> str | None:
        """Return the URI of a file, given its path relative to the workspace; None if the template does not serve it.

        A file with several URIs has the one without optional variables."""
        for uri in self._list_candidates(str(path)):
            variables = self.parsed_template.match(uri)
            if variables is None or self.security.validate(variables) is not None:
                continue
            if self._expand_path(variables) == str(path):
                return self.parsed_template.expand(variables)
        return None

    def _expand_path(self, variables: Mapping[str, Any]) -> str:
        if self.path is None:
            path = get_uri_path(self.parsed_template.expand(variables))
        else:
            path = _VARIABLE.sub(lambda found: str(variables.get(found[1], "")), self.path)
        return path.lstrip("/")

    def _list_candidates(self, path: str) -> list[str]:
        if self.path is None:
            scheme = urlsplit(self.uri_template).scheme
            return [f"{scheme}://{quote(path)}", f"{scheme}:///{quote(path)}"]
        values = re.fullmatch(self._path_expression, path)
        return [self.parsed_template.expand(values.groupdict())] if values else []

    @property
    def _path_expression(self) -> str:
        """A regular expression that matches the path of a file, with a group for each variable."""
        start, *parts = _VARIABLE.split((self.path or "").lstrip("/"))
        expression, names = re.escape(start), parts[::2]
        for number, (name, text) in enumerate(zip(names, parts[1::2], strict=True)):
            expression += f"(?P={name})" if name in names[:number] else f"(?P<{name}>.+)"
            expression += re.escape(text)
        return expression

    @property
    def folder(self) -> Path:
        """The folder that contains all files of the template."""
        path = self.path if self.path is not None else get_uri_path(self.uri_template)
        fixed, variable, _ = path.lstrip("/").partition("{")
        return self.root / (fixed.rpartition("/")[0] if variable else PurePosixPath(fixed).parent)

    def list_etags(self) -> dict[str, str]:
        """Return the etags of the files that exist now, by URI."""
        etags: dict[str, str] = {}
        folder = self.folder.relative_to(self.root).as_posix()
        for path in islice(walk(self.root, "" if folder == "." else folder, top_level=None), _MAX_FILES):
            if (uri := self.find_uri(path)) is not None:
                with suppress(OSError):  # removed in the meantime
                    etags[uri] = _get_etag(self.root, self.root / path)
        return etags


def _get_etag(root: Path, path: Path) -> str:
    """Return the etag of a file. Read only files that have changed: a template may have many."""
    state = read_state(path)
    if time.time() - path.stat().st_ctime < _TIME_RESOLUTION:
        return compute_etag(root, path)
    return _cached_etag(root, path, state)


@lru_cache(maxsize=4 * _MAX_FILES)
def _cached_etag(root: Path, path: Path, state: tuple[Any, ...]) -> str:
    return compute_etag(root, path)


def make_template(root: Path, settings: Settings, meta: dict[str, Any], meta_path: Path) -> LoadedItem:
    text = str(meta["uriTemplate"])
    try:
        parsed = UriTemplate.parse(text)
    except InvalidUriTemplate as error:
        raise InvalidFile(meta_path, f"uriTemplate: {error}") from None
    if not parsed.variables:
        raise InvalidFile(meta_path, f"uriTemplate {text!r} has no variable; use uri instead")
    for name in re.findall(r"\{\+?(.*?)\}", str(meta.get("path") or "")):
        if name not in parsed.variable_names:
            raise invalid_field(meta_path, "path", f"{{{name}}} is not a variable of the uriTemplate {text!r}")
    template = make_model(
        FileTemplate,
        meta_path,
        root=root,
        max_bytes=settings.resources_max_bytes,
        path=None if meta.get("path") is None else str(meta["path"]),
        guesses_mime_type=not meta.get("mimeType"),
        uri_template=text,
        parsed_template=parsed,
        name=str(meta.get("name") or text),
        mime_type=meta.get("mimeType") or mimetypes.guess_type(meta.get("path") or text)[0] or "text/plain",
        **{"description": "", **get_display_fields(meta)},
        fn=lambda: None,  # not called: `create_resource` reads the file
        parameters={},
        context_kwarg=None,
        security=DEFAULT_RESOURCE_SECURITY,
    )
    if not resolve_links(template.folder).is_relative_to(root):
        raise invalid_field(meta_path, "path", "the files of this template are outside the workspace")
    return LoadedItem(template, etags=template.list_etags(), folder=template.folder)
