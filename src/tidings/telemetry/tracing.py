"""Traces and metrics for OpenTelemetry: the spans and the instruments.

Only OpenTelemetry's API is used here: without an SDK in the process all of it does next to nothing, and which exporter
there is is its owner's choice. A change has one trace, that of the call which caused it, and goes on into the
notification; a fan-out is an event, and never a span for each delivery. Whatever a tracer, a meter or an exporter
raises stays in here.
"""

from __future__ import annotations

import logging
import os
import threading
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

from tidings import seams
from tidings import spans as names
from tidings.counts import BOUNDS, Counts, Latency, kind_of
from tidings.logged import LONGEST, plain, shown
from tidings.model import Feature, Notification, Reason, Topic
from tidings.observer import CUT_OFF, Observer, Outcome, distinct
from tidings.telemetry.metrics import LATENCY, METRICS, Labels, Metric, Seen

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

    from tidings.live import Live
    from tidings.subscriber import Subscriber

__all__ = ["Telemetry", "context_of", "observe"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

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
        self._is_global = False
        """Whether the tracer is the process's own, which may come later or never."""
        self._untraced: Context | None = None
        """The last context without a span."""

    @_guarded
    def bind(self, live: Live, tracers: TracerProvider | None, meters: MeterProvider | None) -> None:
        # Without a provider yet, both stand for the one that the process sets later.
        self._tracer = trace.get_tracer("tidings", tracer_provider=tracers)
        self._is_global = tracers is None
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
                span.set_attribute(names.OUTCOME, outcome.text)
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
            return None if self._is_untraced() else _carried()
        except Exception as error:
            self.trouble(error)
            return None

    # What the hub tells

    def subscribed(self, subscriber: Subscriber, topics: list[Topic]) -> None:
        super().subscribed(subscriber, topics)
        self._mark(names.SUBSCRIBE, [subscriber], topics, {})

    def unsubscribed(
        self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None = None
    ) -> None:
        super().unsubscribed(ended, reason, cause)
        self._end(ended, reason, cause)

    @_guarded
    def _end(self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None) -> None:
        """One span for a resource that is gone, however many watched it. What nobody asked for is in nobody's trace."""
        who, topics = distinct(ended)
        said: dict[str, Any] = {names.CLEANED: len(ended)}
        context = None
        if reason is not Reason.UNSUBSCRIBED:
            said[names.OUTCOME] = reason.value
            context = (_extract(cause.trace) if cause is not None and cause.trace else None) or _ROOT
        self._mark(names.UNSUBSCRIBE, who, topics, said, context=context)

    def expired(self, name: str) -> None:
        super().expired(name)
        said = {names.OUTCOME: Reason.EXPIRED.value, names.CLIENT: plain(name, LONGEST)}
        self._mark(names.UNSUBSCRIBE, [], [], said, context=_ROOT)

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        watched = len(subscriber.features) + len(subscriber.uris or ())
        said = {names.OUTCOME: reason.value, names.CLEANED: watched, names.PENDING: subscriber.waiting}
        super().closed(subscriber, reason)
        self._mark(names.CLEANUP, [subscriber], [*subscriber.features], said, is_error=reason in CUT_OFF)

    @_guarded
    def _mark(
        self,
        name: str,
        who: list[Subscriber],
        topics: list[Topic],
        said: dict[str, Any],
        *,
        context: Context | None = None,
        is_error: bool = False,
    ) -> None:
        span = self._tracer.start_span(name, context, SpanKind.INTERNAL)
        try:
            if span.is_recording():
                own: dict[str, Any] = {names.SERVER: self._server, names.OUTCOME: "ok"}
                own[names.SUBSCRIBERS] = sum(self.counts.open.values())
                if len(who) == 1:
                    own |= {names.CLIENT: who[0].label, names.ERA: who[0].kind.era}
                    own[names.TRANSPORT] = who[0].kind.transport
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

    def _is_untraced(self) -> bool:
        """Whether nobody's span is current. A context never changes, so the same one need not be looked at twice."""
        context = contexts.get_current()
        if context is not self._untraced:
            if trace.get_current_span(context) is not INVALID_SPAN:
                return False
            self._untraced = context
        return True

    def _begin(self, notification: Notification, watching: int) -> object:
        try:
            if self._is_global and notification.trace is None and not seams.has_tracer() and self._is_untraced():
                return None  # nobody traces anything here
            # Never below the span that is current: a change may be told by somebody else than who made it.
            cause = (_extract(notification.trace) if notification.trace else None) or _ROOT
            is_list = isinstance(notification.topic, Feature)
            span = self._tracer.start_span(names.NOTIFY_LIST if is_list else names.NOTIFY_CONTENT, cause, _PRODUCER)
            if span is INVALID_SPAN and self._is_untraced():
                return None  # likewise
            return self._enter_fan_out(span, cause, notification, watching)
        except Exception as error:  # likewise
            self.trouble(error)
            return None

    def _enter_fan_out(self, span: Span, cause: Context, notification: Notification, watching: int) -> object:
        topic = notification.topic
        context = trace.set_span_in_context(span, cause)
        spans = [span]
        if isinstance(topic, Feature):
            spans.append(self._tracer.start_span(names.SEND[topic], context))
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
            spans[0].add_event(names.FAN_OUT, {names.SUBSCRIBERS: watching, names.SENT: sent})
            for span in spans:
                span.set_status(Status(StatusCode.OK))
        finally:
            for span in reversed(spans):
                span.end()

    def _described(self, notification: Notification, watching: int) -> dict[str, Any]:
        return {
            **_topics([notification.topic]),
            names.OPERATION: sorted({change.operation.value for change in notification.changes}),
            names.SUBSCRIBERS: watching,
            names.REVISION: notification.version.revision,
            names.DIGEST: notification.version.digest,
            names.OUTCOME: "ok",
            names.METHOD: notification.method,
            names.SERVER: self._server,
        }


def _topics(topics: Iterable[Topic]) -> dict[str, Any]:
    features = sorted(topic.value for topic in topics if isinstance(topic, Feature))
    uris = [shown(topic) for topic in topics if not isinstance(topic, Feature)][:16]
    return ({names.FEATURE: features} if features else {}) | ({names.URI: uris} if uris else {})


_NAMES = {
    "feature": names.FEATURE,
    "tool": names.TOOL,
    "units": names.UNITS,
    "changes": names.CHANGES,
    "server": names.SERVER,
}
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
    """One set for all servers that share a provider."""

    def __init__(self, meter: Meter) -> None:
        self._lock = threading.Lock()  # each reader of the provider collects on a thread of its own
        self._seen: dict[Seen, Latency] = {}
        """The servers, and what of their latencies was recorded."""
        self._gone: dict[str, dict[Labels, float]] = {}
        """What servers have counted that are gone: a counter never goes back."""
        self._has_complained = False
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
        with self._lock:
            self._bury()
            self._seen[Seen(live)] = Latency()

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            from opentelemetry.metrics import Observation

            with self._lock:
                self._bury()
                if metric is METRICS[0]:
                    for seen in self._seen:
                        self._record_latencies(seen)
                found = dict(self._gone.get(metric.name, {}))
                followed = list(self._seen)
            for seen in followed:
                try:
                    _combine(metric, found, seen)
                except Exception as error:
                    self._trouble(seen, error)
                    return []  # none this time, rather than a sum without it
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True))) for labels, value in found.items()
            ]

        return observe

    def _bury(self) -> None:
        """Keep what those have counted that are gone, and nothing else of them."""
        for seen in [each for each in self._seen if each.live is None]:
            self._record_latencies(seen)
            del self._seen[seen]
            for metric in METRICS:
                if metric.kind == "counter":
                    _combine(metric, self._gone.setdefault(metric.name, {}), seen)

    def _record_latencies(self, seen: Seen) -> None:
        """Hand over what came since the last collection, which is the one moment when somebody wants to know."""
        latency, recorded = seen.counts.latency, self._seen[seen]
        fresh = [now - before for now, before in zip(latency.counts, recorded.counts, strict=True)]
        total = sum(fresh)
        share = min(1.0, _MOST_RECORDED / total) if total else 0.0
        try:
            for bucket, number in enumerate(fresh):
                if number:
                    mean = (latency.sums[bucket] - recorded.sums[bucket]) / number
                    low = BOUNDS[bucket - 1] * 1.000001 if bucket else 0.0
                    value = min(max(mean, low), BOUNDS[bucket]) if bucket < len(BOUNDS) else max(mean, low)
                    for _ in range(max(1, round(number * share))):
                        self._latency.record(value)
                recorded.counts[bucket] += number
                recorded.sums[bucket] = latency.sums[bucket]
        except Exception as error:
            self._trouble(seen, error)

    def _trouble(self, seen: Seen, error: Exception) -> None:
        """Said once, as of tracing."""
        seen.counts.failures["telemetry"] += 1
        if not self._has_complained:
            self._has_complained = True
            logger.warning("a metric failed, and will not be mentioned again: %r", error, exc_info=error)


def _combine(metric: Metric, found: dict[Labels, float], seen: Seen) -> None:
    for labels, value in metric.read(seen).items():
        before = found.get(labels, 0)
        found[labels] = max(before, value) if metric.kind == "gauge" else before + value


def observe(live: Live, telemetry: bool | Telemetry) -> None:
    """Let a server be seen, unless that is switched off for it or, as OpenTelemetry has it, for the whole process."""
    if telemetry is False or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    (Telemetry() if telemetry is True else telemetry).attach(live)
