"""The running `tidings watch`: it follows a `Mirror`, and reports changes, the state of the connection and a summary.

The mirror decides what a change is. Changes go to standard output, everything else to standard error.

Import this module only when the command runs, because it imports the SDK.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from tidings.cli.exec_hook import ExecHook
from tidings.cli.logs import TextFormatter
from tidings.cli.options import Server
from tidings.cli.output import pluralize, print_json_lines, print_stderr, print_styled
from tidings.cli.remote import bearer_headers, connect
from tidings.cli.watch_change import Connected, WatchedChange, format_latency
from tidings.client import Detected, ItemChange, Mirror, Status
from tidings.core.frames import CHANGE_KEY, DELETED_METHOD, EXTENSION
from tidings.core.model import UPDATED_METHOD, Feature, Operation
from tidings.core.patterns import is_pattern
from tidings.core.redact import one_line
from tidings.errors import Disconnected, NotSupported

__all__ = ["WatchOptions", "watch_target"]

_SETTLED = 1.0
"""Seconds that a state lasts until it is reported: a legacy session polls for a moment, until its stream is open."""
_ANSWER_TIMEOUT = 20.0
"""Seconds for the first answer of a URL. A command may install its server first, so it has no limit."""
_WAIT_NOTICE = 5.0
"""Seconds without an answer until the user is told."""


@dataclass(frozen=True)
class WatchOptions:
    target: Any
    """For the `Client` of the SDK: a URL, or the parameters of a stdio server."""
    server: Server
    is_legacy: bool
    features: frozenset[Feature]
    uris: tuple[str, ...]
    operations: frozenset[Operation]
    is_json: bool
    command: str | None
    """The command of `--exec`."""


async def watch_target(options: WatchOptions) -> None:
    """Report changes until Ctrl-C, which cancels this task. Raise `TidingsError` if the target can't be watched."""
    _set_up_logging()
    async with _connect(options) as mirror:
        session = _Session(options, mirror)
        await session.subscribe()
        session.greet()
        try:
            await session.run()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # Ctrl-C is the usual end
        session.summarize()


def _set_up_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter("%(message)s"))
    handler.addFilter(_filter_sdk_record)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _filter_sdk_record(record: logging.LogRecord) -> bool:
    """Drop the records of the SDK's transports, and those of asyncio about their unfinished writes: the mirror reports
    the same in one line. Remove the traceback from the records of the SDK's sessions, whose logger is `client`."""
    if record.name == "client":
        record.exc_info = None
    return not record.name.startswith(("mcp", "asyncio"))


@asynccontextmanager
async def _connect(options: WatchOptions) -> AsyncIterator[Mirror]:
    client = Client(options.target, mode="legacy" if options.is_legacy else "auto")
    mirror = Mirror(client, headers=bearer_headers(options.server.token) | options.server.headers)
    notice = asyncio.get_running_loop().call_later(
        _WAIT_NOTICE, print_stderr, f"Waiting for the first answer of {options.server.name}. Stop with Ctrl-C."
    )
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT if options.server.is_http else None):
            await mirror.__aenter__()
    except TimeoutError:
        raise Disconnected(f"{options.server.name} did not answer within {_ANSWER_TIMEOUT:g} s") from None
    except Disconnected as error:
        if options.server.is_http:
            async with connect(options.target, options.server.token, options.server.headers):
                pass  # it says why: a missing token, another path, a server that does not run
            raise
        raise Disconnected(
            f"{error}; a stdio target is a command that speaks MCP on its standard input and output"
        ) from None
    finally:
        notice.cancel()
    try:
        yield mirror
    finally:
        await mirror.__aexit__(None, None, None)


class _Session:
    def __init__(self, options: WatchOptions, mirror: Mirror) -> None:
        self._options = options
        self._mirror = mirror
        self._client = mirror.client
        self._connected = self._describe_connection()
        self._contents: dict[str, WatchedChange] = {}
        """The changes of contents that are not reported yet, by URI: at most one per URI, however many there are."""
        self._has_contents = asyncio.Event()
        self._after_reconnect: set[str] = set()
        """The URIs that the mirror reports once after a reconnect, because their contents may have changed."""
        self._hook = ExecHook(options.command, is_json=options.is_json) if options.command else None
        self._print: Callable[[WatchedChange], None] = _print_json if options.is_json else _print_lines
        self._started = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._reconnects = 0
        mirror.set_notification_handler(UPDATED_METHOD, lambda message: self._on_content(message.params))
        mirror.set_notification_handler(DELETED_METHOD, lambda params: self._on_content(params, is_deleted=True))

    async def subscribe(self) -> None:
        """Subscribe to the contents that the user named."""
        is_tidings = EXTENSION in (self._client.server_capabilities.extensions or {})
        for uri in self._options.uris:
            # The servers of others take a pattern for a URI, and never notify of it. Legacy servers do not say which
            # kind they are.
            if is_pattern(uri) and self._connected.is_modern and not is_tidings:
                raise NotSupported(f"--uri {uri}: only Tidings servers support patterns; give the URI of a resource")
            try:
                await self._mirror.subscribe(uri)
            except MCPError as error:
                raise NotSupported(f"--uri {uri}: the server refuses it: {one_line(error.message, 200)}") from None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            # Called here, because a change before the start of the task must be reported too.
            tasks.create_task(self._report_lists(self._mirror.changes()))
            tasks.create_task(self._report_contents())
            tasks.create_task(self._report_status())
            if self._hook is not None:
                tasks.create_task(self._hook.run())

    # Changes

    async def _report_lists(self, changes: AsyncIterator[ItemChange]) -> None:
        async for change in changes:
            self._check_connection()
            feature = Feature.RESOURCES if change.list == "templates" else Feature(change.list)
            if feature in self._options.features:
                await self._report(self._make_change(change, feature))

    def _make_change(self, change: ItemChange, feature: Feature) -> WatchedChange:
        kind = change.list.removesuffix("s")
        return WatchedChange(
            *(change.operation, change.name, kind, feature, self._connected, time.time()),
            detected=change.detected or Detected("poll"),
            item=_as_json(change.item),
            before=None if change.before is None else _as_json(change.before),
        )

    def _on_content(self, params: Any, *, is_deleted: bool = False) -> None:
        self._check_connection()
        uri, meta = str(params.uri), params.meta or {}
        detected = Detected("notification")
        if uri in self._after_reconnect and not meta:
            self._after_reconnect.discard(uri)
            detected = Detected("reconnect")
        # A Tidings server tells legacy clients of a deletion in this way.
        summary = meta.get(CHANGE_KEY)
        is_deleted = is_deleted or (isinstance(summary, dict) and summary.get("operation") == Operation.DELETED)
        operation = Operation.DELETED if is_deleted else Operation.UPDATED
        self._contents[uri] = WatchedChange(operation, uri, "content", None, self._connected, time.time(), detected)
        self._has_contents.set()

    async def _report_contents(self) -> None:
        while True:
            await self._has_contents.wait()
            self._has_contents.clear()
            while self._contents:
                await self._report(self._contents.pop(next(iter(self._contents))))

    async def _report(self, change: WatchedChange) -> None:
        if change.operation not in self._options.operations:
            return
        self._counts[change.operation] += 1
        if change.detected.latency is not None:
            self._latencies.append(change.detected.latency)
        self._print(change)
        if self._hook is not None:
            await self._hook.put(change)

    # The connection

    def _describe_connection(self) -> Connected:
        version = self._client.protocol_version
        return Connected(version, version in MODERN_PROTOCOL_VERSIONS, self._options.server.transport)

    def _check_connection(self) -> None:
        """Note whether the mirror has a new connection."""
        with suppress(Disconnected):
            if (client := self._mirror.client) is not self._client:
                self._client = client
                self._connected = self._describe_connection()
                self._reconnects += 1
                self._after_reconnect = set(self._mirror.subscribed)
                print_stderr(f"Connected again: {self._connection_text()}.")

    def _connection_text(self) -> str:
        connected = self._connected
        info = self._client.server_info
        name = f"{one_line(info.name, 100)}, " if info is not None and info.name else ""
        transport = "HTTP" if connected.transport == "http" else connected.transport
        return f"{name}{connected.era} era ({one_line(connected.protocol, 40)}), {transport}"

    async def _report_status(self) -> None:
        """Report each lost connection at once, and other states if they last."""
        shown: tuple[str, str | None] = ("fresh", None)
        status = self._mirror.status
        while True:
            self._check_connection()
            seen, present = status, (status.state, status.reason)
            if status.state != "reconnecting":
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SETTLED):
                        status = await self._mirror.next_status(seen)
                        continue
            if present != shown:
                self._print_status(status, shown[0])
                shown = present
            status = await self._mirror.next_status(seen)

    def _print_status(self, status: Status, before: str) -> None:
        if status.state == "reconnecting":
            print_stderr(f"Connection lost: {status.reason or 'the reason is not known'}. Reconnecting.")
        elif status.state == "stale" and status.reason:
            print_stderr(f"The server answers with an error: {status.reason}. Trying again.")
        elif status.state == "polling":
            print_stderr("The server does not notify of changes of all its lists. Polling.")
        elif status.state == "fresh" and before in ("polling", "stale"):
            print_stderr("The server notifies of changes.")

    # Messages

    def greet(self) -> None:
        snapshot = self._mirror.snapshot()
        lists = {"tool": snapshot.tools, "prompt": snapshot.prompts, "resource": snapshot.resources}
        lists["template"] = snapshot.templates
        items = ", ".join(pluralize(len(found), noun) for noun, found in lists.items())
        print_stderr(f"Watching {self._options.server.name}: {self._connection_text()}; {items}. Stop with Ctrl-C.")

    def summarize(self) -> None:
        duration = time.monotonic() - self._started
        parts = [pluralize(self._counts.total(), "change")]
        if self._counts:
            parts[0] += f" ({', '.join(f'{number} {operation}' for operation, number in self._counts.items())})"
        if self._latencies:
            median, longest = statistics.median(self._latencies), max(self._latencies)
            parts.append(f"latency {format_latency(median)} median, {format_latency(longest)} longest")
        if self._reconnects:
            parts.append(pluralize(self._reconnects, "reconnect"))
        if self._hook is not None and self._hook.failures:
            parts.append(f"{pluralize(self._hook.failures, 'command')} failed")
        if self._hook is not None and self._hook.unfinished:
            parts.append(f"{pluralize(self._hook.unfinished, 'command')} not finished")
        print_stderr(f"Watched for {duration:.0f} s: {'; '.join(parts)}.")


def _as_json(item: Any) -> dict[str, Any]:
    written: dict[str, Any] = item.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return written


def _print_json(change: WatchedChange) -> None:
    print_json_lines([change.as_json()])


def _print_lines(change: WatchedChange) -> None:
    for line in change.as_lines():
        print_styled(*line)
