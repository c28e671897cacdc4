"""What `serve` shows while it serves: on a terminal a small panel that changes in place, elsewhere plain lines.

A thread of its own looks at what there is to say, so that nobody who publishes waits for a terminal. It reads; it never
touches what is served.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidings.cli.output import counted
from tidings.core.model import Change, Feature, Operation
from tidings.core.redact import change_name, plain, topic_name
from tidings.workspace.problems import Problem
from tidings.workspace.source import ERRORS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tidings.live import Live
    from tidings.workspace.source import Workspace

__all__ = ["items_of", "shown"]

logger = logging.getLogger("tidings.serve")

_LOOK = 1.0
"""Seconds between two looks at who is connected, which nobody tells us of."""

_BREATH = 0.1
"""Seconds between two drawings: faster than that is flicker."""

_SHOWN = 6
"""Changes, and problems, on a terminal: the last ones, in a part of the screen that leaves room for log lines."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    items: tuple[tuple[Feature, int], ...]
    modern: int
    legacy: int
    changes: tuple[tuple[Change, str], ...]
    problems: tuple[Problem, ...]
    unsaved: str | None
    """Why the state is in memory only, if it was to be saved and is not."""


def items_of(live: Live) -> dict[Feature, int]:
    """How many items each list has, without those that Tidings itself puts there."""
    counts = {feature: len(live.catalog.items(feature)) for feature in Feature}
    counts[Feature.RESOURCES] -= ERRORS in live.catalog.items(Feature.RESOURCES)
    return counts


@contextmanager
def shown(
    live: Live, workspace: Workspace, *, title: str | None = None, is_quiet: bool = False, in_detail: bool = False
) -> Iterator[None]:
    """Show the status meanwhile. With a title it may take the terminal, if there is one. `in_detail` leaves it to the
    log to tell of each change of a list, and how many were told: one of the two says it, never both."""
    if is_quiet:
        yield
        return
    display: _Panel | _Lines
    if title is not None and sys.stderr.isatty():
        from rich.console import Console

        display = _Panel(Console(stderr=True), title)
    else:
        display = _Lines(in_detail)
        if in_detail:
            live.hub.observer.level_unwatched = logging.INFO
    handler_filter = _NotTwice(in_detail)
    for handler in logging.getLogger().handlers:
        handler.addFilter(handler_filter)
    status = _Status(live, workspace, display)
    with display.open(), status.running():
        yield


class _NotTwice(logging.Filter):
    """Problems, and changes unless the log tells of them in detail, are the status's to show."""

    def __init__(self, in_detail: bool) -> None:
        super().__init__()
        self._in_detail = in_detail

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and record.args and isinstance(record.args[0], Problem):
            return False
        return self._in_detail or getattr(record, "tidings", {}).get("event") != "told"


class _Status:
    def __init__(self, live: Live, workspace: Workspace, display: _Panel | _Lines) -> None:
        self._live = live
        self._workspace = workspace
        self._display = display
        self._changes: deque[tuple[Change, str]] = deque(maxlen=1000)
        self._roused = threading.Event()
        self._is_over = threading.Event()
        live.catalog.follow(self._take)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._roused.set()
            thread.join(1)  # a terminal that takes nothing must not keep the process

    def _take(self, changes: tuple[Change, ...]) -> None:
        """Called by whoever changes the catalog, with its lock held: only note it."""
        self._changes.extend((change, described) for change in changes if (described := _described(change)))
        self._roused.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._display.show(self._look())
            self._roused.wait(_LOOK)
            self._roused.clear()
            self._is_over.wait(_BREATH)
        self._display.show(self._look())  # what happened last, too

    def _look(self) -> _Snapshot:
        taken = []
        while self._changes:
            taken.append(self._changes.popleft())
        live = self._live
        modern = len(live.listen)
        return _Snapshot(
            tuple(items_of(live).items()),
            modern,
            max(0, len(live.hub) - modern),
            tuple(taken),
            self._workspace.problems,
            live.keeper.problem,
        )


def _described(change: Change) -> str | None:
    if isinstance(change.topic, Feature):
        return f"{change.topic.singular} {change_name(change)} {change.operation}"
    if change.topic == ERRORS or change.operation is Operation.DELETED:
        return None  # shown as problems, and as removed from the list
    return f"content of {topic_name(change.topic)} updated"


class _Lines:
    """For logs: what happened, one line each."""

    def __init__(self, in_detail: bool) -> None:
        self._in_detail = in_detail
        self._problems: frozenset[Problem] = frozenset()

    @contextmanager
    def open(self) -> Iterator[None]:
        yield

    def show(self, snapshot: _Snapshot) -> None:
        for change, text in snapshot.changes:
            if not (self._in_detail and isinstance(change.topic, Feature)):
                logger.info("%s", text)
        now = frozenset(snapshot.problems)
        for problem in sorted(now - self._problems, key=str):
            logger.warning("%s", str(problem))
        still = {problem.path for problem in now}
        for path in sorted({problem.path for problem in self._problems - now} - still):
            logger.info("%s is in order again", path)
        self._problems = now


class _Panel:
    """For a terminal: how things are, in place."""

    def __init__(self, console: Console, title: str) -> None:
        from rich.live import Live as Display

        self._console = console
        self._title = title
        self._changes: deque[tuple[Change, str]] = deque(maxlen=_SHOWN)
        self._last: tuple[object, ...] = ()
        self._display = Display(console=console, auto_refresh=False, transient=True)

    @contextmanager
    def open(self) -> Iterator[None]:
        with self._display:
            yield

    def show(self, snapshot: _Snapshot) -> None:
        self._changes.extend(snapshot.changes)
        state = (
            snapshot.items,
            snapshot.modern,
            snapshot.legacy,
            snapshot.problems,
            snapshot.unsaved,
            tuple(self._changes),
            self._console.size,
        )
        if state != self._last:
            self._last = state
            self._display.update(self._draw(snapshot), refresh=True)

    def _draw(self, snapshot: _Snapshot) -> RenderableType:
        from rich.console import Group
        from rich.rule import Rule
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="ellipsis", no_wrap=True)
        grid.add_row("items", ", ".join(counted(number, feature.singular) for feature, number in snapshot.items))
        modern, legacy = counted(snapshot.modern, "modern stream"), counted(snapshot.legacy, "legacy session")
        grid.add_row("clients", f"{modern}, {legacy}")
        if snapshot.unsaved is not None:
            grid.add_row("state", Text(f"in memory only: {snapshot.unsaved}", style="red"))
        for number, (change, text) in enumerate(reversed(self._changes)):
            clock = time.strftime("%H:%M:%S", time.localtime(change.time))
            grid.add_row("" if number else "changes", Text(f"{clock}  {text}"))
        for number, problem in enumerate(snapshot.problems[:_SHOWN]):
            grid.add_row("" if number else "problems", Text(plain(str(problem)), style="red"))
        if len(snapshot.problems) > _SHOWN:
            grid.add_row("", f"and {len(snapshot.problems) - _SHOWN} more")
        return Group(Rule(Text(self._title, style="bold"), align="left", style="dim"), grid)
