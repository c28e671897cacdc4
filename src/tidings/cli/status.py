"""The status that `serve` shows: a panel that is updated in place on a terminal, log lines elsewhere.

A separate thread reads and shows the status, so that a slow terminal never delays a publisher.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tidings.cli.logs import LogOptions
from tidings.cli.output import pluralize
from tidings.core.model import Change, Feature, Operation
from tidings.core.redact import change_name, one_line, topic_name
from tidings.workspace.problems import Problem
from tidings.workspace.source import ERRORS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tidings.live import Live
    from tidings.workspace.source import Workspace

__all__ = ["Panel", "Snapshot", "count_items", "show_status"]

logger = logging.getLogger("tidings.serve")

_POLL = 1.0
"""Seconds between two counts of the connected clients, because no event reports them."""

_MIN_INTERVAL = 0.1
"""Seconds between two updates of the screen. Faster updates flicker."""

_ROWS = 6
"""The maximum of rows of changes, and of problems. Most of the screen is for log lines."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    items: tuple[tuple[Feature, int], ...] = ()
    modern_streams: int = 0
    legacy_sessions: int = 0
    changes: tuple[tuple[Change, str], ...] = ()
    """The changes since the last snapshot, with their descriptions."""
    problems: tuple[Problem, ...] = ()
    store_problem: str | None = None
    """Why the state is kept only in memory, although there is a state file."""


def count_items(live: Live) -> dict[Feature, int]:
    """Count the items of each list, without the resource that Tidings adds."""
    counts = {feature: len(live.catalog.items(feature)) for feature in Feature}
    counts[Feature.RESOURCES] -= ERRORS in live.catalog.items(Feature.RESOURCES)
    return counts


@contextmanager
def show_status(live: Live, workspace: Workspace, logs: LogOptions, *, title: str | None = None) -> Iterator[None]:
    """Show the status in this block: as a panel with a title and a terminal, otherwise as log lines."""
    if logs.is_quiet:
        yield
        return
    display: Panel | _StatusLog
    if title is not None and sys.stderr.isatty():
        from rich.console import Console

        display = Panel(Console(stderr=True), title)
    else:
        display = _StatusLog(logs.is_detailed)
        if logs.is_detailed:
            live.hub.log.level_unwatched = logging.INFO

    def is_not_shown(record: logging.LogRecord) -> bool:
        """Return False for a record that the status shows: a problem, or a change unless the log is detailed."""
        if isinstance(record.args, tuple) and record.args and isinstance(record.args[0], Problem):
            return False
        return logs.is_detailed or getattr(record, "tidings", {}).get("event") != "told"

    for handler in logging.getLogger().handlers:
        handler.addFilter(is_not_shown)
    with display.open(), _Updater(live, workspace, display).run():
        yield


class _Updater:
    """The thread that takes snapshots and shows them."""

    def __init__(self, live: Live, workspace: Workspace, display: Panel | _StatusLog) -> None:
        self._live = live
        self._workspace = workspace
        self._display = display
        self._changes: deque[tuple[Change, str]] = deque(maxlen=1000)
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
        self._changes.extend((change, text) for change in changes if (text := _describe(change)))
        self._changed.set()

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._display.show(self._take_snapshot())
            self._changed.wait(_POLL)
            self._changed.clear()
            self._stopped.wait(_MIN_INTERVAL)
        self._display.show(self._take_snapshot())

    def _take_snapshot(self) -> Snapshot:
        changes = []
        while self._changes:
            changes.append(self._changes.popleft())
        live = self._live
        modern_streams = len(live.listen_streams)
        return Snapshot(
            items=tuple(count_items(live).items()),
            modern_streams=modern_streams,
            legacy_sessions=max(0, len(live.hub) - modern_streams),
            changes=tuple(changes),
            problems=self._workspace.problems,
            store_problem=live.writer.problem,
        )


def _describe(change: Change) -> str | None:
    if isinstance(change.topic, Feature):
        return f"{change.topic.singular} {change_name(change)} {change.operation}"
    if change.topic == ERRORS or change.operation is Operation.DELETED:
        return None  # the status shows these as problems, or as removed from the list
    return f"content of {topic_name(change.topic)} updated"


class _StatusLog:
    """A display that logs each change and each problem."""

    def __init__(self, is_detailed: bool) -> None:
        self._is_detailed = is_detailed
        self._problems: frozenset[Problem] = frozenset()

    def open(self) -> AbstractContextManager[None]:
        return nullcontext()

    def show(self, snapshot: Snapshot) -> None:
        for change, text in snapshot.changes:
            if not (self._is_detailed and isinstance(change.topic, Feature)):  # a detailed log has it already
                logger.info("%s", text)
        problems = frozenset(snapshot.problems)
        for problem in sorted(problems - self._problems, key=str):
            logger.warning("%s", str(problem))
        solved = {problem.path for problem in self._problems} - {problem.path for problem in problems}
        for path in sorted(solved):
            logger.info("%s has no problem any more", path)
        self._problems = problems


class Panel:
    """A display that updates the current status in place on a terminal."""

    def __init__(self, console: Console, title: str) -> None:
        from rich.live import Live as Display

        self._console = console
        self._title = title
        self._changes: deque[tuple[Change, str]] = deque(maxlen=_ROWS)
        self._last: object = None
        self._display = Display(console=console, auto_refresh=False, transient=True)

    def open(self) -> AbstractContextManager[object]:
        return self._display

    def show(self, snapshot: Snapshot) -> None:
        self._changes.extend(snapshot.changes)
        snapshot = replace(snapshot, changes=tuple(self._changes))
        current = (snapshot, self._console.size)
        if current != self._last:
            self._last = current
            self._display.update(self._render(snapshot), refresh=True)

    def _render(self, snapshot: Snapshot) -> RenderableType:
        from rich.console import Group
        from rich.rule import Rule
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=len("problems"))  # a long line must not shorten the labels
        grid.add_column(overflow="ellipsis", no_wrap=True)
        grid.add_row("items", ", ".join(pluralize(number, feature.singular) for feature, number in snapshot.items))
        modern, legacy = (
            pluralize(snapshot.modern_streams, "modern stream"),
            pluralize(snapshot.legacy_sessions, "legacy session"),
        )
        grid.add_row("clients", f"{modern}, {legacy}")
        if snapshot.store_problem is not None:
            grid.add_row("state", Text(f"only in memory: {snapshot.store_problem}", style="red"))
        for number, (change, text) in enumerate(reversed(snapshot.changes)):
            clock = time.strftime("%H:%M:%S", time.localtime(change.time))
            grid.add_row("" if number else "changes", Text(f"{clock}  {text}"))
        for number, problem in enumerate(snapshot.problems[:_ROWS]):
            grid.add_row("" if number else "problems", Text(one_line(str(problem)), style="red"))
        if len(snapshot.problems) > _ROWS:
            grid.add_row("", f"and {len(snapshot.problems) - _ROWS} more")
        return Group(Rule(Text(self._title, style="bold"), align="left", style="dim"), grid)
