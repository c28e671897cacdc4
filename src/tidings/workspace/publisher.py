"""The publisher of a workspace: the SDK's registries and the catalog get loaded items in one commit.

So no client sees an incomplete list. The resource `tidings://errors` contains the problems of the files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resources import FunctionResource

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.sdk import internals
from tidings.workspace.items import ItemKey, ItemTable, LoadedItem, UnitContent
from tidings.workspace.problems import ERRORS, Problem, digest_problems
from tidings.workspace.scanner import LoadedUnit
from tidings.workspace.settings import read_tool_allowlist
from tidings.workspace.units import REGISTER, Unit

__all__ = ["Publisher"]

logger = logging.getLogger(__name__)

_SERVES_NOTHING = Problem(
    ".",
    None,
    "this folder serves nothing yet; add a file to tools/, prompts/ or resources/, or create examples with "
    "`tidings new DIR`",
)


class Publisher:
    """The items that a workspace serves."""

    def __init__(self, server: MCPServer[Any]) -> None:
        allowed_tools = read_tool_allowlist()
        if allowed_tools is not None:
            logger.info(
                "MCPBASH_TOOL_ALLOWLIST is set; no other tools are served: %s", ", ".join(sorted(allowed_tools))
            )
        self._table = ItemTable(allowed_tools)
        self._server = server
        self._catalog: Catalog | None = None
        self._changed: set[ItemKey] = set()
        """The keys whose served item may differ after the next commit."""
        self._served: dict[ItemKey, LoadedItem] = {}
        """The items in the SDK's registries and in the catalog. It changes together with them."""
        self.problems: tuple[Problem, ...] = ()
        """The problems that `tidings://errors` contains."""
        errors = FunctionResource.from_function(
            lambda: "\n".join(map(str, self.problems)),
            uri=ERRORS,
            name="errors",
            title="Errors of this workspace",
            description="Files that are not served as they are, and why. Empty if there are none.",
            mime_type="text/plain",
        )
        internals.registry_of(server, "resources")[ERRORS] = errors
        self._errors = LoadedItem(errors)

    def watch(self, catalog: Catalog) -> None:
        """Update the catalog from now on."""
        self._catalog = catalog
        resources = catalog.resources
        etags = self._list_etags()
        with catalog.batch():
            # The store may contain resources from an earlier run of the server.
            for uri in sorted({item.key for item in resources.snapshot()} | resources.contents().keys()):
                if uri not in etags and (Feature.RESOURCES, uri) not in self._served and uri != ERRORS:
                    resources.deleted(uri)
            for uri, etag in etags.items():
                resources.updated(uri, etag=etag)
            if self.problems or resources.content(ERRORS).revision:
                resources.updated(ERRORS, etag=digest_problems(self.problems))

    def read_items(self, feature: Feature) -> list[dict[str, Any]]:
        # Not the lock for loading: that is held while the catalog's is taken, and a caller may hold the catalog's.
        with self._catalog.lock if self._catalog is not None else nullcontext():
            definitions = [item.definition for (of, _), item in self._served.items() if of is feature]
        return definitions + ([self._errors.definition] if feature is Feature.RESOURCES else [])

    def replace(self, unit: Unit, old: UnitContent, new: UnitContent) -> None:
        """Replace the items of a unit in the next commit."""
        self._changed |= self._table.replace(unit, old.items, new.items)
        if unit == REGISTER:
            self._changed |= self._table.set_exclusive(new.exclusive)

    def commit(self, units: Mapping[Unit, LoadedUnit], *, may_be_empty: bool) -> None:
        """Update the SDK's registries, the catalog and the problems. `units` are all loaded units.

        Without `may_be_empty`, it is a problem if they serve nothing."""
        problems = self._find_problems(units, may_be_empty)
        self._log_problems(units, problems)
        keys, self._changed = self._changed, set()
        previous = [item for key in keys if (item := self._served.get(key)) is not None]
        if self._catalog is None:
            self._register(keys)
            self.problems = problems
            return
        with self._catalog.batch():
            self._register(keys)
            for feature, key in sorted(keys, key=lambda each: (each[0].value, each[1])):
                item = self._served.get((feature, key))
                items = self._catalog.items(feature)
                if item is not None:
                    items.add(item.definition, replace=True)
                    for uri, etag in item.etags.items():
                        self._catalog.resources.updated(uri, etag=etag)
                elif key in items:
                    items.remove(key)
            present = {uri for key in keys if (served := self._served.get(key)) for uri in served.etags}
            removed = {uri for item in previous for uri in item.etags} - present
            for uri in sorted(removed.difference(self._list_etags()) if removed else ()):
                self._catalog.resources.deleted(uri)
            if problems != self.problems:
                self.problems = problems
                self._catalog.resources.updated(ERRORS, etag=digest_problems(problems))

    def _find_problems(self, units: Mapping[Unit, LoadedUnit], may_be_empty: bool) -> tuple[Problem, ...]:
        problems = self._table.list_conflicts()
        for unit, loaded in units.items():
            if loaded.problem is not None:
                problems.append(loaded.problem)
            elif not self._table.is_replaced(unit):
                problems += loaded.content.problems
        serves_something = self._table.serves_items() or any(loaded.content.event for loaded in units.values())
        if not (problems or may_be_empty or serves_something):
            problems = [_SERVES_NOTHING]
        return tuple(sorted(problems, key=str))

    def _log_problems(self, units: Mapping[Unit, LoadedUnit], problems: tuple[Problem, ...]) -> None:
        """Log each new problem, and each file that has none any more."""
        kept = {loaded.problem for loaded in units.values() if loaded.content.items}
        for problem in problems:
            if problem not in self.problems:
                logger.warning("%s%s", problem, "; its last good version is still served" if problem in kept else "")
        fixed = {problem.path for problem in self.problems} - {problem.path for problem in problems}
        for path in sorted(fixed - {_SERVES_NOTHING.path}):
            logger.info("%s has no problem any more", path)

    def _list_etags(self) -> dict[str, str]:
        """Return the etags of all contents that are served, by URI."""
        return {uri: etag for item in self._served.values() for uri, etag in item.etags.items()}

    def _register(self, keys: set[ItemKey]) -> None:
        """Put the served items into the SDK's registries, and remove the others."""
        for feature, key in keys:
            item = self._table.find_served((feature, key))
            if item is not None:
                self._served[feature, key] = item
            else:
                self._served.pop((feature, key), None)
            names = ("resources", "templates") if feature is Feature.RESOURCES else (feature.value,)
            for name in names:
                registry = internals.registry_of(self._server, name)
                if item is not None and item.registry == name:
                    registry[key] = item.component
                else:
                    registry.pop(key, None)
