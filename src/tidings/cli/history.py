"""`tidings history URL|DIR`: what changed, and when."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tidings.cli.output import fail, print_line, say
from tidings.cli.remote import Target, Token, TokenFile, Unreachable, connected, is_url, run, token_of
from tidings.core.model import Feature
from tidings.core.redact import plain

if TYPE_CHECKING:
    from tidings.cli.remote import Remote
    from tidings.core.history import Past
    from tidings.store import State

__all__ = ["history"]

_LOOK = 1.0
"""Seconds between two looks at a file, and two attempts to reach a server that has gone."""


_SINCE: Any = Annotated[int, msgspec.Meta(ge=0)] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What of the past is asked for."""

    feature: Feature | None = None
    uri: str | None = None
    since: int | dict[str, Any] | None = None
    limit: int | None = None

    def params(self) -> dict[str, Any]:
        given = {
            "feature": self.feature and self.feature.value,
            "uri": self.uri,
            "since": self.since,
            "limit": self.limit,
        }
        return {name: value for name, value in given.items() if value is not None}

    def after(self, changes: list[dict[str, Any]]) -> _Wanted:
        """What comes next."""
        if not changes:
            return replace(self, limit=None)
        return replace(self, since=changes[-1]["revision"], limit=None)


def history(
    target: Target = ".",
    feature: Annotated[Feature | None, typer.Option(help="Changes of this list only.")] = None,
    uri: Annotated[str | None, typer.Option(help="Changes of this resource's content only.")] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Changes after this revision, or since this cursor.", metavar="REVISION|JSON"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest so many; 0 for all.", min=0)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what changes from now on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, with the items.")] = False,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """Print what changed, the oldest first.

    Of a URL, what the running server remembers and the caller may see. Of a folder, what its state file holds, whether
    or not a server runs. Ctrl-C ends --follow.
    """
    if feature is not None and uri is not None:
        fail("--feature and --uri are two things; give one")
    wanted = _Wanted(feature, uri, _since(since), limit or None)
    show = _printer(as_json, follow)
    if is_url(target):
        token = token_of(auth_token, auth_token_file)
        if follow:
            run(_follow(target, token, wanted, as_json, show))
        else:
            changes, complete = run(_fetch(target, token, wanted, as_json))
            show(changes)
            _say_incomplete(wanted, complete)
    else:
        try:
            _read(Path(target), wanted, as_json, follow, show)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _since(given: str | None) -> int | dict[str, Any] | None:
    if given is None:
        return None
    try:
        found: int | dict[str, Any] = msgspec.json.decode(given, type=_SINCE)
    except (msgspec.DecodeError, msgspec.ValidationError):
        fail(f"--since {given}: give a revision, as 12, or a cursor as a server gave it, in JSON")
    return found


# Of a server


async def _fetch(url: str, token: str | None, wanted: _Wanted, is_full: bool) -> tuple[list[dict[str, Any]], bool]:
    async with connected(url, token) as remote:
        changes, complete, _ = await _ask(remote, wanted, is_full)
        return changes, complete


async def _ask(remote: Remote, wanted: _Wanted, is_full: bool) -> tuple[list[dict[str, Any]], bool, str]:
    """All pages of an answer, whether it is complete, and of which epoch."""
    params = wanted.params() | ({"detail": "full"} if is_full else {})
    changes: list[dict[str, Any]] = []
    complete = True
    while True:
        answer = await remote.ask("dev.tidings/history", **params)
        changes += answer["changes"]
        complete = complete and answer["complete"]
        if "nextCursor" not in answer:
            return changes, complete, answer["epoch"]
        params["cursor"] = answer["nextCursor"]


async def _follow(
    url: str, token: str | None, wanted: _Wanted, is_full: bool, show: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Go on for as long as there is a server, and when there is one again."""
    import asyncio

    epoch: str | None = None
    is_first = True
    while True:
        try:
            async with connected(url, token) as remote, remote.watching([wanted.uri or "**"]):
                while not remote.is_lost:
                    remote.roused.clear()
                    changes, complete, now = await _ask(remote, wanted, is_full)
                    if epoch not in (None, now):
                        say("Another server answers there now; this is its history from its beginning.")
                        wanted = replace(wanted, since=None)
                        epoch = now
                        continue
                    epoch = now
                    show(changes)
                    _say_incomplete(wanted, complete)
                    wanted, is_first = wanted.after(changes), False
                    await remote.wait()
            say(f"{url} has ended; waiting for it to come back.")
        except Unreachable as error:
            if is_first:
                raise
            say(f"{error}; trying again.")
        await asyncio.sleep(_LOOK)


# Of a folder


def _read(
    folder: Path, wanted: _Wanted, is_full: bool, follow: bool, show: Callable[[list[dict[str, Any]]], None]
) -> None:
    from tidings.cli.state import find_state, look
    from tidings.core.history import as_json
    from tidings.store import StoreBroken, StoreError

    path = find_state(folder)
    epoch: str | None = None
    is_waiting = False
    while True:
        marks = _marks(path)
        try:
            state = look(path)
        except StoreError as error:
            if epoch is None or isinstance(error, StoreBroken):
                raise
            if not is_waiting:
                say(f"{error}. Waiting for it.")
            is_waiting = True
            threading.Event().wait(_LOOK)
            continue
        is_waiting = False
        if epoch not in (None, state.epoch):
            say("Another state is there now; this is its history from its beginning.")
            wanted = replace(wanted, since=None)
        epoch = state.epoch
        past = _recall(state, wanted)
        changes = [as_json(change, is_full=is_full) for change in past.changes]
        show(changes)
        _say_incomplete(wanted, past.complete)
        if not follow:
            return
        wanted = wanted.after(changes)
        while _marks(path) == marks:
            threading.Event().wait(_LOOK)


def _marks(path: Path) -> list[tuple[int, int]]:
    """What differs when a server has written."""
    found = []
    path = path.resolve()  # SQLite's log is beside the file itself
    for each in (path, path.with_name(f"{path.name}-wal")):
        try:
            status = each.stat()
        except OSError:
            continue
        if status.st_size:
            found.append((status.st_mtime_ns, status.st_size))
    return found


def _recall(state: State, wanted: _Wanted) -> Past:
    from tidings.core.catalog import UNKNOWN
    from tidings.core.cursor import Cursor
    from tidings.core.history import Past, since_told
    from tidings.core.model import Topic, Version

    topic: Topic | None = wanted.feature or wanted.uri

    def current(topic: Topic) -> Version:
        if isinstance(topic, Feature):
            return state.versions.get(topic, UNKNOWN)
        return state.contents.get(topic, UNKNOWN)

    if isinstance(wanted.since, dict) and (cursor := Cursor.parse(wanted.since)) is not None:
        past = since_told(state.journal, current, cursor.told(state.epoch), topic)
    else:
        since = 0 if isinstance(wanted.since, dict) else wanted.since or 0
        changes = tuple(change for change in state.journal if change.revision > since and topic in (None, change.topic))
        histories = (None, *Feature) if topic is None else (topic if isinstance(topic, Feature) else None,)
        is_whole = all(since >= state.floors.get(each, 0) for each in histories)
        past = Past(changes, is_whole and not isinstance(wanted.since, dict))
    return past if wanted.limit is None else past.newest(wanted.limit)


# What is printed


def _say_incomplete(wanted: _Wanted, complete: bool) -> None:
    if not complete and wanted.limit is None:
        say("Not all of it is remembered: there were more changes before.")


def _printer(as_json: bool, follow: bool) -> Callable[[list[dict[str, Any]]], None]:
    if as_json:
        return _print_json
    return _print_table if sys.stdout.isatty() and not follow else _print_lines


def _print_json(changes: Iterable[dict[str, Any]]) -> None:
    for change in changes:
        print_line(change)


def _print_lines(changes: Iterable[dict[str, Any]]) -> None:
    for change in changes:
        time, revision, operation, topic, key, origin = _cells(change)
        typer.echo(f"{time}  {revision:>6}  {operation:<8} {topic:<10} {key}  ({origin})")
    sys.stdout.flush()


def _print_table(changes: Iterable[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("time", "revision", "operation", "of", "name or URI", "origin"):
        table.add_column(title, justify="right" if title == "revision" else "left", overflow="fold")
    for change in changes:
        cells = list(map(Text, _cells(change)))
        cells[2].stylize(_COLOURS.get(change["operation"], "yellow"))
        table.add_row(*cells)
    if table.row_count:
        Console().print(table)
    else:
        say("Nothing has changed.")


_COLOURS = {"added": "green", "removed": "red", "deleted": "red"}


def _cells(change: dict[str, Any]) -> tuple[str, ...]:
    cells = (
        change["time"],
        change["revision"],
        change["operation"],
        change.get("feature", "content"),
        change.get("name") or change["uri"],
        change["origin"],
    )
    return tuple(plain(str(cell)) for cell in cells)  # all a server's: nothing in them may command a terminal
