"""The file system's events below a workspace, as sets of paths.

Only the folders that matter are watched, however much else (an environment, a history, packages) lies beside them. The
folders may come and go: watching then begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from watchfiles import awatch

from tidings.sources.workspace.layout import TOPS

__all__ = ["changed_paths"]

_QUIET_GAP = 10
_LONGEST_WAIT = 100
"""Milliseconds: a save is a few events within one or two, and a checkout of a thousand files is told in parts."""


async def changed_paths(root: Path) -> AsyncIterator[set[Path] | None]:
    """The paths of each burst of events; None when anything may have changed unseen, as when watching begins."""
    while True:
        folders = _folders(root)
        queue: asyncio.Queue[set[Path]] = asyncio.Queue()
        watchers = [asyncio.create_task(_pump(queue, [root], is_recursive=False))]
        if folders:
            watchers.append(asyncio.create_task(_pump(queue, folders, is_recursive=True)))
        try:
            await asyncio.sleep(0)  # the watchers' first step, which sets up their watching
            yield None
            while _folders(root) == folders:
                taken = asyncio.ensure_future(queue.get())
                done, _ = await asyncio.wait([taken, *watchers], return_when=asyncio.FIRST_COMPLETED)
                if taken not in done:
                    taken.cancel()
                    for watcher in done:
                        watcher.result()  # raises what ended it
                    break
                yield taken.result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)


async def _pump(queue: asyncio.Queue[set[Path]], places: list[Path], *, is_recursive: bool) -> None:
    async for changes in awatch(
        *places,
        watch_filter=None,
        step=_QUIET_GAP,
        debounce=_LONGEST_WAIT,
        recursive=is_recursive,
        ignore_permission_denied=True,
    ):
        queue.put_nowait({Path(path) for _, path in changes})


def _folders(root: Path) -> list[Path]:
    return [root / name for name in sorted(TOPS) if (root / name).is_dir()]
