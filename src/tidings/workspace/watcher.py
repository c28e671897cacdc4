"""The file system's events below a workspace, as sets of paths.

Only the folders that matter are watched, however much else (an environment, a history, packages) lies beside them. The
folders may come and go: watching then begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from watchfiles import Change, awatch

from tidings.workspace.loader import TOPS

__all__ = ["changed_paths"]

_QUIET_GAP = 10
_LONGEST_WAIT = 100
"""Milliseconds: a save is a few events within one or two, and a checkout of a thousand files is told in parts."""


async def changed_paths(root: Path) -> AsyncIterator[set[Path] | None]:
    """The paths of each burst of events; None when anything may have changed unseen, as when watching begins."""
    while True:
        folders = _folders(root)
        watched = {root, *folders}
        queue: asyncio.Queue[set[tuple[Change, Path]]] = asyncio.Queue()
        taken: asyncio.Future[set[tuple[Change, Path]]] | None = None
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
                    for watcher in done:
                        watcher.result()  # raises what ended it
                    break
                changes = taken.result()
                yield {path for _, path in changes}
                if any(path in watched and kind is not Change.modified for kind, path in changes):
                    break  # what is there by that name now may be another folder than the one that is watched
        finally:
            if taken is not None:
                taken.cancel()
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)


async def _pump(queue: asyncio.Queue[set[tuple[Change, Path]]], places: list[Path], *, is_recursive: bool) -> None:
    # To ignore folders that may not be read is to ignore every failure, a system's limit too: only where there are any.
    for ignores in (False, True):
        try:
            async for changes in awatch(
                *places,
                watch_filter=None,
                step=_QUIET_GAP,
                debounce=_LONGEST_WAIT,
                recursive=is_recursive,
                ignore_permission_denied=ignores,
            ):
                queue.put_nowait({(kind, Path(path)) for kind, path in changes})
        except PermissionError:
            if ignores:
                raise


def _folders(root: Path) -> list[Path]:
    return [root / name for name in sorted(TOPS) if (root / name).is_dir()]
