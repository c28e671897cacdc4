"""Run the user's trigger, and check that each session is told of the change once, and how fast."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tidings.check.listing import ServerList, read_content, read_list
from tidings.check.notifications import changed_features
from tidings.check.run import Listener, Run
from tidings.core.model import UPDATED_METHOD, Feature
from tidings.core.redact import one_line
from tidings.errors import TidingsError
from tidings.runtime.child import Child
from tidings.wire.methods import CALL_TOOL, METHOD_NOT_FOUND, UNSUBSCRIBE
from tidings.wire.session import Frame, Session, Unanswered

__all__ = ["check_trigger"]

_RULES = ("told", "told-once", "tool-callable", "unsubscribe")
_POLL = 0.1
_MAX_POLL = 1.0
"""Seconds between two reads of the lists: the first pause, and the longest one."""
_MAX_CALLS = 3
_NO_COMMAND = 127
"""The status of a shell that finds no such command."""
_UNKNOWN = re.compile(r"unknown tool|no such tool|tool\b.*\bnot (found|exist|registered)", re.IGNORECASE | re.DOTALL)


async def check_trigger(run: Run) -> None:
    if run.options.trigger is None:
        run.skip(_RULES, "a change is needed: --trigger CMD|TOOL")
        return
    if not run.listeners:
        run.skip(_RULES, "the server has no stream of notifications")
        return
    round_ = await _Round.start(run)
    calls = asyncio.create_task(_call_new_tools(run, round_))
    try:
        await round_.run_trigger()
        await round_.wait()
        await asyncio.sleep(run.options.quiet_time)
        if round_.is_told_of_tools:
            await asyncio.wait([calls], timeout=2 * run.options.timeout)
            if not calls.done():
                raise Unanswered("the new tools were not called in time")
        called = calls.result() if calls.done() else None
    finally:
        calls.cancel()
        await asyncio.gather(calls, return_exceptions=True)
    await round_.read_state()
    _report_told(run, round_)
    if called is None:
        run.skip(["tool-callable"], "no session was told of a new tool")
    elif called:
        run.passed("tool-callable")
    else:
        run.skip(["tool-callable"], "the change added no tool")
    await _check_unsubscribe(run, round_)


@dataclass
class _Round:
    """One run of the trigger: the state before it, the notifications since, and the state after it."""

    run: Run
    listeners: list[Listener]
    positions: dict[int, int] = field(default_factory=dict)
    """The number of frames of each listener before the trigger, by its index."""
    before: dict[Session, dict[str, ServerList]] = field(default_factory=dict)
    after: dict[Session, dict[str, ServerList]] = field(default_factory=dict)
    contents: dict[Session, dict[str, Any]] = field(default_factory=dict)
    changed_uris: dict[Session, set[str]] = field(default_factory=dict)
    started: float = 0.0

    @classmethod
    async def start(cls, run: Run) -> _Round:
        round_ = cls(run, [each for each in run.listeners if not each.stream.is_ended])
        for session in round_.sessions:
            round_.before[session] = await run.lists(session)
            round_.contents[session] = {uri: await read_content(session, uri) for uri in run.contents}
        round_.positions = {index: len(each.stream.frames) for index, each in enumerate(round_.listeners)}
        return round_

    @property
    def sessions(self) -> list[Session]:
        return list(dict.fromkeys(listener.session for listener in self.listeners))

    async def run_trigger(self) -> None:
        trigger = self.run.options.trigger
        assert trigger is not None
        self.started = self.run.transcript.now()
        tool, arguments = _find_tool(trigger, self.before)
        if tool is None:
            self.run.transcript.record("trigger", "sent", trigger)
            await _run_command(trigger)
            return
        # A process on stdio has a state of its own, so the tool runs in each.
        for session in self.sessions if not self.run.is_http else self.sessions[:1]:
            answer = await session.request(CALL_TOOL, name=tool, arguments=arguments)
            if answer.result is None or answer.result.get("isError"):
                raise TidingsError(f"--trigger: the tool {tool} failed: {one_line(json.dumps(answer.content), 200)}")

    async def read_state(self) -> None:
        for session in self.sessions:
            self.after[session] = await self.run.lists(session)
            before = self.contents[session]
            now = {uri: await read_content(session, uri) for uri in before}
            self.changed_uris[session] = {uri for uri in before if before[uri] != now[uri]}

    def changed(self, session: Session) -> set[Feature]:
        return changed_features(self.before[session], self.after[session])

    def frames(self, listener: Listener, method: str, uri: str | None = None) -> list[Frame]:
        since = self.positions[self.listeners.index(listener)]
        found = [frame for frame in listener.stream.notifications(since) if frame.method == method]
        return [frame for frame in found if uri is None or frame.uri == uri]

    def expected(self, listener: Listener) -> list[tuple[str, str | None]]:
        """Return the method, and the URI of a content, of each notification that the listener was promised."""
        features = [each for each in Feature if each in self.changed(listener.session) and listener.is_promised(each)]
        uris = [uri for uri in listener.uris if uri in self.changed_uris[listener.session]]
        return [(feature.method, None) for feature in features] + [(UPDATED_METHOD, uri) for uri in uris]

    async def wait(self) -> None:
        """Wait until there is a change and all are told of it, or until the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.run.options.timeout):
                pause = _POLL
                while True:
                    await self.read_state()
                    expected = {index: self.expected(each) for index, each in enumerate(self.listeners)}
                    if any(expected.values()) and all(
                        self.frames(self.listeners[index], *each) for index, found in expected.items() for each in found
                    ):
                        return
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _MAX_POLL)

    @property
    def is_told_of_tools(self) -> bool:
        return any(self.frames(listener, Feature.TOOLS.method) for listener in self.listeners)


def _report_told(run: Run, round_: _Round) -> None:
    is_changed = False
    # Notifications without a change can't be distinguished from those of the change.
    is_noisy = "unchanged" in run.report.failed
    for listener in round_.listeners:
        session, stream = listener.session, listener.stream
        is_changed = is_changed or bool(round_.changed(session) or round_.changed_uris[session])
        for method, uri in round_.expected(listener):
            frames = round_.frames(listener, method, uri)
            name = f"{method} {uri}" if uri else method
            if not frames:
                promise = stream.acknowledgement or session.discovery
                message = f"{stream.channel} was not told of a change: {name}"
                run.report.add("told", message, [promise, *_pages(round_, session, method)])
            elif len(frames) > 1 and not is_noisy:
                message = f"{stream.channel} was told {len(frames)} times of one change: {name}"
                run.report.add("told-once", message, frames)
            if frames:
                run.report.latencies.setdefault(session.era, []).append(frames[0].time - round_.started)
        for method in (feature.method for feature in Feature if feature not in round_.changed(session)):
            for frame in round_.frames(listener, method)[:1]:
                if stream.expects(frame):
                    run.report.add(
                        "unchanged", f"{method} after the trigger, and the list is the same as before", [frame]
                    )
    if is_noisy:
        run.skip(["told-once"], "the server notifies although nothing changes; see `unchanged`")
    if is_changed:
        run.passed("told", *(() if is_noisy else ("told-once",)))
    else:
        run.skip(["told", "told-once"], "the trigger changed no list and no watched resource; see --uri")


def _pages(round_: _Round, session: Session, method: str) -> list[Frame]:
    """Return the first page of the list before and after the change."""
    pages = []
    for lists in (round_.before[session], round_.after[session]):
        pages += [listing.pages[0] for name, listing in lists.items() if name.split("/")[0] in method and listing.pages]
    return pages


async def _call_new_tools(run: Run, round_: _Round) -> int:
    """On the first notification of tools, list and call the new ones at once. Return how many were called."""
    told = asyncio.Event()

    async def wait_for(listener: Listener) -> None:
        await listener.stream.until(lambda: round_.frames(listener, Feature.TOOLS.method), 2 * run.options.timeout)
        if round_.frames(listener, Feature.TOOLS.method):
            first.append(listener)
            told.set()

    first: list[Listener] = []
    waiting = [asyncio.create_task(wait_for(listener)) for listener in round_.listeners]
    try:
        await told.wait()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    session = first[0].session
    listing = await read_list(session, "tools/list")
    known = round_.before[session].get("tools/list", ServerList({})).items
    added = [name for name in listing.keys if name not in known][:_MAX_CALLS]
    for name in added:
        answer = await session.request(CALL_TOOL, name=name, arguments={})
        if _is_unknown(answer.message):
            notice = round_.frames(first[0], Feature.TOOLS.method)[:1]
            message = "a tool that was listed after the notification could not be called"
            run.report.add("tool-callable", message, [*notice, *listing.pages[:1], answer])
    return len(added)


def _is_unknown(message: Mapping[str, Any]) -> bool:
    """Return whether a call failed because there is no such tool. With any other error, the tool exists."""
    error, result = message.get("error"), message.get("result")
    if isinstance(error, dict):
        return error.get("code") == METHOD_NOT_FOUND or bool(_UNKNOWN.search(str(error.get("message"))))
    if isinstance(result, dict) and result.get("isError"):
        return bool(_UNKNOWN.search(json.dumps(result.get("content"))))
    return False


async def _check_unsubscribe(run: Run, first: _Round) -> None:
    """Unsubscribe one legacy session, and run the trigger again. That session must not be told."""
    leaving = [each for each in run.listeners if each.stream.subscribed and not each.stream.is_ended]
    if not leaving and any(stream.cancelled for session in run.opened for stream in session.streams):
        run.passed("unsubscribe")  # `check_frames` looks for messages after the cancellation
        return
    if not leaving:
        run.skip(["unsubscribe"], "no legacy session could subscribe to a resource")
        return
    listener = leaving[0]
    session, stream = listener.session, listener.stream
    if not first.changed_uris[session] & stream.subscribed:
        run.skip(["unsubscribe"], "the trigger changed no watched resource; see --uri")
        return
    unsubscribed: Frame | None = None
    for uri in sorted(stream.subscribed):
        unsubscribed = frame = await session.request(UNSUBSCRIBE, uri=uri)
        if "error" in frame.message:
            run.report.add("unsubscribe", "resources/unsubscribe is answered with an error", [session.discovery, frame])
    stream.unsubscribed = set(stream.subscribed)
    stream.subscribed.clear()
    round_ = await _Round.start(run)
    await round_.run_trigger()
    await round_.wait()
    await asyncio.sleep(run.options.quiet_time)
    await round_.read_state()
    told = [frame for frame in round_.frames(listener, UPDATED_METHOD) if frame.uri in stream.unsubscribed]
    if told:
        message = f"{stream.channel} was told of a resource after it had unsubscribed"
        run.report.add("unsubscribe", message, [unsubscribed, *told])
    elif not round_.changed_uris[session] & stream.unsubscribed:
        run.skip(["unsubscribe"], "the second run of the trigger changed no watched resource; see --uri")
        return
    run.passed("unsubscribe")


def _find_tool(trigger: str, lists: Mapping[Session, dict[str, ServerList]]) -> tuple[str | None, dict[str, Any]]:
    """Return the tool that the trigger names, and its arguments. `NAME` or `NAME {JSON}`; otherwise it is a command."""
    name, _, rest = trigger.partition(" ")
    if not any(name in found["tools/list"].items for found in lists.values() if "tools/list" in found):
        return None, {}
    try:
        arguments = json.loads(rest) if rest.strip() else {}
    except ValueError as error:
        raise TidingsError(f"--trigger: the arguments of the tool {name} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise TidingsError(f"--trigger: the arguments of the tool {name} must be a JSON object")
    return name, arguments


async def _run_command(command: str) -> None:
    child = await Child.start(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=None, kills_rest=False
    )
    status = await child.wait()
    if status:
        hint = f"; the server has no tool {command.split()[0]}" if status == _NO_COMMAND else ""
        raise TidingsError(f"--trigger: the command ended with status {status}{hint}")
