"""Traces and metrics for OpenTelemetry: every name, the spans, and the instruments.

Only OpenTelemetry's API is used here: without an SDK in the process all of it does next to nothing, and which exporter
there is is its owner's choice. A change has one trace, that of the call which caused it, and goes on into the
notification; a fan-out is an event, and never a span for each delivery. Whatever a tracer, a meter or an exporter
raises stays in here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tidings.counts import BOUNDS, Counts, kind_of
from tidings.logged import shown
from tidings.metrics import LATENCY, METRICS, Labels, Metric
from tidings.model import Feature, Notification, Reason, Topic
from tidings.observer import CUT_OFF, Observer, Outcome

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

    from tidings.live import Live
    from tidings.subscriber import Subscriber

__all__ = ["ATTRIBUTES", "SPANS", "Telemetry", "context_of", "observe"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

SUBSCRIBE = "change_notifier.subscribe"
UNSUBSCRIBE = "change_notifier.unsubscribe"
CLEANUP = "change_notifier.cleanup_client"
NOTIFY_LIST = "change_notifier.notify_list_changed"
NOTIFY_CONTENT = "change_notifier.notify_resource_updated"
SEND = {feature: f"{feature.singular}_list_changed.send" for feature in Feature}
READ_LIST = "source.read_list"
SCAN = "workspace.scan"
RUN_TOOL = "source.run_tool"
WRITE = "store.write"

SPANS = {
    SUBSCRIBE: "A client, or an in-process subscriber, watches something.",
    UNSUBSCRIBE: "It has ended subscriptions by itself.",
    CLEANUP: "It is gone, and nothing is left of it.",
    NOTIFY_LIST: "A list changed: from the change until everybody was told who could be.",
    NOTIFY_CONTENT: "The same for the content of a resource.",
    SEND[Feature.TOOLS]: "The fan-out of a change of the tools.",
    SEND[Feature.PROMPTS]: "The fan-out of a change of the prompts.",
    SEND[Feature.RESOURCES]: "The fan-out of a change of the resources.",
    READ_LIST: "A server that only answers as it answers a client was asked what it lists.",
    SCAN: "Files of a workspace that may have changed were read.",
    RUN_TOOL: "A tool ran.",
    WRITE: "A batch of changes and durable subscriptions was written to the store.",
}

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
TOOL = "gen_ai.tool.name"
METHOD = "mcp.method.name"
UNITS = "tidings.units"
CHANGES = "tidings.changes"

ATTRIBUTES = {
    FEATURE: "The lists it is about: `tools`, `prompts`, `resources`.",
    URI: "The resource, without user, query and fragment.",
    OPERATION: "`added`, `removed`, `updated`, `deleted`: each that occurs.",
    CLIENT: "The subscriber's label, which is never a secret.",
    ERA: "`modern`, `legacy` or `none`.",
    TRANSPORT: "`http`, `stdio`, `webhook` or `process`.",
    SUBSCRIBERS: "How many there are; of a change, how many watch its topic.",
    REVISION: "The topic's, after the change.",
    DIGEST: "The topic's, after the change.",
    OUTCOME: "How it ended: `ok`, why a client was closed, or how a tool or a reading failed.",
    SERVER: "The server's name.",
    CLEANED: "Subscriptions that went with a client.",
    PENDING: "Topics that still waited for it.",
    SENT: "Notifications handed over, on the event `fan-out`.",
    TOOL: "The tool's name.",
    METHOD: "The notification's method.",
    UNITS: "How many units of a workspace were read.",
    CHANGES: "How many changes were written.",
}

FAN_OUT = "fan-out"

_W3C = TraceContextTextMapPropagator()
_ROOT = Context()
_PRODUCER = SpanKind.PRODUCER
_LONGEST_STATE = 512
"""Characters of a `tracestate`, which goes out again with every notification: what W3C has everybody take at least."""


def context_of(params: Any) -> Context | None:
    """The trace that a notification carries, for a client that wants to go on with it:

    `with tracer.start_as_current_span("refresh", context=context_of(message.params)): …`

    `params` are a notification's, as a dict or as a model of the SDK. None if there is no trace in it, which makes a
    span of the one that is current.
    """
    meta = params.get("_meta") if isinstance(params, Mapping) else getattr(params, "meta", None)
    return _extract(meta) if isinstance(meta, Mapping) else None


def _extract(carrier: Mapping[str, Any]) -> Context | None:
    """Garbage in a client's `_meta` is no trace, and no error."""
    known = {key: carrier[key] for key in ("traceparent", "tracestate") if isinstance(carrier.get(key), str)}
    if "traceparent" not in known:
        return None
    if len(known.get("tracestate", "")) > _LONGEST_STATE:
        del known["tracestate"]
    found = _W3C.extract(known, Context())
    return found if trace.get_current_span(found).get_span_context().is_valid else None


def _carried(context: Context | None = None) -> dict[str, str] | None:
    """The trace of a context in W3C's words."""
    if not trace.get_current_span(context).get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return carrier


def _guarded(method: Callable[P, R]) -> Callable[P, R | None]:
    """Whatever goes wrong in there is nobody else's trouble."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            owner = args[0]
            assert isinstance(owner, Tracing)
            owner.trouble(error)
            return None

    return call


class Telemetry:
    """Where spans and metrics go. `Live(server)` takes the process's global providers, and
    `Live(server, telemetry=Telemetry(tracer_provider=…, meter_provider=…))` others. May be shared by servers."""

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider

    def attach(self, live: Live) -> None:
        """Observe a server from now on."""
        observer = Tracing(live.hub.counts, live.lowlevel.name)
        live.hub.observer = observer
        live.catalog.trace = observer.cause
        if hasattr(live.source, "observer"):
            live.source.observer = observer
        observer.bind(live, self._tracer_provider, self._meter_provider)


class Tracing(Observer):
    """The observer of one hub that makes spans."""

    def __init__(self, counts: Counts, server: str) -> None:
        super().__init__(counts)
        self._tracer: trace.Tracer = trace.NoOpTracer()
        self._server = server
        self._has_complained = False

    @_guarded
    def bind(self, live: Live, tracers: TracerProvider | None, meters: MeterProvider | None) -> None:
        # Without a provider yet, both stand for the one that the process sets later.
        self._tracer = trace.get_tracer("tidings", tracer_provider=tracers)
        _instruments(meters).follow(live)

    def trouble(self, error: Exception) -> None:
        """Said once: a tracer that fails, fails often."""
        self.counts.failures["telemetry"] += 1
        if not self._has_complained:
            self._has_complained = True
            logger.warning("tracing failed, and will not be mentioned again: %r", error, exc_info=error)

    # For sources, stores and lanes

    @contextmanager
    def span(self, name: str, *, cause: Mapping[str, str] | None = None, **attributes: Any) -> Iterator[Outcome]:
        """A span around a piece of work, current meanwhile. An exception of the work's own goes through it."""
        outcome = Outcome()
        opened = self._enter(name, cause, attributes)
        try:
            yield outcome
        except BaseException as error:
            outcome.set(type(error).__name__)
            raise
        finally:
            if opened is not None:
                self._leave(*opened, outcome)

    @_guarded
    def _enter(self, name: str, cause: Mapping[str, str] | None, attributes: dict[str, Any]) -> tuple[Span, Any]:
        context = _extract(cause) if cause is not None else None
        span = self._tracer.start_span(name, context)
        try:
            if span.is_recording():
                span.set_attributes({_NAMES[key]: value for key, value in attributes.items()})
        except Exception as error:
            self.trouble(error)
        return span, contexts.attach(trace.set_span_in_context(span, context))

    @_guarded
    def _leave(self, span: Span, token: Any, outcome: Outcome) -> None:
        contexts.detach(token)
        try:
            if span.is_recording():
                span.set_attribute(OUTCOME, outcome.text)
                span.set_status(Status(StatusCode.ERROR if outcome.is_error else StatusCode.OK))
        finally:
            span.end()

    @_guarded
    def take_up(self, meta: Any) -> None:
        context = _extract(meta) if isinstance(meta, Mapping) else None
        if context is not None:
            contexts.attach(context)

    def cause(self) -> dict[str, str] | None:
        # As `_guarded`, but without its price: here it is paid for each change.
        try:
            return None if trace.get_current_span() is INVALID_SPAN else _carried()
        except Exception as error:
            self.trouble(error)
            return None

    # What the hub tells

    def subscribed(self, subscriber: Subscriber, topics: list[Topic]) -> None:
        super().subscribed(subscriber, topics)
        self._mark(SUBSCRIBE, subscriber, topics, {})

    def unsubscribed(self, subscriber: Subscriber, topics: list[Topic]) -> None:
        super().unsubscribed(subscriber, topics)
        self._mark(UNSUBSCRIBE, subscriber, topics, {})

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        watched = len(subscriber.features) + len(subscriber.uris or ())
        said = {OUTCOME: reason.value, CLEANED: watched, PENDING: subscriber.waiting}
        super().closed(subscriber, reason)
        self._mark(CLEANUP, subscriber, [*subscriber.features], said, is_error=reason in CUT_OFF)

    @_guarded
    def _mark(
        self, name: str, subscriber: Subscriber, topics: list[Topic], said: dict[str, Any], is_error: bool = False
    ) -> None:
        span = self._tracer.start_span(name, kind=SpanKind.INTERNAL)
        try:
            if span.is_recording():
                era, transport = subscriber.kind
                own: dict[str, Any] = {CLIENT: subscriber.label, ERA: era, TRANSPORT: transport, SERVER: self._server}
                own |= {SUBSCRIBERS: sum(self.counts.open.values()), OUTCOME: "ok"}
                span.set_attributes(own | _topics(topics) | said)
                span.set_status(Status(StatusCode.ERROR if is_error else StatusCode.OK))
        finally:
            span.end()

    def enter(self, notification: Notification) -> object:
        return self._go_on(notification) if notification.trace else None

    @_guarded
    def _go_on(self, notification: Notification) -> object:
        context = _extract(notification.trace or {})
        return None if context is None else contexts.attach(context)

    def leave(self, entered: Any) -> None:
        if entered is not None:
            contexts.detach(entered)

    def _begin(self, notification: Notification, watching: int) -> object:
        try:
            # Never below the span that is current: a change may be told by somebody else than who made it.
            cause = (_extract(notification.trace) if notification.trace else None) or _ROOT
            name = NOTIFY_LIST if isinstance(notification.topic, Feature) else NOTIFY_CONTENT
            span = self._tracer.start_span(name, cause, _PRODUCER)
            if span is INVALID_SPAN and trace.get_current_span() is INVALID_SPAN:
                return None  # nobody traces anything here
            return self._enter_fan_out(span, cause, notification, watching)
        except Exception as error:  # likewise
            self.trouble(error)
            return None

    def _enter_fan_out(self, span: Span, cause: Context, notification: Notification, watching: int) -> object:
        topic = notification.topic
        context = trace.set_span_in_context(span, cause)
        spans = [span]
        if isinstance(topic, Feature):
            spans.append(self._tracer.start_span(SEND[topic], context))
        for each in spans:
            try:
                if each.is_recording():
                    each.set_attributes(self._described(notification, watching))
            except Exception as error:
                self.trouble(error)
        notification.trace = _carried(context) or notification.trace
        return spans, contexts.attach(context), self.counts.sent[kind_of(topic)]

    @_guarded
    def _finish(self, telling: Any, notification: Notification, watching: int) -> None:
        spans, token, before = telling
        contexts.detach(token)
        sent = self.counts.sent[kind_of(notification.topic)] - before
        try:
            spans[0].add_event(FAN_OUT, {SUBSCRIBERS: watching, SENT: sent})
            for span in spans:
                span.set_status(Status(StatusCode.OK))
        finally:
            for span in reversed(spans):
                span.end()

    def _described(self, notification: Notification, watching: int) -> dict[str, Any]:
        return {
            **_topics([notification.topic]),
            OPERATION: sorted({change.operation.value for change in notification.changes}),
            SUBSCRIBERS: watching,
            REVISION: notification.version.revision,
            DIGEST: notification.version.digest,
            OUTCOME: "ok",
            METHOD: notification.method,
            SERVER: self._server,
        }


def _topics(topics: Iterable[Topic]) -> dict[str, Any]:
    features = sorted(topic.value for topic in topics if isinstance(topic, Feature))
    uris = [shown(topic) for topic in topics if not isinstance(topic, Feature)][:16]
    return ({FEATURE: features} if features else {}) | ({URI: uris} if uris else {})


_NAMES = {"feature": FEATURE, "tool": TOOL, "units": UNITS, "changes": CHANGES, "server": SERVER}
"""What `span()` takes."""


# Instruments

_MOST_RECORDED = 2_000
"""Latencies that are handed to OpenTelemetry at one collection. Its histogram takes them one by one, at some
microseconds each, so past this many they are a sample in the right proportions. `/metrics` has them all."""

_lock = threading.Lock()
_by_provider: WeakKeyDictionary[Any, _Instruments] = WeakKeyDictionary()
_global: list[_Instruments] = []


def _instruments(provider: MeterProvider | None) -> _Instruments:
    """One set for each provider, whatever the number of servers: an instrument may be made once."""
    from opentelemetry import metrics

    with _lock:
        if provider is None:
            if not _global:
                _global.append(_Instruments(metrics.get_meter("tidings")))
            return _global[0]
        found = _by_provider.get(provider)
        if found is None:
            found = _by_provider[provider] = _Instruments(provider.get_meter("tidings"))
        return found


class _Instruments:
    def __init__(self, meter: Meter) -> None:
        self._seen: WeakKeyDictionary[Live, tuple[list[int], list[float]]] = WeakKeyDictionary()
        """What of each server's latencies was recorded."""
        self._latency = meter.create_histogram(
            LATENCY.name, LATENCY.unit, LATENCY.help, explicit_bucket_boundaries_advisory=BOUNDS
        )
        makers: dict[str, Callable[..., object]] = {
            "counter": meter.create_observable_counter,
            "level": meter.create_observable_up_down_counter,
            "gauge": meter.create_observable_gauge,
        }
        for metric in METRICS:
            if metric is not LATENCY:
                makers[metric.kind](metric.name, [self._callback(metric)], metric.unit, metric.help)

    def follow(self, live: Live) -> None:
        self._seen[live] = ([0] * (len(BOUNDS) + 1), [0.0] * (len(BOUNDS) + 1))

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            from opentelemetry.metrics import Observation

            if metric is METRICS[0]:
                self._record_latencies()
            found: Counter[Labels] = Counter()
            for live in list(self._seen):
                for labels, value in metric.read(live).items():
                    found[labels] += value  # type: ignore[assignment]  # a Counter adds any numbers up
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True))) for labels, value in found.items()
            ]

        return observe

    def _record_latencies(self) -> None:
        """Hand over what came since the last collection, which is the one moment when somebody wants to know."""
        for live, (counts, sums) in list(self._seen.items()):
            latency = live.hub.counts.latency
            fresh = [now - before for now, before in zip(latency.counts, counts, strict=True)]
            total = sum(fresh)
            share = min(1.0, _MOST_RECORDED / total) if total else 0.0
            for bucket, number in enumerate(fresh):
                if number:
                    mean = (latency.sums[bucket] - sums[bucket]) / number
                    low = BOUNDS[bucket - 1] * 1.000001 if bucket else 0.0
                    value = min(max(mean, low), BOUNDS[bucket]) if bucket < len(BOUNDS) else max(mean, low)
                    for _ in range(max(1, round(number * share))):
                        self._latency.record(value)
                counts[bucket] += number
                sums[bucket] = latency.sums[bucket]


def observe(live: Live, telemetry: bool | Telemetry) -> None:
    """Let a server be seen, unless that is switched off for it or, as OpenTelemetry has it, for the whole process."""
    if telemetry is False or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    (Telemetry() if telemetry is True else telemetry).attach(live)
