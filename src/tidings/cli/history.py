"""`tidings history URL|DIR`: print past changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tidings.cli.auth import read_token
from tidings.cli.options import Target, Token, TokenFile, flag, is_url, option
from tidings.cli.output import fail, print_json_lines, print_stderr, print_stdout, print_table
from tidings.cli.state import find_state, read_state, restore_hub
from tidings.core.journal import change_json
from tidings.core.model import Feature
from tidings.core.redact import one_line

if TYPE_CHECKING:
    from tidings.cli.remote import Remote
    from tidings.store import State

__all__ = ["history"]

_POLL = 1.0
"""Seconds between two checks of a file, and between two attempts to connect to a server."""

_TITLES = ("time", "revision", "operation", "of", "name or URI")
_STYLES = {"added": "green", "removed": "red", "deleted": "red", "": "yellow"}


_Printer = Callable[[list[dict[str, Any]]], None]


class _Pages:
    """Prints the pages of a history, and keeps the params of the request for the next page."""

    def __init__(self, params: dict[str, Any], show: _Printer) -> None:
        self.params = {name: value for name, value in params.items() if value is not None}
        self.epoch: str | None = None
        self._show = show

    def print(self, changes: list[dict[str, Any]], is_complete: bool, epoch: str, new_epoch: str) -> bool:
        """Print a page. If it is of another epoch, print `new_epoch` instead, and return False: its history has to be
        requested from the start."""
        if self.epoch not in (None, epoch):
            self.epoch = epoch
            self.params.pop("since", None)
            print_stderr(f"{new_epoch} now; its history starts here.")
            return False
        self.epoch = epoch
        self._show(changes)
        if not is_complete and "limit" not in self.params:
            print_stderr("The history is incomplete: older changes are forgotten.")
        self.params.pop("limit", None)
        if changes:
            self.params["since"] = changes[-1]["revision"]
        return True


def history(
    target: Target = ".",
    feature: Annotated[Feature | None, option("Only changes of this list.")] = None,
    uri: Annotated[str | None, option("Only changes of the content of this resource.", "URI")] = None,
    since: Annotated[int | None, option("Only changes after this revision.", "REVISION", min=0)] = None,
    limit: Annotated[int, option("The number of newest changes; 0 for all.", "NUMBER", "--limit", "-n", min=0)] = 50,
    events: Annotated[
        bool, flag("--events", "For a folder: the events that its server emitted, instead of changes.")
    ] = False,
    follow: Annotated[bool, flag("--follow", "-f", "Continue with new changes until Ctrl-C.")] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object per line, with the items.")] = False,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """Print past changes, oldest first.

    For a URL, the history that the running server remembers and the caller may see. For a folder, the history in its
    state file, whether or not a server runs.
    """
    if feature is not None and uri is not None:
        fail("--feature and --uri exclude each other; give one of them")
    if events:
        if is_url(target) or feature is not None or uri is not None or since is not None or follow:
            fail("--events is for a folder, with no other option than --limit and --json")
        _print_events(Path(target), limit, as_json=as_json)
        return
    detail = "full" if as_json else "summary"
    params = {"feature": feature, "uri": uri, "since": since, "limit": limit or None, "detail": detail}
    show: _Printer = print_json_lines if as_json else _print_lines
    if not as_json and not follow and sys.stdout.isatty():
        show = _print_table
    pages = _Pages(params, show)
    if is_url(target):
        from tidings.cli.remote import run

        run(_print_from_server(target, read_token(auth_token, auth_token_file), pages, follow))
    else:
        _print_from_file(Path(target), pages, follow)


def _print_events(folder: Path, limit: int, *, as_json: bool) -> None:
    from tidings.events.occurrences import read_history

    found = list(read_history(read_state(find_state(folder)).events))[-limit if limit else None :]
    if as_json:
        print_json_lines(found)
        return
    for event in found:
        waiting = f"  ({event['waiting']} waiting)" if event["waiting"] else ""
        data = msgspec.json.encode(event["data"]).decode()
        print_stdout(one_line(f"{event['timestamp']}  {event['name']}  {event['eventId']}  {data}{waiting}"))


async def _print_from_server(url: str, token: str | None, pages: _Pages, follow: bool) -> None:
    """Print the history of a server. With `follow`, continue until Ctrl-C, also after the server restarts."""
    import asyncio

    from tidings.cli.remote import Unreachable, connect

    while True:
        try:
            async with connect(url, token) as remote:
                if follow:
                    await remote.watch([pages.params.get("uri", "**")])
                while not remote.is_lost:
                    remote.clear()
                    found = await _request_changes(remote, pages.params)
                    if not pages.print(*found, "Another server answers at this URL"):
                        continue
                    if not follow:
                        return
                    await remote.wait()
            print_stderr(f"{url} has stopped; waiting for it to restart.")
        except Unreachable as error:
            if pages.epoch is None:
                raise
            print_stderr(f"{error}; trying again.")
        await asyncio.sleep(_POLL)


async def _request_changes(remote: Remote, params: dict[str, Any]) -> tuple[list[dict[str, Any]], bool, str]:
    """Return the changes of all pages of a response, whether they are complete, and the server's epoch."""
    from tidings.server.extension import HISTORY

    changes: list[dict[str, Any]] = []
    is_complete = True
    cursor: dict[str, str] = {}
    while True:
        page = await remote.request(HISTORY, **params, **cursor)
        changes += page["changes"]
        is_complete = is_complete and page["complete"]
        if "nextCursor" not in page:
            return changes, is_complete, page["epoch"]
        cursor["cursor"] = page["nextCursor"]


def _print_from_file(folder: Path, pages: _Pages, follow: bool) -> None:
    from tidings.store import StoreBroken, StoreError

    path = find_state(folder)
    is_waiting = False
    while True:
        file_versions = _read_file_versions(path)
        try:
            state = read_state(path)
        except StoreError as error:
            if pages.epoch is None or isinstance(error, StoreBroken):
                raise
            if not is_waiting:
                print_stderr(f"{error}. Waiting for it.")
            is_waiting = True
            threading.Event().wait(_POLL)
            continue
        is_waiting = False
        if not pages.print(*_find_changes(state, pages.params), "Another state is in this file"):
            continue
        if not follow:
            return
        while _read_file_versions(path) == file_versions:
            threading.Event().wait(_POLL)


def _read_file_versions(path: Path) -> list[tuple[int, int]]:
    """Return a value that differs after a server has written to the file."""
    versions = []
    path = path.resolve()  # SQLite's log is beside the file and not beside a link to it
    for file in (path, path.with_name(f"{path.name}-wal")):
        try:
            status = file.stat()
        except OSError:
            continue
        if status.st_size:
            versions.append((status.st_mtime_ns, status.st_size))
    return versions


def _find_changes(state: State, params: dict[str, Any]) -> tuple[list[dict[str, Any]], bool, str]:
    """Return the same as `_request_changes`, but from a state file."""
    topic = params.get("feature", params.get("uri"))
    past = restore_hub(state).history(topic, params.get("since"), state.epoch)
    if "limit" in params:
        past = past.newest(params["limit"])
    changes = [change_json(change, is_full=params["detail"] == "full") for change in past.changes]
    return changes, past.complete, state.epoch


def _omit_repeated(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Omit the change of a resource's content if the resource was added or removed at the same time."""
    listed = {(change.get("uri"), change["time"]) for change in changes if change["operation"] in ("added", "removed")}
    return [change for change in changes if "feature" in change or (change["uri"], change["time"]) not in listed]


def _print_lines(changes: list[dict[str, Any]]) -> None:
    for change in _omit_repeated(changes):
        moment, revision, operation, topic, key = _format_cells(change)
        print_stdout(f"{moment}  {revision:>6}  {operation:<8} {topic:<10} {key}")


def _print_table(changes: list[dict[str, Any]]) -> None:
    if changes:
        print_table(_TITLES, map(_format_cells, _omit_repeated(changes)), _TITLES.index("operation"), _STYLES)
    else:
        print_stderr("There are no changes.")


def _format_cells(change: dict[str, Any]) -> tuple[str, ...]:
    cells = (
        change["time"],
        change["revision"],
        change["operation"],
        change.get("feature", "content"),
        change.get("name") or change["uri"],
    )
    return tuple(one_line(str(cell)) for cell in cells)  # a server's text must not control the terminal
