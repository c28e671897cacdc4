"""Pages for MCP Apps: `ui/NAME/index.html`, and `ui/index.html` in the folder of a tool.

A page is a resource with the URI `ui://SERVER/NAME`. `ui.meta.json` beside it may set its `entrypoint`, `title`,
`description` and `meta` (`csp`, `permissions`, `prefersBorder`). Pages that a `template` generates are not supported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidings.workspace.files import find_inside
from tidings.workspace.items import LoadedItem
from tidings.workspace.metadata import read_meta
from tidings.workspace.resources import make_resource
from tidings.workspace.settings import Settings

__all__ = ["link_page", "load_page"]


def load_page(root: Path, settings: Settings, folder: Path, files: list[Path], name: str) -> LoadedItem | None:
    """Return the page in `folder`, or None if it has none."""
    meta_path = folder / "ui.meta.json"
    meta = read_meta(root, meta_path) if meta_path in files else {}
    path = find_inside(root, folder / str(meta.get("entrypoint") or "index.html"))
    if path is None or not path.is_relative_to(folder.resolve()):
        return None
    given = meta.get("meta")
    options = given if isinstance(given, dict) else {}
    described = {
        "uri": f"ui://{settings.name}/{name}",
        "name": name,
        "title": meta.get("title"),
        "description": meta.get("description") or f"UI resource for {name}",
        "mimeType": "text/html;profile=mcp-app",
        "_meta": {"ui": {"csp": {}, "permissions": {}, "prefersBorder": True} | options},
    }
    return make_resource(root, settings, path, described, meta_path if meta else None)


def link_page(meta: dict[str, Any], page: LoadedItem) -> dict[str, Any]:
    """Return the metadata of a tool with a link to its page, unless it has one."""
    given = meta.get("_meta")
    own = given if isinstance(given, dict) else {}
    return meta | {"_meta": {"ui": {"resourceUri": page.key, "visibility": ["model", "app"]}} | own}
