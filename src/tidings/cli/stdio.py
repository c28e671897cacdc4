"""`tidings serve DIR --stdio`: a folder as a live MCP server for the one client that started it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tidings.cli.folder import check_folder, open_workspace, state_file
from tidings.cli.output import LogFormat, LogLevel, set_up_logging
from tidings.cli.startup import made_to_stay

if TYPE_CHECKING:
    from tidings.live import Live
    from tidings.store.writer import Keeper
    from tidings.workspace.source import Workspace

__all__ = ["POLL", "make_live", "read_arguments", "serve_stdio"]

POLL = 10.0
"""Seconds between two looks at every file, unless told otherwise."""


class _Plain(NamedTuple):
    folder: Path
    poll: float
    level: LogLevel
    form: LogFormat
    quiet: bool
    state: str | None


def read_arguments(arguments: Sequence[str]) -> _Plain | None:
    """What the usual ways to say `serve DIR --stdio` ask for. None for any other command, for what is said in another
    way, and for whatever is wrong: those are the parser's, which says what."""
    rest = iter(arguments)
    if next(rest, None) != "serve":
        return None
    is_stdio = quiet = False
    folders: list[Path] = []
    poll, level, form = POLL, LogLevel.INFO, LogFormat.TEXT
    state: str | None = None
    for argument in rest:
        name, is_joined, value = argument.partition("=")
        try:
            match name:
                case "--stdio" if not is_joined:
                    is_stdio = True
                case "--quiet" | "-q" if not is_joined:
                    quiet = True
                case "--poll":
                    poll = float(value if is_joined else next(rest))
                case "--log-level":
                    level = LogLevel(value if is_joined else next(rest))
                case "--log-format":
                    form = LogFormat(value if is_joined else next(rest))
                case "--state":
                    state = value if is_joined else next(rest)
                case _:
                    if argument.startswith("-"):
                        return None
                    folders.append(Path(argument))
        except (ValueError, StopIteration):
            return None
    if not is_stdio or len(folders) > 1 or not poll >= 0:
        return None
    return _Plain(folders[0] if folders else Path(), poll, level, form, quiet, state)


def serve_stdio(folder: Path, poll: float, level: LogLevel, form: LogFormat, quiet: bool, state: str | None) -> None:
    check_folder(folder)
    set_up_logging(level.unless(quiet), form)
    with made_to_stay():
        workspace = open_workspace(folder, poll=poll)
        live = make_live(workspace, state)
        from tidings.cli.export import exported
        from tidings.cli.status import shown
    in_detail = form.is_in_detail(level)
    with exported(workspace.settings.name, live.failures), shown(live, workspace, is_quiet=quiet, in_detail=in_detail):
        live.run("stdio")


def make_live(workspace: Workspace, state: str | None) -> Live:
    """`state` names the file that keeps the state, unless it is the usual one; "none" for none."""
    with made_to_stay():
        from tidings.live import Live

        return Live(workspace, policy=workspace.settings.policy, store=_keeper(workspace.root, state))


def _keeper(root: Path, state: str | None) -> Keeper | None:
    if state == "none":
        return None
    from tidings.store.sqlite import SQLiteStore
    from tidings.store.writer import Keeper

    # Every client that uses stdio starts a process of its own: that another one has the file is nothing to warn of.
    return Keeper(SQLiteStore(state or state_file(root)), is_expected=state is not None)
