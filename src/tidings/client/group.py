"""`MirrorGroup`: the lists of several servers as one.

The name of a tool or prompt is `<prefix>_<name>`, as with the servers that FastMCP mounts. A URI or URI template is
`<prefix>+<URI>`. A prefix contains neither sign, so each name belongs to one server.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType, TracebackType
from typing import Any, Self

import mcp_types as types

from tidings.client.lists import ChangingLists
from tidings.client.mirror import Mirror, Status
from tidings.client.snapshot import KEYS, Detected, ListName, Snapshot
from tidings.client.timing import Timing
from tidings.client.transport import Target
from tidings.core.model import Operation
from tidings.errors import NotFound, TidingsError

__all__ = ["MirrorGroup"]

_SEPARATORS: Mapping[ListName, str] = {
    "tools": "_",
    "prompts": "_",
    "resources": "+",
    "templates": "+",
    "contents": "+",
}
_STATES = ("closed", "reconnecting", "stale", "polling", "fresh")


class MirrorGroup(ChangingLists):
    """Keep the lists of several servers current, from `async with` on.

    `servers` has a target, or a `Mirror` that is not entered, for each prefix: letters, digits and `-`. `timing` is for
    the targets.
    """

    def __init__(self, servers: Mapping[str, Mirror | Target], *, timing: Timing | None = None) -> None:
        super().__init__()
        for prefix in servers:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", prefix):
                raise TidingsError(f"{prefix!r} is no prefix: it must be a letter, then letters, digits or -")
        self.mirrors: Mapping[str, Mirror] = MappingProxyType(
            {
                prefix: server if isinstance(server, Mirror) else Mirror(server, timing=timing)
                for prefix, server in servers.items()
            }
        )
        self._opened = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def status(self) -> Status:
        """The status of the server that is the least current."""
        found = {prefix: mirror.status for prefix, mirror in self.mirrors.items()}
        if self._is_closed or not found:
            return Status("closed" if self._is_closed else "fresh")
        prefix, worst = min(found.items(), key=lambda each: _STATES.index(each[1].state))
        since = [status.stale_since for status in found.values() if status.stale_since is not None]
        return Status(worst.state, min(since, default=None), worst.reason and f"{prefix}: {worst.reason}")

    def resolve(self, name: str, list: ListName = "tools") -> tuple[Mirror, str]:
        """Return the mirror of the server that has an item, and the name, URI or URI template that it has there."""
        prefix, separator, own = name.partition(_SEPARATORS[list])
        if not separator or prefix not in self.mirrors:
            known = ", ".join(each + _SEPARATORS[list] for each in self.mirrors)
            raise NotFound(f"{name!r} starts with the prefix of no server; there are {known}")
        return self.mirrors[prefix], own

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
                raise group.exceptions[0] from None
            for prefix, mirror in self.mirrors.items():
                self._update(prefix, seen := mirror.snapshot(), Snapshot())
                self._tasks.append(asyncio.create_task(self._follow(prefix, mirror, seen)))
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

    async def _follow(self, prefix: str, mirror: Mirror, seen: Snapshot) -> None:
        while (present := await mirror.next_snapshot(seen)) is not None:
            self._update(prefix, present, seen)
            seen = present

    def _update(self, prefix: str, present: Snapshot, seen: Snapshot) -> None:
        changes: dict[ListName, dict[str, Any]] = defaultdict(dict)
        detected: Detected | None = None
        for change in present.changes_since(seen):
            name = f"{prefix}{_SEPARATORS[change.list]}{change.name}"
            item = None if change.operation is Operation.REMOVED else change.item
            if item is not None and change.list in KEYS:
                item = item.model_copy(update={KEYS[change.list]: name})
            changes[change.list][name], detected = item, change.detected
        self._publish(self._snapshot.changed(changes), detected)
