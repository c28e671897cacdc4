"""`tidings history URL|DIR`: print past changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tidings.cli.auth import read_token
from tidings.cli.options import Target, Token, TokenFile
from tidings.cli.output import fail, print_json_lines, print_stderr, print_stdout, print_table
from tidings.cli.remote import Unreachable, connect, is_url, run
from tidings.core.model import Feature
from tidings.core.redact import one_line

if TYPE_CHECKING:
    from tidings.cli.remote import Remote
    from tidings.core.journal import ChangeHistory
    from tidings.store import State

__all__ = ["history"]

_POLL = 1.0
"""Seconds between two checks of a file, and between two attempts to connect to a server."""

_TITLES = ("time", "revision", "operation", "of", "name or URI", "origin")
_STYLES = {"added": "green", "removed": "red", "deleted": "red", "": "yellow"}
_SinceType: Any = Annotated[int, msgspec.Meta(ge=0)] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Query:
    feature: Feature | None = None
    uri: str | None = None
    since: int | dict[str, Any] | None = None
    limit: int | None = None
    is_full: bool = False

    def params(self) -> dict[str, Any]:
        params = {
            "feature": self.feature and self.feature.value,
            "uri": self.uri,
            "since": self.since,
            "limit": self.limit,
            "detail": "full" if self.is_full else None,
        }
        return {name: value for name, value in params.items() if value is not None}

    def after(self, changes: list[dict[str, Any]]) -> _Query:
        """Return the query for the changes that follow these."""
        return replace(self, since=changes[-1]["revision"] if changes else self.since, limit=None)

    def warn_if_incomplete(self, is_complete: bool) -> None:
        if not is_complete and self.limit is None:
            print_stderr("The history is incomplete: older changes are forgotten.")


_Printer = Callable[[list[dict[str, Any]]], None]


def history(
    target: Target = ".",
    feature: Annotated[Feature | None, typer.Option(help="Only changes of this list.")] = None,
    uri: Annotated[str | None, typer.Option(help="Only changes of the content of this resource.")] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Only changes after this revision, or since this cursor.", metavar="REVISION|JSON"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The number of newest changes; 0 for all.", min=0)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new changes until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, with the items.")] = False,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """Print past changes, oldest first.

    For a URL, the history that the running server remembers and the caller may see. For a folder, the history in its
    state file, whether or not a server runs.
    """
    if feature is not None and uri is not None:
        fail("--feature and --uri exclude each other; give one of them")
    query = _Query(feature, uri, _parse_since(since), limit or None, as_json)
    show: _Printer = print_json_lines if as_json else _print_lines
    if not as_json and not follow and sys.stdout.isatty():
        show = _print_table
    if is_url(target):
        run(_print_from_server(target, read_token(auth_token, auth_token_file), query, follow, show))
    else:
        _print_from_file(Path(target), query, follow, show)


def _parse_since(text: str | None) -> int | dict[str, Any] | None:
    if text is None:
        return None
    try:
        since: int | dict[str, Any] = msgspec.json.decode(text, type=_SinceType)
    except (msgspec.DecodeError, msgspec.ValidationError):
        fail(f"--since {text}: give a revision like 12, or a cursor that a server sent, in JSON")
    return since


async def _request_pages(remote: Remote, query: _Query) -> tuple[list[dict[str, Any]], bool, str]:
    """Return the changes of all pages, whether they are complete, and the server's epoch."""
    params = query.params()
    changes: list[dict[str, Any]] = []
    is_complete = True
    while True:
        page = await remote.request("dev.tidings/history", **params)
        changes += page["changes"]
        is_complete = is_complete and page["complete"]
        if "nextCursor" not in page:
            return changes, is_complete, page["epoch"]
        params["cursor"] = page["nextCursor"]


async def _print_from_server(url: str, token: str | None, query: _Query, follow: bool, show: _Printer) -> None:
    """Print the history of a server. With `follow`, continue until Ctrl-C, also after the server restarts."""
    import asyncio

    epoch: str | None = None
    while True:
        try:
            async with connect(url, token) as remote, AsyncExitStack() as stack:
                if follow:
                    await stack.enter_async_context(remote.watch([query.uri or "**"]))
                while not remote.is_lost:
                    remote.changed.clear()
                    changes, is_complete, current_epoch = await _request_pages(remote, query)
                    is_other_server, epoch = epoch not in (None, current_epoch), current_epoch
                    if is_other_server:
                        print_stderr("Another server answers at this URL now; its history starts here.")
                        query = replace(query, since=None)
                        continue
                    show(changes)
                    query.warn_if_incomplete(is_complete)
                    if not follow:
                        return
                    query = query.after(changes)
                    await remote.wait()
            print_stderr(f"{url} has stopped; waiting for it to restart.")
        except Unreachable as error:
            if epoch is None:
                raise
            print_stderr(f"{error}; trying again.")
        await asyncio.sleep(_POLL)


def _print_from_file(folder: Path, query: _Query, follow: bool, show: _Printer) -> None:
    from tidings.cli.state import find_state, read_state
    from tidings.core.journal import change_json
    from tidings.store import StoreBroken, StoreError

    path = find_state(folder)
    epoch: str | None = None
    is_waiting = False
    while True:
        file_versions = _read_file_versions(path)
        try:
            state = read_state(path)
        except StoreError as error:
            if epoch is None or isinstance(error, StoreBroken):
                raise
            if not is_waiting:
                print_stderr(f"{error}. Waiting for it.")
            is_waiting = True
            threading.Event().wait(_POLL)
            continue
        is_waiting = False
        if epoch not in (None, state.epoch):
            print_stderr("Another state is in this file now; its history starts here.")
            query = replace(query, since=None)
        epoch = state.epoch
        past = _select_changes(state, query)
        changes = [change_json(change, is_full=query.is_full) for change in past.changes]
        show(changes)
        query.warn_if_incomplete(past.complete)
        if not follow:
            return
        query = query.after(changes)
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


def _select_changes(state: State, query: _Query) -> ChangeHistory:
    from tidings.core.catalog import UNKNOWN
    from tidings.core.cursor import Cursor
    from tidings.core.journal import ChangeHistory, changes_since_told
    from tidings.core.model import Topic, Version

    topic: Topic | None = query.feature or query.uri

    def current(topic: Topic) -> Version:
        if isinstance(topic, Feature):
            return state.versions.get(topic, UNKNOWN)
        return state.contents.get(topic, UNKNOWN)

    if isinstance(query.since, dict) and (cursor := Cursor.parse(query.since)) is not None:
        past = changes_since_told(state.journal, current, cursor.told(state.epoch), topic)
    else:
        since = query.since if isinstance(query.since, int) else 0
        changes = tuple(change for change in state.journal if change.revision > since and topic in (None, change.topic))
        journals = (None, *Feature) if topic is None else (topic if isinstance(topic, Feature) else None,)
        is_complete = all(since >= state.floors.get(journal, 0) for journal in journals)
        past = ChangeHistory(changes, is_complete and not isinstance(query.since, dict))
    return past if query.limit is None else past.newest(query.limit)


def _print_lines(changes: list[dict[str, Any]]) -> None:
    for change in changes:
        moment, revision, operation, topic, key, origin = _format_cells(change)
        print_stdout(f"{moment}  {revision:>6}  {operation:<8} {topic:<10} {key}  ({origin})")


def _print_table(changes: list[dict[str, Any]]) -> None:
    if changes:
        print_table(_TITLES, map(_format_cells, changes), _TITLES.index("operation"), _STYLES)
    else:
        print_stderr("There are no changes.")


def _format_cells(change: dict[str, Any]) -> tuple[str, ...]:
    cells = (
        change["time"],
        change["revision"],
        change["operation"],
        change.get("feature", "content"),
        change.get("name") or change["uri"],
        change["origin"],
    )
    return tuple(one_line(str(cell)) for cell in cells)  # a server's text must not control the terminal
