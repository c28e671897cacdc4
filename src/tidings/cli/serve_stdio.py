"""`tidings serve DIR --stdio`: serve a folder to the one client that started the process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tidings.cli.folder import check_folder, default_state_file, open_workspace
from tidings.cli.logs import LogFormat, LogLevel, LogOptions, set_up_logging
from tidings.cli.startup import without_gc

if TYPE_CHECKING:
    from tidings.live import Live
    from tidings.store.writer import StoreWriter
    from tidings.workspace.source import Workspace

__all__ = ["DEFAULT_POLL", "StdioOptions", "make_live", "parse_arguments", "serve_stdio"]

DEFAULT_POLL = 10.0
"""Seconds between two scans of all files. File events report most changes, and a scan finds the others."""


class StdioOptions(NamedTuple):
    folder: Path = Path()
    poll: float = DEFAULT_POLL
    state: str | None = None
    logs: LogOptions = LogOptions()


def parse_arguments(arguments: Sequence[str]) -> StdioOptions | None:
    """Parse the usual forms of `serve DIR --stdio` without importing Typer.

    Return None for everything else, including mistakes: the full parser reports those.
    """
    rest = iter(arguments)
    if next(rest, None) != "serve":
        return None
    is_stdio = is_quiet = False
    folders: list[Path] = []
    poll, level, log_format = DEFAULT_POLL, LogLevel.INFO, LogFormat.TEXT
    state: str | None = None
    for argument in rest:
        name, equals, value = argument.partition("=")
        try:
            match name:
                case "--stdio" if not equals:
                    is_stdio = True
                case "--quiet" | "-q" if not equals:
                    is_quiet = True
                case "--poll":
                    poll = float(value if equals else next(rest))
                case "--log-level":
                    level = LogLevel(value if equals else next(rest))
                case "--log-format":
                    log_format = LogFormat(value if equals else next(rest))
                case "--state":
                    state = value if equals else next(rest)
                case _:
                    if argument.startswith("-"):
                        return None
                    folders.append(Path(argument))
        except (ValueError, StopIteration):
            return None
    if not is_stdio or len(folders) > 1 or not poll >= 0:
        return None
    return StdioOptions(folders[0] if folders else Path(), poll, state, LogOptions(level, log_format, is_quiet))


def serve_stdio(options: StdioOptions) -> None:
    check_folder(options.folder)
    set_up_logging(options.logs)
    with without_gc():
        workspace = open_workspace(options.folder, poll=options.poll)
        live = make_live(workspace, options.state)
        from tidings.cli.otlp import export_telemetry
        from tidings.cli.status import show_status
    with export_telemetry(workspace.settings.name, live.failures), show_status(live, workspace, options.logs):
        live.run("stdio")


def make_live(workspace: Workspace, state: str | None) -> Live:
    """Return the `Live` of a workspace. `state` is the path of the state file, "none", or None for the default file."""
    with without_gc():
        from tidings.live import Live

        return Live(workspace, policy=workspace.settings.policy, store=_open_store(workspace.root, state))


def _open_store(root: Path, state: str | None) -> StoreWriter | None:
    if state == "none":
        return None
    from tidings.store.sqlite import SQLiteStore
    from tidings.store.writer import StoreWriter

    # Each stdio client starts a process of its own, so a default file that another process uses needs no warning.
    return StoreWriter(SQLiteStore(state or default_state_file(root)), is_explicit=state is not None)
