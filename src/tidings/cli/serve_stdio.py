"""`tidings serve DIR --stdio`: serve a folder to the one client that started the process."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidings.cli.auth import TOKEN_VARIABLE, erase_variable
from tidings.cli.folder import open_workspace
from tidings.cli.logs import LogOptions, set_up_logging
from tidings.cli.nats import NATS_VARIABLE
from tidings.cli.output import fail
from tidings.cli.state import choose_state_file, open_store
from tidings.server.garbage_collection import without_gc
from tidings.server.process_exit import exit_process

if TYPE_CHECKING:
    from tidings.cluster.backend import Backend
    from tidings.live import Live
    from tidings.workspace.source import Workspace

__all__ = ["accept_commands", "make_live", "serve_stdio"]

_EXIT_TIMEOUT = 1.0
"""Seconds after the end of serving until the process exits."""


def serve_stdio(folder: Path, poll: float, state: str | None, logs: LogOptions) -> None:
    set_up_logging(logs)
    erase_variable(TOKEN_VARIABLE)
    erase_variable(NATS_VARIABLE)
    workspace = open_workspace(folder, poll=poll)
    with without_gc():
        live = make_live(workspace, state)
        from tidings.cli.otlp import export_telemetry
        from tidings.cli.status import show_status
    with (
        export_telemetry(workspace.settings.name, live.failures),
        show_status(live, workspace, logs),
        accept_commands(live, workspace, state),
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
