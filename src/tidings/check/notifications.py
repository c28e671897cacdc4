"""Check that nothing is sent while nothing changes, and that each message belongs to the stream that it came on."""

from __future__ import annotations

import asyncio
from typing import Any

from tidings.check.listing import Listing, read_content
from tidings.check.run import Listener, Run
from tidings.core.frames import ACKNOWLEDGED_METHOD
from tidings.core.model import Feature
from tidings.wire.http import HttpSession
from tidings.wire.methods import LIST_CHANGED, LIST_METHODS
from tidings.wire.session import Frame, Stream

__all__ = ["changed_features", "check_frames", "check_unchanged"]

_MAX_PAUSE = 1.0
"""Seconds after connecting, and after repeated list requests."""
_REPEATS = 3
_CONNECTED = "after the client connected"


async def check_unchanged(run: Run) -> None:
    """Listen while nothing changes: after connecting, while lists are read again and again, and idle."""
    if not run.listeners:
        run.skip(["unchanged"], "the server has no stream of notifications")
        return
    pause = min(_MAX_PAUSE, run.options.quiet_time)
    await asyncio.sleep(pause)
    occasions = [(run.transcript.now(), _CONNECTED)]
    again = await _reconnect(run)
    await asyncio.sleep(pause)
    occasions.append((run.transcript.now(), "after the client connected again"))
    for _ in range(_REPEATS):
        await _read_lists(run)
    await asyncio.sleep(pause)
    occasions.append((run.transcript.now(), "after the lists were read again"))
    await asyncio.sleep(run.options.quiet_time)
    after = await _read_lists(run)
    changed = {session: changed_features(before, after[session]) for session, before in run.before.items()}
    contents = {uri: await read_content(run.sessions[0], uri) for uri in run.contents}
    for listener in [*run.listeners, *again]:
        # Another session of the same era has the same lists, unless the server changes them at that moment.
        reference = next(session for session in run.sessions if session.era == listener.session.era)
        announced: set[str] = set()
        for frame in listener.stream.notifications():
            if not listener.stream.expects(frame):
                continue  # `check_frames` reports it
            occasion = next((text for end, text in occasions if frame.time <= end), "while the client was idle")
            if occasion is _CONNECTED and listener.session.era == "legacy" and frame.method not in announced:
                announced.add(frame.method)
                continue  # some servers tell each new session once, for clients that wait for it
            feature = LIST_CHANGED.get(frame.method)
            uri = frame.uri
            if feature is not None and frame.time < run.fetched.get((listener.session, feature), frame.time):
                continue  # the client has not fetched the list yet, so it has nothing that could be out of date
            if feature is not None and feature not in changed[reference]:
                message = f"{frame.method} {occasion}, and the list is the same as before"
                run.report.add("unchanged", message, [_opening(listener.stream), frame])
            elif feature is None and uri in contents and contents[uri] == run.contents[uri]:
                message = f"{frame.method} {occasion}, and the resource is the same as before"
                run.report.add("unchanged", message, [_opening(listener.stream), frame])
    for listener in again:
        await listener.session.cancel(listener.stream)
    run.passed("unchanged")


async def _reconnect(run: Run) -> list[Listener]:
    """Listen again with a new stream, and open the stream of a legacy session again. Return the new streams."""
    again: list[Listener] = []
    for listener in list(run.listeners):
        session, stream = listener
        if session is run.modern:
            again.append(Listener(session, await session.listen(stream.requested)))
        elif session.era == "modern" or session is run.legacy or not isinstance(session, HttpSession):
            continue
        elif not await session.reopen_stream():
            run.listeners.remove(listener)
    return again


async def _read_lists(run: Run) -> dict[Any, dict[str, Listing]]:
    return {session: await run.lists(session) for session in run.sessions}


def changed_features(before: dict[str, Listing], after: dict[str, Listing]) -> set[Feature]:
    """Return the features whose lists have other items, or items with other definitions."""
    empty = Listing({})
    methods = before.keys() | after.keys()
    return {
        LIST_METHODS[each].feature for each in methods if before.get(each, empty).items != after.get(each, empty).items
    }


def _opening(stream: Stream) -> Frame | None:
    return stream.acknowledgement or stream.opened


async def check_frames(run: Run) -> None:
    """Compare the messages of all streams with their requests."""
    streams = [stream for session in run.opened for stream in session.streams]
    for stream in streams:
        _check_subscription(run, stream)
    if any(stream.acknowledgement is not None for stream in streams):
        run.passed("ack-first", "ack-subset", "frame-tag")
    for session in run.opened:
        _check_inbox(run, session.era == "modern", session.inbox)
    if run.listeners:
        run.passed("not-requested")
    else:
        run.skip(["not-requested"], "the server has no stream of notifications")
    _check_buffering(run, streams)


def _check_subscription(run: Run, stream: Stream) -> None:
    acknowledgement = stream.acknowledgement
    first = next((frame for frame in stream.frames if frame.method), None)
    if acknowledgement is not None and first is not acknowledgement and first is not None:
        message = f"{first.method} came before the acknowledgement"
        run.report.add("ack-first", message, [stream.request, first, acknowledgement])
    for name, granted in stream.granted.items():
        requested = stream.requested.get(name)
        if isinstance(granted, list) and isinstance(requested, list):
            more = [uri for uri in granted if uri not in requested]
        else:
            more = [name] if granted and not requested else []
        if more:
            message = f"the acknowledgement grants {', '.join(map(str, more))}, which the client has not requested"
            run.report.add("ack-subset", message, [stream.request, acknowledgement])
    for frame in stream.frames:
        if frame.method and (frame.subscription != stream.request_id or isinstance(frame.subscription, bool)):
            tag = "no subscription id" if frame.subscription is None else f"the subscription id {frame.subscription!r}"
            message = f"{frame.method} has {tag}; the id of the request is {stream.request_id!r}"
            run.report.add("frame-tag", message, [stream.request, frame])
        if stream.cancelled is not None and frame.method and frame.time > stream.cancelled:
            message = f"{frame.method} came after the client had cancelled the listen request"
            run.report.add("unsubscribe", message, [stream.request, frame])
        is_early = acknowledgement is not None and frame.time < acknowledgement.time
        if frame.method not in ("", ACKNOWLEDGED_METHOD) and not is_early and not stream.expects(frame):
            message = f"{frame.method} came on a stream that has not requested it"
            run.report.add("not-requested", message, [stream.request, frame])


def _check_inbox(run: Run, is_modern: bool, inbox: Stream) -> None:
    for frame in inbox.notifications():
        if is_modern:
            # On stdio, a message without a subscription id belongs to no stream.
            message = f"{frame.method} came outside any subscription"
            run.report.add("not-requested" if not run.listeners else "frame-tag", message, [frame])
        elif not inbox.expects(frame) and frame.uri not in inbox.unsubscribed:
            message = f"{frame.method} came to a session that has not subscribed to {frame.params.get('uri')}"
            run.report.add("not-requested", message, [frame])


def _check_buffering(run: Run, streams: list[Stream]) -> None:
    if not run.is_http:
        run.skip(["buffering"], "the target is a stdio server")
        return
    opened = [stream for stream in (*streams, *(listener.stream for listener in run.listeners)) if stream.status == 200]
    if not opened:
        run.skip(["buffering"], "the server has no stream of notifications")
        return
    for stream in opened:
        encoding = stream.headers.get("content-encoding", "identity")
        if encoding != "identity":
            message = f"the stream is compressed ({encoding}), so events wait in the buffer of the encoder"
            run.report.add("buffering", message, [stream.request, stream.opened])
        # The specification asks for the header from 2026-07-28 on.
        elif stream.request_id is not None and stream.headers.get("x-accel-buffering", "").lower() != "no":
            message = "the response of subscriptions/listen lacks the header `X-Accel-Buffering: no`"
            run.report.add("buffering", message, [stream.request, stream.opened])
    run.passed("buffering")
