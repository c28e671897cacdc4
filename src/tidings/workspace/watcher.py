"""The watcher of a workspace folder. It starts a scan when something may have changed.

It scans the paths of file system events, and all files at a fixed interval. If the file system can't be watched, it
scans only at the interval.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from watchfiles import Change, awatch

from tidings.runtime.backoff import Backoff
from tidings.workspace import TOP_LEVEL

__all__ = ["FolderWatcher", "watch_paths"]

logger = logging.getLogger(__name__)

_QUIET_MS = 10
_MAX_WAIT_MS = 100
"""Saving a file causes a few events within 2 ms, so 10 ms without events end a burst. A longer burst is split."""

_RETRY = 1.0
"""Seconds until watching is tried again after it failed."""

_MAX_RETRY = 10.0
"""Seconds between retries after many failures. It is longer, because each retry scans the whole folder."""

_REMOVAL_GRACE = 0.05
"""Seconds until a missing file counts as removed: longer than replacing a file takes."""


class FolderWatcher:
    """A loop that calls `scan` with the paths that may have changed, or with None for all files.

    `scan(paths, defer_removals)` returns the paths to scan again after `_REMOVAL_GRACE`: missing files, so that
    replacing a file, as `git checkout` does, is one change and not two; and files that take long to be loaded.
    """

    def __init__(
        self,
        root: Path,
        scan: Callable[[set[Path] | None, bool], Awaitable[set[Path]]],
        poll: float,
        list_other_folders: Callable[[], set[Path]] = set,
    ) -> None:
        """Prepare the watching. `list_other_folders` returns the folders to watch beside those of a workspace."""
        self._root = root
        self._scan = scan
        self._poll = poll
        self._list_other_folders = list_other_folders
        self.pending: set[asyncio.Task[None]] = set()
        """Scans that will soon follow an earlier one. Tests wait until there are none."""

    async def run(self) -> None:
        await asyncio.gather(self._follow_events(), self._follow_interval())

    async def _scan_paths(self, paths: set[Path] | None) -> None:
        if remaining := await self._scan(paths, True):
            task = asyncio.create_task(self._scan_again(remaining))
            self.pending.add(task)
            task.add_done_callback(self.pending.discard)

    async def _scan_again(self, remaining: set[Path]) -> None:
        while remaining:
            await asyncio.sleep(_REMOVAL_GRACE)
            remaining = await self._scan(remaining, False)

    async def _follow_events(self) -> None:
        last_error, backoff = "", Backoff(_RETRY, _MAX_RETRY)
        while True:
            try:
                async for paths in watch_paths(self._root, self._list_other_folders):
                    if paths is not None:
                        last_error = ""
                        backoff.reset()
                    await self._scan_paths(paths)
            except Exception as error:  # a file system or its watcher may fail in any way
                if last_error != str(error):
                    advice = "raise sysctl fs.inotify.max_user_watches; " * ("limit" in str(error))
                    advice += "Tidings tries again, and scans the folder in the meantime"
                    logger.warning("%s can't be watched: %s; %s", self._root, error, advice)
                last_error = str(error)
            await asyncio.sleep(backoff.fail())
            if not self._root.is_dir():
                backoff.reset()

    async def _follow_interval(self) -> None:
        while self._poll > 0:
            await asyncio.sleep(self._poll)
            await self._scan_paths(None)


async def watch_paths(root: Path, list_other_folders: Callable[[], set[Path]] = set) -> AsyncIterator[set[Path] | None]:
    """Yield the paths of each burst of events, or None if any file may have changed, for example at the start.

    Only the folders of a workspace and those of `list_other_folders` are watched, not others beside them (a
    virtual environment, `.git`). If one of those folders is created, removed or replaced, watching starts again.
    """
    while True:
        folders = _list_folders(root, list_other_folders())
        watched = {root, *folders}
        queue: asyncio.Queue[set[tuple[Change, Path]]] = asyncio.Queue()
        next_changes: asyncio.Future[set[tuple[Change, Path]]] | None = None
        tasks = [asyncio.create_task(_queue_changes(queue, [root], is_recursive=False))]
        if folders:
            tasks.append(asyncio.create_task(_queue_changes(queue, folders, is_recursive=True)))
        try:
            await asyncio.sleep(0)  # the first step of the tasks starts the watching
            yield None
            while _list_folders(root, list_other_folders()) == folders:
                next_changes = asyncio.ensure_future(queue.get())
                done, _ = await asyncio.wait([next_changes, *tasks], return_when=asyncio.FIRST_COMPLETED)
                if next_changes not in done:
                    for task in done:
                        task.result()  # raises the error that ended the task
                    break
                changes = next_changes.result()
                yield {path for _, path in changes}
                if any(path in watched and change is not Change.modified for change, path in changes):
                    break  # the watched folder may have been replaced by another one
        finally:
            if next_changes is not None:
                next_changes.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _queue_changes(
    queue: asyncio.Queue[set[tuple[Change, Path]]], folders: list[Path], *, is_recursive: bool
) -> None:
    # `ignore_permission_denied` ignores every failure, also a reached limit: use it only after a PermissionError.
    for ignores_failures in (False, True):
        try:
            async for changes in awatch(
                *folders,
                watch_filter=None,
                step=_QUIET_MS,
                debounce=_MAX_WAIT_MS,
                recursive=is_recursive,
                ignore_permission_denied=ignores_failures,
            ):
                queue.put_nowait({(change, Path(path)) for change, path in changes})
        except PermissionError:
            if ignores_failures:
                raise
        except ExceptionGroup as errors:
            if "Unable to decode path" not in str(errors.exceptions[0]):
                raise
            return  # after a name that is not UTF-8; the caller starts again


def _list_folders(root: Path, others: set[Path]) -> list[Path]:
    return [folder for folder in sorted({root / name for name in TOP_LEVEL} | others) if folder.is_dir()]
