"""The status that `serve` shows: a panel that is updated in place on a terminal, log lines elsewhere.

A separate thread reads and shows the status, so that a slow terminal never delays a publisher.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidings.cli.logs import LogOptions
from tidings.cli.output import pluralize, render_rows
from tidings.core.model import Change, Feature, Operation
from tidings.core.redact import change_name, topic_name
from tidings.workspace.problems import ERRORS, Problem

if TYPE_CHECKING:
    from rich.console import Console

    from tidings.live import Live
    from tidings.workspace.source import Workspace

__all__ = ["Panel", "hide_status", "show_status"]

logger = logging.getLogger("tidings.serve")

_POLL = 1.0
"""Seconds between two counts of the connected clients, because no event reports them."""

_MIN_INTERVAL = 0.1
"""Seconds between two updates of the screen. Faster updates flicker."""

_ROWS = 6
"""The maximum of rows of changes, and of problems. Most of the screen is for log lines."""


@contextmanager
def show_status(live: Live, workspace: Workspace, logs: LogOptions, *, title: str | None = None) -> Iterator[None]:
    """Show the status in this block: as a panel with a title and a terminal, otherwise as log lines."""
    if logs.is_quiet:
        yield
        return
    status: _Status
    if title is not None and sys.stderr.isatty():
        from rich.console import Console

        status = Panel(live, workspace, Console(stderr=True), title)
    else:
        status = _StatusLog(live, workspace, logs.is_detailed)
        if logs.is_detailed:
            live.hub.log.level_unwatched = logging.INFO

    hidden = () if logs.is_detailed else ("told",)
    _hide_records(hidden, problems=isinstance(status, Panel))
    with status.run():
        yield


def hide_status(logs: LogOptions) -> None:
    """Log neither changes nor problems: another worker, which has the same ones, shows them."""
    _hide_records(() if logs.is_detailed else ("starting", "stopping", "told"), problems=True)
    if not logs.is_detailed:
        logging.getLogger("tidings.cluster").setLevel(logging.WARNING)


def _hide_records(events: Collection[str], *, problems: bool) -> None:
    """Remove records of these events from the log, and problems of the workspace if `problems` is true."""

    def is_shown(record: logging.LogRecord) -> bool:
        is_problem = isinstance(record.args, tuple) and record.args and isinstance(record.args[0], Problem)
        return not (problems and is_problem) and getattr(record, "tidings", {}).get("event") not in events

    for handler in logging.getLogger().handlers:
        handler.addFilter(is_shown)


class _Status:
    """A thread that reads the status and shows it."""

    def __init__(self, live: Live, workspace: Workspace) -> None:
        self._live = live
        self._workspace = workspace
        self._changes: deque[tuple[Change, str]] = deque(maxlen=1000)
        """The changes that are not shown yet, with their descriptions."""
        self._changed = threading.Event()
        self._stopped = threading.Event()
        live.catalog.follow(self._on_changes)

    @contextmanager
    def run(self) -> Iterator[None]:
        thread = threading.Thread(target=self._loop, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._changed.set()
            thread.join(1)  # a terminal that blocks must not delay the exit

    def _on_changes(self, changes: tuple[Change, ...]) -> None:
        """Queue the changes for the thread. The caller holds the catalog's lock, so this must be fast."""
        added = {change.key for change in changes if change.operation is Operation.ADDED}
        for change in changes:
            if (text := _describe(change)) and (isinstance(change.topic, Feature) or change.key not in added):
                self._changes.append((change, text))
        self._changed.set()

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._show(self._take_changes())
            self._changed.wait(_POLL)
            self._changed.clear()
            self._stopped.wait(_MIN_INTERVAL)
        self._show(self._take_changes())

    def _take_changes(self) -> list[tuple[Change, str]]:
        changes = []
        while self._changes:
            changes.append(self._changes.popleft())
        return changes

    def _show(self, changes: list[tuple[Change, str]]) -> None:
        """Show the present status, and the changes since the last time."""
        raise NotImplementedError


def _describe(change: Change) -> str | None:
    if isinstance(change.topic, Feature):
        return f"{change.topic.singular} {change_name(change)} {change.operation}"
    if change.topic == ERRORS or change.operation is Operation.DELETED:
        return None  # the status shows these as problems, or as removed from the list
    return f"content of {topic_name(change.topic)} updated"


class _StatusLog(_Status):
    """Logs each change. The workspace logs its problems itself."""

    def __init__(self, live: Live, workspace: Workspace, is_detailed: bool) -> None:
        super().__init__(live, workspace)
        self._is_detailed = is_detailed

    def _show(self, changes: list[tuple[Change, str]]) -> None:
        for change, text in changes:
            if not (self._is_detailed and isinstance(change.topic, Feature)):  # a detailed log has it already
                logger.info("%s", text)


class Panel(_Status):
    """Updates the status in place on a terminal."""

    def __init__(self, live: Live, workspace: Workspace, console: Console, title: str) -> None:
        from rich.live import Live as Display

        super().__init__(live, workspace)
        self._console = console
        self._title = title
        self._newest: deque[tuple[Change, str]] = deque(maxlen=_ROWS)
        self._last: object = None
        self._display = Display(console=console, auto_refresh=False, transient=True)

    @contextmanager
    def run(self) -> Iterator[None]:
        with self._display, super().run():
            yield

    def _show(self, changes: list[tuple[Change, str]]) -> None:
        self._newest.extend(changes)
        rows = self._list_rows()
        current = (rows, self._console.size)
        if current != self._last:
            self._last = current
            self._display.update(render_rows(self._title, rows), refresh=True)

    def _list_rows(self) -> list[tuple[str, str, str]]:
        """Return the label, the text and the style of each row."""
        live, problems = self._live, self._workspace.problems
        modern = len(live.listen_streams)
        legacy = max(0, len(live.hub) - modern)
        items = [pluralize(number, feature.singular) for feature, number in self._workspace.count_items().items()]
        clients = f"{pluralize(modern, 'modern stream')}, {pluralize(legacy, 'legacy session')}"
        rows = [("items", ", ".join(items), ""), ("clients", clients, "")]
        if live.writer.problem is not None:
            rows.append(("state", f"only in memory: {live.writer.problem}", "red"))
        for change, text in reversed(self._newest):
            clock = time.strftime("%H:%M:%S", time.localtime(change.time))
            rows.append(("changes", f"{clock}  {text}", ""))
        rows += [("problems", str(problem), "red") for problem in problems[:_ROWS]]
        if len(problems) > _ROWS:
            rows.append(("problems", f"and {len(problems) - _ROWS} more", ""))
        return rows
