"""Items loaded from files, and the table that selects one of several items with the same key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp.server.mcpserver.prompts.base import Prompt
from mcp.server.mcpserver.resources import ResourceTemplate
from mcp.server.mcpserver.tools.base import Tool

from tidings.core.model import Feature
from tidings.events.types import EventType
from tidings.sdk.definitions import as_dict, key_of, to_definition
from tidings.workspace.problems import Problem
from tidings.workspace.units import Unit

__all__ = ["ItemKey", "ItemTable", "LoadedItem", "UnitContent"]

ItemKey = tuple[Feature, str]


@dataclass(slots=True)
class LoadedItem:
    component: Any
    """The object that the SDK's `MCPServer` keeps in its registry."""
    etags: Mapping[str, str] = field(default_factory=dict)
    """The etags of the contents that the item serves, by URI: one for a resource, any number for a template."""
    files: tuple[Path, ...] = ()
    """The files that the item is loaded from, inside the unit or not."""
    folder: Path | None = None
    """The folder of a template's files. A file that is added there changes `etags`."""
    feature: Feature = field(init=False, default=Feature.RESOURCES)
    key: str = field(init=False)
    definition: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.component, Tool | Prompt):
            self.feature = Feature.TOOLS if isinstance(self.component, Tool) else Feature.PROMPTS
        self.key = key_of(self.component)
        self.definition = as_dict(to_definition(self.component))

    @property
    def registry(self) -> str:
        """The name of the registry of `MCPServer`."""
        return "templates" if isinstance(self.component, ResourceTemplate) else self.feature.value


@dataclass(frozen=True, slots=True)
class UnitContent:
    """The items of a unit."""

    items: list[LoadedItem] = field(default_factory=list)
    exclusive: frozenset[str] = frozenset()
    """The registries of `MCPServer` that serve only these items, and none of other units."""
    event: EventType | None = None
    """The event type that the unit declares."""
    problems: tuple[Problem, ...] = ()
    """Files that look like tools but are not served. They do not affect the items."""

    @property
    def folders(self) -> set[Path]:
        """The folders of the files that templates serve."""
        return {item.folder for item in self.items if item.folder is not None}


class ItemTable:
    """The items of all units by key.

    If several units define the same key, `find_served` selects the registered item, or else the first by path.
    """

    def __init__(self, allowed_tools: frozenset[str] | None = None) -> None:
        """Create an empty table. It serves only the tools in `allowed_tools`, or all tools if that is None."""
        self._allowed_tools = allowed_tools
        self._units_by_key: dict[ItemKey, dict[Unit, LoadedItem]] = {}
        self._ambiguous: set[ItemKey] = set()
        """The keys that more than one unit defines."""
        self._exclusive: frozenset[str] = frozenset()

    def replace(self, unit: Unit, old: Iterable[LoadedItem], new: Iterable[LoadedItem]) -> set[ItemKey]:
        """Replace the items of a unit. Return the keys whose served item may differ."""
        removed = {(item.feature, item.key) for item in old}
        added = {(item.feature, item.key): item for item in new}
        keys = removed | added.keys()
        for key in keys:
            items = self._units_by_key.setdefault(key, {})
            items.pop(unit, None)
            if key in added:
                items[unit] = added[key]
            if not items:
                del self._units_by_key[key]
            (self._ambiguous.add if len(items) > 1 else self._ambiguous.discard)(key)
        return keys

    def set_exclusive(self, registries: frozenset[str]) -> set[ItemKey]:
        """Set the registries that only serve registered items. Return the keys whose served item may differ."""
        has_changed, self._exclusive = registries != self._exclusive, registries
        return set(self._units_by_key) if has_changed else set()

    def is_replaced(self, unit: Unit) -> bool:
        """Return whether registered items replace all items of the unit's kind."""
        return unit.kind in self._exclusive

    def find_served(self, key: ItemKey) -> LoadedItem | None:
        if not (items := self._units_by_key.get(key)):
            return None
        feature, name = key
        if feature is Feature.TOOLS and self._allowed_tools is not None and name not in self._allowed_tools:
            return None
        unit = min(items, key=_rank)
        item = items[unit]
        return None if unit.kind != "register" and item.registry in self._exclusive else item

    def serves_items(self) -> bool:
        return any(map(self.find_served, self._units_by_key))

    def list_conflicts(self) -> list[Problem]:
        """Return a problem for each item that is not served because another unit has the same key."""
        found: list[Problem] = []
        for feature, key in self._ambiguous:
            served, *others = sorted(self._units_by_key[feature, key], key=_rank)
            if served.kind != "register":  # a registration replaces items on purpose
                message = f"{feature.singular} {key!r} is not served from here, because {served.key} defines it too"
                found += [Problem(other.key, None, f"{message}; rename one of them") for other in others]
        return found


def _rank(unit: Unit) -> tuple[bool, Unit]:
    return (unit.kind != "register", unit)
