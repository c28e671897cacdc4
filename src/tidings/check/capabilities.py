"""Check that the server serves what it declares, and open the streams for the notifications that it promises."""

from __future__ import annotations

from typing import Any

from tidings.check.run import Listener, Run
from tidings.core.model import Feature, topics_json
from tidings.wire.http import HttpClientSession
from tidings.wire.methods import LIST_METHODS, SUBSCRIBE
from tidings.wire.session import Session, Stream

__all__ = ["check_served", "open_legacy_streams", "open_listen_streams"]

_LISTEN_RULES = ("ack-received", "ack-first", "ack-subset", "frame-tag", "capability-granted", "capability-advertised")
_LEGACY_RULES = ("get-stream", "subscribe-served")


async def check_served(run: Run) -> None:
    for session in run.sessions:
        for method, (feature, *_) in LIST_METHODS.items():
            if method == "resources/templates/list" or session.capability(feature) is None:
                continue
            frame = await session.request(method)
            if "error" in frame.message:
                run.report.add(
                    "capability-served",
                    f"the {session.era} server declares {feature.value}, and answers {method} with an error",
                    [session.discovery, frame],
                )
    run.passed("capability-served")


async def open_listen_streams(run: Run) -> None:
    """Open a listen stream for everything, and one for a single list, and compare the grants with the capabilities."""
    if run.modern is None:
        run.skip((*_LISTEN_RULES, "buffering"), run.missing["modern"])
        return
    features = [feature for feature in Feature if run.modern.capability(feature) is not None]
    everything: dict[str, Any] = topics_json(Feature, ())
    if run.uris:
        everything["resourceSubscriptions"] = run.uris
    stream = await run.modern.listen(everything)
    if stream.acknowledgement is None:
        _report_no_acknowledgement(run, run.modern, stream)
        return
    run.passed("ack-received")
    run.listeners.append(Listener(run.modern, stream))
    _compare(run, run.modern, stream)
    if features:
        # Another connection, which may lead to another replica. A string is as good an id as a number.
        other = await run.open("modern") if run.is_http else run.modern
        await run.lists(other)
        narrow = await other.listen(topics_json(features[:1], ()), "check-narrow")
        if narrow.acknowledgement is not None:
            run.listeners.append(Listener(other, narrow))
        else:
            _report_no_acknowledgement(run, other, narrow)


def _report_no_acknowledgement(run: Run, session: Session, stream: Stream) -> None:
    advertised = [feature.value for feature in Feature if session.advertises(feature)]
    if stream.answer is not None and "error" in stream.answer.message:
        reason = "the server refuses subscriptions/listen"
        if advertised:
            message = f"the server advertises listChanged for {', '.join(advertised)}, and refuses subscriptions/listen"
            run.report.add("capability-granted", message, [session.discovery, stream.request, stream.answer])
    else:
        reason = "there is no acknowledgement"
        waited = "the stream ended" if stream.is_ended else f"within {session.timeout:g} s"
        message = f"there is no acknowledgement on the response of subscriptions/listen ({waited})"
        run.report.add("ack-received", message, [stream.request, stream.opened, *stream.frames])
    run.skip((*_LISTEN_RULES, "buffering"), reason)


def _compare(run: Run, session: Session, stream: Stream) -> None:
    evidence = [session.discovery, stream.request, stream.acknowledgement]
    for feature in Feature:
        is_granted = stream.granted.get(f"{feature.value}ListChanged") is True
        if session.advertises(feature) and not is_granted:
            message = f"{feature.value}.listChanged is advertised, and the acknowledgement does not grant it"
            run.report.add("capability-granted", message, evidence)
        elif is_granted and not session.advertises(feature):
            message = f"the acknowledgement grants {feature.value}ListChanged, which is not advertised"
            run.report.add("capability-advertised", message, evidence)
    has_uris = bool(stream.granted.get("resourceSubscriptions"))
    if run.uris and session.advertises_subscribe and not has_uris:
        message = "resources.subscribe is advertised, and the acknowledgement grants none of the resources"
        run.report.add("capability-granted", message, evidence)
    elif has_uris and not session.advertises_subscribe:
        message = "the acknowledgement grants resourceSubscriptions, and resources.subscribe is not advertised"
        run.report.add("capability-advertised", message, evidence)
    run.passed("capability-granted", "capability-advertised")


async def open_legacy_streams(run: Run) -> None:
    """Open the streams of two legacy sessions, the first one with subscriptions."""
    if run.legacy is None:
        run.skip(_LEGACY_RULES, run.missing["legacy"])
        return
    sessions = [run.legacy] + ([await run.open("legacy")] if run.is_http else [])
    promised = [feature.value for feature in Feature if run.legacy.advertises(feature)]
    if run.legacy.advertises_subscribe:
        promised.append("subscriptions")
    if not run.is_http:
        run.skip(["get-stream"], "the target is a stdio server")
    elif not promised:
        run.skip(["get-stream"], "the server promises legacy sessions no notifications")
    for session in sessions:
        await run.lists(session)
        if isinstance(session, HttpClientSession):
            await session.open_stream()
            if not _is_open(session.inbox) and promised:
                answered = f"answered with {session.inbox.status}" if session.inbox.status else "not answered"
                run.report.add(
                    "get-stream",
                    f"legacy sessions are promised notifications ({', '.join(promised)}), and GET is {answered}",
                    [session.discovery, session.inbox.request, session.inbox.opened],
                )
        if not run.is_http or _is_open(session.inbox):
            run.listeners.append(Listener(session, session.inbox))
    if run.is_http and promised:
        run.passed("get-stream")
    await _subscribe(run, run.legacy)


def _is_open(stream: Stream) -> bool:
    return stream.status == 200 and stream.headers.get("content-type", "").startswith("text/event-stream")


async def _subscribe(run: Run, session: Session) -> None:
    if not session.advertises_subscribe:
        run.skip(["subscribe-served"], "the server does not advertise resources.subscribe to legacy sessions")
        return
    if not run.uris:
        run.skip(["subscribe-served"], "the server lists no resource; name one with --uri")
        return
    for uri in run.uris:
        frame = await session.request(SUBSCRIBE, uri=uri)
        if "error" in frame.message:
            message = "resources.subscribe is advertised, and resources/subscribe is answered with an error"
            run.report.add("subscribe-served", message, [session.discovery, frame])
        else:
            session.inbox.subscribed.add(uri)
    run.passed("subscribe-served")
