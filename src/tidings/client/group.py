"""`MirrorGroup`: the lists of several servers as one, with the names of `namespace.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType, TracebackType
from typing import Any, Self

import mcp_types as types
from mcp.shared.uri_template import UriTemplate

from tidings.client.lists import ChangingLists
from tidings.client.mirror import Mirror, Status
from tidings.client.namespace import Owner, check_server_names, name_items, split_name
from tidings.client.snapshot import KEYS, ListName, Snapshot
from tidings.client.timing import Timing
from tidings.client.transport import Target
from tidings.errors import NotFound, first_error

__all__ = ["MirrorGroup"]

_NAMED: frozenset[ListName] = frozenset({"tools", "prompts"})
_SAME_NAMES: frozenset[ListName] = frozenset({"resources", "contents"})
"""A content has the name of its resource."""
_STATES = ("closed", "reconnecting", "stale", "polling", "fresh")


class MirrorGroup(ChangingLists):
    """Keep the lists of several servers current, from `async with` on.

    `servers` has a target, or a `Mirror` that is not entered, by the name of each server: letters, digits, `-`, single
    `_`. `timing` is for the targets.
    """

    def __init__(self, servers: Mapping[str, Mirror | Target], *, timing: Timing | None = None) -> None:
        super().__init__()
        check_server_names(servers)
        self.mirrors: Mapping[str, Mirror] = MappingProxyType(
            {
                name: server if isinstance(server, Mirror) else Mirror(server, timing=timing)
                for name, server in servers.items()
            }
        )
        self._seen = dict.fromkeys(servers, Snapshot())
        """The lists of each server that the group has published."""
        self._owners: dict[ListName, dict[str, Owner]] = {name: {} for name in self._snapshot.listings}
        self._opened = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def status(self) -> Status:
        """The status of the server that is the least current."""
        found = {name: mirror.status for name, mirror in self.mirrors.items()}
        if self._is_closed or not found:
            return Status("closed" if self._is_closed else "fresh")
        name, worst = min(found.items(), key=lambda each: _STATES.index(each[1].state))
        since = [status.stale_since for status in found.values() if status.stale_since is not None]
        return Status(worst.state, min(since, default=None), worst.reason and f"{name}: {worst.reason}")

    def resolve(self, name: str, list: ListName = "tools") -> tuple[Mirror, str]:
        """Return the mirror of the server that has an item, and the name, URI or URI template that it has there.

        A tool that no server lists is that of the server which the name names. A URI is that of the first server whose
        template fits, or else of the one which it names: `git+ssh:` may be a scheme, or a URI of the server `git`.
        """
        is_uri = list not in _NAMED
        owner = self._owners[list].get(name)
        if owner is None and is_uri:
            templates = [each for each in self._owners["templates"].values() if _fits(each.own, name)]
            owner = Owner(templates[0].server, name) if templates else None
        if owner is None:
            owner = split_name(name, self.mirrors, is_uri=is_uri)
        if owner is None:
            raise NotFound(f"{name!r} is of none of these servers: {', '.join(self.mirrors)}")
        return self.mirrors[owner.server], owner.own

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> types.CallToolResult:
        """Call a tool. `options` are those of `Client.call_tool`."""
        mirror, own = self.resolve(name)
        return await mirror.call(own, arguments, **options)

    async def __aenter__(self) -> Self:
        """Connect to all servers at once. Raise the error if one of the first connections fails."""
        async with AsyncExitStack() as opened:
            try:
                async with asyncio.TaskGroup() as opening:
                    for mirror in self.mirrors.values():
                        opening.create_task(opened.enter_async_context(mirror))
            except BaseExceptionGroup as group:
                raise first_error(group) from None
            for name, mirror in self.mirrors.items():
                self._update(name, mirror.snapshot())
                self._tasks.append(asyncio.create_task(self._follow(name, mirror)))
            self._tasks.append(asyncio.create_task(self._call_back(self.changes())))
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._wake()
        await self._opened.aclose()

    async def _follow(self, server: str, mirror: Mirror) -> None:
        while (present := await mirror.next_snapshot(self._seen[server])) is not None:
            self._update(server, present)

    def _update(self, server: str, present: Snapshot) -> None:
        """Publish the changes of a server, and the new names of items that collide with them, or no longer do."""
        seen, self._seen[server] = self._seen[server], present
        own_changes = [*present.changes_since(seen)]
        changes: dict[ListName, dict[str, Any]] = {}
        touched = {change.list for change in own_changes}
        if touched & _SAME_NAMES:
            touched |= _SAME_NAMES
        for name in touched:
            changed = {Owner(server, change.name) for change in own_changes if change.list == name}
            before, after = self._owners[name], self._name_items(name)
            self._owners[name] = after
            differing = [each for each in before.keys() | after.keys() if before.get(each) != after.get(each)]
            differing += [each for each, owner in after.items() if owner in changed]
            changes[name] = {each: self._renamed(name, each) for each in differing}
        self._publish(self._snapshot.changed(changes), own_changes[-1].detected if own_changes else None)

    def _name_items(self, name: ListName) -> dict[str, Owner]:
        items = {server: lists.listings[name].items for server, lists in self._seen.items()}
        if name not in _SAME_NAMES:
            return name_items(items, are_uris=name not in _NAMED)
        uris = {server: {**lists.resources, **lists.contents} for server, lists in self._seen.items()}
        owners = name_items(uris, are_uris=True)
        return {each: owner for each, owner in owners.items() if owner.own in items[owner.server]}

    def _renamed(self, list: ListName, name: str) -> Any:
        """Return an item with its name in the group, or None if there is none."""
        if (owner := self._owners[list].get(name)) is None:
            return None
        item = self._seen[owner.server].listings[list].items[owner.own]
        return item.model_copy(update={KEYS[list]: name}) if list in KEYS and name != owner.own else item


def _fits(template: str, uri: str) -> bool:
    try:
        return UriTemplate.parse(template).match(uri) is not None
    except ValueError:  # the server's template is none
        return False
