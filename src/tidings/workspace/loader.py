"""Loading of a unit: from its files to items."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tidings.workspace.events import load_event
from tidings.workspace.items import ItemKey, LoadedItem, UnitContent
from tidings.workspace.metadata import read_meta, split_meta
from tidings.workspace.problems import InvalidFile
from tidings.workspace.prompts import load_prompts
from tidings.workspace.resources import find_described, make_resource
from tidings.workspace.settings import Settings
from tidings.workspace.templates import make_template
from tidings.workspace.tools import load_tools
from tidings.workspace.ui import load_page
from tidings.workspace.units import Unit

__all__ = ["check_items", "load_content"]


def load_content(root: Path, settings: Settings, unit: Unit, files: list[Path]) -> UnitContent:
    match unit.kind:
        case "tools":
            return load_tools(root, settings, unit, files)
        case "resources":
            if unit.is_folder:
                page = load_page(root, settings, root / unit.key, files, (root / unit.key).name)
                return UnitContent([page] if page else [])
            return UnitContent(_load_resources(root, settings, files))
        case "events":
            return UnitContent(event=load_event(root, settings, files[0]))
    return UnitContent(load_prompts(root, files))


def _load_resources(root: Path, settings: Settings, files: list[Path]) -> list[LoadedItem]:
    metas, others = split_meta(files)
    items: list[LoadedItem] = []
    described: set[Path] = set()
    for meta_path in metas:
        meta = read_meta(root, meta_path)
        if "uriTemplate" in meta:
            items.append(make_template(root, settings, meta, meta_path))
        else:
            path = find_described(root, meta, meta_path, others)
            described.add(path)
            items.append(make_resource(root, settings, path, meta, meta_path))
    return items + [make_resource(root, settings, path, {}) for path in others if path not in described]


def check_items(items: Iterable[LoadedItem], path: Path, max_bytes: int) -> None:
    """Raise `InvalidFile` for an item that the catalog would reject with the items of all other units."""
    keys: set[ItemKey] = set()
    for item in items:
        try:
            size = len(msgspec.json.encode(item.definition))
        except UnicodeEncodeError as error:
            raise InvalidFile(path, f"{item.key!r} contains text that is not valid Unicode: {error.reason}") from None
        if size > max_bytes:
            message = f"{item.key!r} has {size} bytes of JSON; shorten it, or raise [policy] max_item_bytes"
            raise InvalidFile(path, message)
        if (item.feature, item.key) in keys:
            raise InvalidFile(path, f"{item.feature.singular} {item.key!r} is defined twice; rename one of them")
        keys.add((item.feature, item.key))
