"""Spans of OpenTelemetry, and the trace context in notifications.

A change belongs to the trace of the call that caused it, and its notification carries that trace. One change has one
span: the deliveries are an event on it, not spans. An exception in a tracer is logged once and counted; it never
reaches the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tidings.core import tracer as spans
from tidings.core.counts import Counts, topic_kind
from tidings.core.model import CUT_OFF, Change, Feature, Notification, Reason, Topic, Version
from tidings.core.observer import Observer, subscribers_and_topics
from tidings.core.redact import MAX_LABEL, one_line, redact_uri
from tidings.core.tracer import SpanOutcome, Tracer
from tidings.sdk import internals
from tidings.telemetry.instruments import instruments_of
from tidings.telemetry.metrics import MeasuredServer

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from tidings.core.subscriber import Subscriber

__all__ = ["ATTRIBUTES", "TracingObserver", "context_of"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Attributes of spans and events; docs/telemetry.md describes them.
FEATURE = "tidings.feature"
URI = "tidings.uri"
OPERATION = "tidings.operation"
CLIENT = "tidings.client"
ERA = "tidings.era"
TRANSPORT = "tidings.transport"
SUBSCRIBERS = "tidings.subscribers"
REVISION = "tidings.revision"
DIGEST = "tidings.digest"
OUTCOME = "tidings.outcome"
SERVER = "tidings.server"
CLEANED = "tidings.cleaned"
PENDING = "tidings.pending"
SENT = "tidings.sent"
METHOD = "mcp.method.name"
_SPAN_ARGUMENTS = {
    "feature": FEATURE,
    "tool": "gen_ai.tool.name",
    "event": "tidings.event",
    "units": "tidings.units",
    "changes": "tidings.changes",
    "server": SERVER,
}
"""The attributes that `span()` accepts, by keyword."""
ATTRIBUTES = frozenset(
    {FEATURE, URI, OPERATION, CLIENT, ERA, TRANSPORT, SUBSCRIBERS, REVISION, DIGEST, OUTCOME, SERVER, CLEANED, PENDING,
     SENT, METHOD, *_SPAN_ARGUMENTS.values()}
)  # fmt: skip

_FAN_OUT_EVENT = "fan-out"
_PROPAGATOR = TraceContextTextMapPropagator()
_ROOT = Context()
_PRODUCER = SpanKind.PRODUCER
_MAX_TRACESTATE = 512
"""Characters. Every notification carries the `tracestate`; W3C requires receivers to accept at least this length."""
_MAX_URIS = 16

_FanOut: TypeAlias = tuple[list[Span], Any, int]
"""The started spans, the context token, and the number of notifications sent before."""


def context_of(params: Any) -> Context | None:
    """Return the trace context that a notification carries, so that a client can continue the trace:

    `with tracer.start_as_current_span("refresh", context=context_of(message.params)): …`

    `params` are the params of a notification, as a dict or as a model of the SDK. Return None if they contain no trace;
    the new span then continues the current trace of the client.
    """
    meta = params.get("_meta") if isinstance(params, Mapping) else getattr(params, "meta", None)
    return _extract(meta) if isinstance(meta, Mapping) else None


def _extract(carrier: Mapping[str, Any]) -> Context | None:
    """Return the trace context in a carrier; None if it has none or an invalid one."""
    fields = {key: carrier[key] for key in ("traceparent", "tracestate") if isinstance(carrier.get(key), str)}
    if "traceparent" not in fields:
        return None
    if len(fields.get("tracestate", "")) > _MAX_TRACESTATE:
        del fields["tracestate"]
    context = _PROPAGATOR.extract(fields, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def _inject(context: Context | None = None) -> dict[str, str] | None:
    """Return the W3C fields of a context, or of the current one; None if it has no trace."""
    if not trace.get_current_span(context).get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier


def _has_current_span() -> bool:
    return trace.get_current_span() is not INVALID_SPAN


def _suppress_errors(method: Callable[P, R]) -> Callable[P, R | None]:
    """Make a method of `TracingObserver` return None instead of raising."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            observer = args[0]
            assert isinstance(observer, TracingObserver)
            observer.fail(error)
            return None

    return call


class TracingObserver(Observer, Tracer):
    """Creates the spans of one server."""

    def __init__(self, counts: Counts, server_name: str) -> None:
        self.counts = counts
        self._tracer: trace.Tracer = trace.NoOpTracer()
        self._server_name = server_name
        self._has_logged_failure = False
        self._uses_global_tracer = False
        self._fan_out: _FanOut | None = None
        """The spans of the change that is being delivered."""

    @_suppress_errors
    def set_providers(
        self, server: MeasuredServer, tracers: TracerProvider | None, meters: MeterProvider | None
    ) -> None:
        # None is the global provider, which the process can set later.
        self._tracer = trace.get_tracer("tidings", tracer_provider=tracers)
        self._uses_global_tracer = tracers is None
        instruments_of(meters).add(server)

    def fail(self, error: Exception) -> None:
        """Count a failure. Log the first one only, because a tracer that fails once fails often."""
        self.counts.failures["telemetry"] += 1
        if not self._has_logged_failure:
            self._has_logged_failure = True
            logger.warning("tracing failed; further failures are not logged: %r", error, exc_info=error)

    # Called by sources, stores and transports

    @contextmanager
    def span(self, name: str, *, cause: Mapping[str, str] | None = None, **attributes: Any) -> Iterator[SpanOutcome]:
        """Make a span current for the block. An exception in the block sets the outcome and is raised again."""
        outcome = SpanOutcome()
        started = self._start(name, cause, attributes)
        try:
            yield outcome
        except BaseException as error:
            outcome.set(type(error).__name__)
            raise
        finally:
            if started is not None:
                self._end(*started, outcome)

    @_suppress_errors
    def _start(self, name: str, cause: Mapping[str, str] | None, attributes: dict[str, Any]) -> tuple[Span, Any]:
        context = _extract(cause) if cause is not None else None
        span = self._tracer.start_span(name, context)
        try:
            if span.is_recording():
                span.set_attributes({_SPAN_ARGUMENTS[key]: value for key, value in attributes.items()})
        except Exception as error:
            self.fail(error)
        return span, contexts.attach(trace.set_span_in_context(span, context))

    @_suppress_errors
    def _end(self, span: Span, token: Any, outcome: SpanOutcome) -> None:
        contexts.detach(token)
        try:
            if span.is_recording():
                span.set_attribute(OUTCOME, outcome.text)
                span.set_status(Status(StatusCode.ERROR if outcome.is_error else StatusCode.OK))
        finally:
            span.end()

    @_suppress_errors
    def continue_trace(self, meta: Any) -> None:
        context = _extract(meta) if isinstance(meta, Mapping) else None
        if context is not None:
            contexts.attach(context)

    def current_trace(self) -> dict[str, str] | None:
        # Called for each change, so without the cost of `_suppress_errors`.
        try:
            return _inject() if _has_current_span() else None
        except Exception as error:
            self.fail(error)
            return None

    # Called by the hub

    def subscribed(self, subscriber: Subscriber, topics: list[Topic], told: Mapping[Topic, Version | None]) -> None:
        self._record(spans.SUBSCRIBE, [subscriber], topics, {})

    @_suppress_errors
    def unsubscribed(
        self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None = None
    ) -> None:
        """Record one span, even if a deleted resource ends many subscriptions.

        The span belongs to the current trace only if a client asked to unsubscribe.
        """
        subscribers, topics = subscribers_and_topics(ended)
        attributes: dict[str, Any] = {CLEANED: len(ended)}
        context = None
        if reason is not Reason.UNSUBSCRIBED:
            attributes[OUTCOME] = reason.value
            context = (_extract(cause.trace) if cause is not None and cause.trace else None) or _ROOT
        self._record(spans.UNSUBSCRIBE, subscribers, topics, attributes, context=context)

    def expired(self, name: str) -> None:
        attributes = {OUTCOME: Reason.EXPIRED.value, CLIENT: one_line(name, MAX_LABEL)}
        self._record(spans.UNSUBSCRIBE, [], [], attributes, context=_ROOT)

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        cleaned = len(subscriber.features) + len(subscriber.uris or ())
        attributes = {OUTCOME: reason.value, CLEANED: cleaned, PENDING: subscriber.pending}
        self._record(spans.CLEANUP, [subscriber], [*subscriber.features], attributes, is_error=reason in CUT_OFF)

    @_suppress_errors
    def _record(
        self,
        name: str,
        subscribers: list[Subscriber],
        topics: list[Topic],
        attributes: dict[str, Any],
        *,
        context: Context | None = None,
        is_error: bool = False,
    ) -> None:
        """Start and end a span."""
        span = self._tracer.start_span(name, context, SpanKind.INTERNAL)
        try:
            if span.is_recording():
                common: dict[str, Any] = {SERVER: self._server_name, OUTCOME: "ok"}
                common[SUBSCRIBERS] = sum(self.counts.open.values())
                if len(subscribers) == 1:
                    kind = subscribers[0].kind
                    common |= {CLIENT: subscribers[0].label, ERA: kind.era, TRANSPORT: kind.transport}
                span.set_attributes(common | _topic_attributes(topics) | attributes)
                span.set_status(Status(StatusCode.ERROR if is_error else StatusCode.OK))
        finally:
            span.end()

    def enter(self, notification: Notification) -> object:
        return self._continue_trace(notification) if notification.trace else None

    @_suppress_errors
    def _continue_trace(self, notification: Notification) -> object:
        context = _extract(notification.trace or {})
        return None if context is None else contexts.attach(context)

    def leave(self, entered: Any) -> None:
        if entered is not None:
            contexts.detach(entered)

    def publishing(
        self,
        notification: Notification,
        changes: tuple[Change, ...],
        subscribers: tuple[Subscriber, ...],
        keys: list[Topic],
    ) -> None:
        # Called for each change, so without the cost of `_suppress_errors`.
        try:
            if (
                self._uses_global_tracer
                and notification.trace is None
                and not internals.has_tracer()
                and not _has_current_span()
            ):
                return  # the process does no tracing
            # The current span is not used as the parent: another call than the one that made the change can publish it.
            parent = (_extract(notification.trace) if notification.trace else None) or _ROOT
            is_list = isinstance(notification.topic, Feature)
            span = self._tracer.start_span(spans.NOTIFY_LIST if is_list else spans.NOTIFY_CONTENT, parent, _PRODUCER)
            if span is INVALID_SPAN and not _has_current_span():
                return  # the process does no tracing
            self._fan_out = self._start_fan_out(span, parent, notification, len(subscribers))
        except Exception as error:
            self.fail(error)

    def _start_fan_out(self, span: Span, parent: Context, notification: Notification, subscribers: int) -> _FanOut:
        topic = notification.topic
        context = trace.set_span_in_context(span, parent)
        started = [span]
        if isinstance(topic, Feature):
            started.append(self._tracer.start_span(spans.SEND[topic], context))
        for each in started:
            try:
                if each.is_recording():
                    each.set_attributes(self._notification_attributes(notification, subscribers))
            except Exception as error:
                self.fail(error)
        notification.trace = _inject(context) or notification.trace
        return started, contexts.attach(context), self.counts.sent[topic_kind(topic)]

    def published(self, notification: Notification, subscribers: int) -> None:
        fan_out, self._fan_out = self._fan_out, None
        if fan_out is not None:
            self._end_fan_out(fan_out, notification, subscribers)

    @_suppress_errors
    def _end_fan_out(self, fan_out: _FanOut, notification: Notification, subscribers: int) -> None:
        started, token, sent_before = fan_out
        contexts.detach(token)
        sent = self.counts.sent[topic_kind(notification.topic)] - sent_before
        try:
            started[0].add_event(_FAN_OUT_EVENT, {SUBSCRIBERS: subscribers, SENT: sent})
            for span in started:
                span.set_status(Status(StatusCode.OK))
        finally:
            for span in reversed(started):
                span.end()

    def _notification_attributes(self, notification: Notification, subscribers: int) -> dict[str, Any]:
        return {
            **_topic_attributes([notification.topic]),
            OPERATION: sorted({change.operation.value for change in notification.changes}),
            SUBSCRIBERS: subscribers,
            REVISION: notification.version.revision,
            DIGEST: notification.version.digest,
            OUTCOME: "ok",
            METHOD: notification.method,
            SERVER: self._server_name,
        }


def _topic_attributes(topics: Iterable[Topic]) -> dict[str, Any]:
    features = sorted(topic.value for topic in topics if isinstance(topic, Feature))
    uris = [redact_uri(topic) for topic in topics if not isinstance(topic, Feature)][:_MAX_URIS]
    return ({FEATURE: features} if features else {}) | ({URI: uris} if uris else {})
