"""When a workspace is looked through: after the file system's events, by the clock, and when a registration is due.

What is found is the workspace's affair. Nothing here waits for anything slow but its own: a registration that hangs
delays no event, and watching that fails leaves the clock.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tidings.workspace.watcher import changed_paths

if TYPE_CHECKING:
    from tidings.workspace.source import Workspace

__all__ = ["Follower"]

logger = logging.getLogger(__name__)

_RETRY = 1.0
"""Seconds until watching is tried again where it failed."""

_LONGEST_RETRY = 10.0
"""And after many failures, since each try looks through the whole folder."""

_GRACE = 0.05
"""Seconds that a file may be gone without being taken for deleted: longer than it takes to replace one."""


class Follower:
    def __init__(self, workspace: Workspace, poll: float) -> None:
        self._workspace = workspace
        self._poll = poll
        self._confirming: set[asyncio.Task[None]] = set()
        self._is_register_due = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        return not self._confirming

    async def run(self) -> None:
        await asyncio.gather(self._follow_events(), self._follow_clock(), self._follow_register())

    async def _look(self, paths: set[Path] | None, *, spares: bool = True) -> None:
        gone = await asyncio.to_thread(self._workspace.rescan_guarded, paths, spares=spares, runs=False)
        if self._workspace.has_new_scripts:
            self._is_register_due.set()
        if gone:
            task = asyncio.create_task(self._confirm(gone))
            self._confirming.add(task)
            task.add_done_callback(self._confirming.discard)

    async def _follow_events(self) -> None:
        root = self._workspace.root
        said, pause = "", _RETRY
        while True:
            try:
                async for paths in changed_paths(root):
                    if paths is not None:
                        said, pause = "", _RETRY
                    await self._look(paths)
            except Exception as error:  # a file system or its watcher may fail in any way; the poll goes on meanwhile
                if said != str(error):
                    logger.warning("%s can't be watched for now (%s); %s", root, error, self._advice(error))
                said = str(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY) if root.is_dir() else _RETRY

    def _advice(self, error: Exception) -> str:
        more = "raise the system's limit (sysctl fs.inotify.max_user_watches); " if "limit" in str(error) else ""
        return f"{more}trying again, and looking through it meanwhile"

    async def _confirm(self, gone: set[Path]) -> None:
        """What is gone for a moment was being replaced, as `git checkout` does it: that is one change and not two."""
        await asyncio.sleep(_GRACE)
        await self._look(gone, spares=False)

    async def _follow_clock(self) -> None:
        while self._poll > 0:
            await asyncio.sleep(self._poll)
            await self._look(None)

    async def _follow_register(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._workspace.settings.register_ttl):
                    await self._is_register_due.wait()
            self._is_register_due.clear()
            if scripts := self._workspace.scripts:
                await asyncio.to_thread(self._workspace.rescan_guarded, scripts)
