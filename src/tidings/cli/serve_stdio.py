"""`tidings serve DIR --stdio`: serve a folder to the one client that started the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tidings.cli.auth import TOKEN_VARIABLE, erase_variable
from tidings.cli.folder import PROJECT_VARIABLE, open_workspace
from tidings.cli.logs import LogFormat, LogLevel, LogOptions, set_up_logging
from tidings.cli.nats import NATS_VARIABLE
from tidings.cli.output import fail
from tidings.cli.state import choose_state_file, open_store
from tidings.runtime.shutdown import exit_process
from tidings.server.garbage_collection import without_gc
from tidings.workspace import DEFAULT_POLL

if TYPE_CHECKING:
    from tidings.cluster.backend import Backend
    from tidings.live import Live
    from tidings.workspace.source import Workspace

__all__ = ["StdioOptions", "accept_commands", "make_live", "parse_arguments", "serve_stdio"]

_EXIT_TIMEOUT = 1.0
"""Seconds after the end of serving until the process exits."""


class StdioOptions(NamedTuple):
    folder: Path = Path()
    poll: float = DEFAULT_POLL
    state: str | None = None
    logs: LogOptions = LogOptions()


def parse_arguments(arguments: Sequence[str]) -> StdioOptions | None:
    """Parse the usual forms of `serve DIR --stdio` without importing Typer and the other commands.

    A client waits for this start, and they take 5 to 10 % of its CPU time (1.70 s instead of 1.81 s on a busy machine,
    Python 3.11). Return None for everything else, including mistakes: the full parser reports those.
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
    folder = folders[0] if folders else Path(os.environ.get(PROJECT_VARIABLE, ""))
    return StdioOptions(folder, poll, state, LogOptions(level, log_format, is_quiet))


def serve_stdio(options: StdioOptions) -> None:
    set_up_logging(options.logs)
    erase_variable(TOKEN_VARIABLE)
    erase_variable(NATS_VARIABLE)
    workspace = open_workspace(options.folder, poll=options.poll)
    with without_gc():
        live = make_live(workspace, options.state)
        from tidings.cli.otlp import export_telemetry
        from tidings.cli.status import show_status
    with (
        export_telemetry(workspace.settings.name, live.failures),
        show_status(live, workspace, options.logs),
        accept_commands(live, workspace, options.state),
    ):
        live.run("stdio")
    # A thread that a Python tool has started and not ended would keep the process.
    timer = threading.Timer(_EXIT_TIMEOUT, exit_process, [0])
    timer.daemon = True
    timer.start()


def accept_commands(live: Live, workspace: Workspace, state: str | None) -> AbstractContextManager[None]:
    """Let commands on the same folder manage the subscriptions of this server, if it uses the state file."""
    from tidings.cli.control import serve_control

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        from tidings.cli.control import EMIT
        from tidings.cli.manage import manage_subscriptions

        if request["action"] == EMIT:
            return {"eventId": live.emit(**request["params"])}
        return manage_subscriptions(live.durables, request)

    file = None if live.writer.problem else choose_state_file(workspace.root, state)
    return serve_control(file, live.bridge, handle)


def make_live(workspace: Workspace, state: str | None, cluster: Backend | None = None) -> Live:
    """Return the `Live` of a workspace. `state` is the path of the state file, "none", or None for the default file.
    A cluster keeps the state instead."""
    from tidings.live import Live

    store = open_store(workspace.root, state) if cluster is None else None
    has_events = workspace.settings.events
    if has_events and cluster is not None:
        fail("[events] in tidings.toml needs one process; remove that section, or leave out --workers and --nats")
    live = Live(workspace, policy=workspace.settings.policy, store=store, cluster=cluster, events=has_events)
    if has_events:
        workspace.serve_events(live.events.types)
    return live
