"""The metrics of `tidings.telemetry.metrics` as OpenTelemetry instruments.

OpenTelemetry calls the instruments when it collects. An error in one instrument is logged once and counted, and does
not affect the other instruments.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tidings.core.counts import BOUNDS, Latency
from tidings.telemetry.metrics import LATENCY, METRICS, Counters, Labels, MeasuredServer, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

__all__ = ["Instruments", "instruments_of"]

logger = logging.getLogger(__name__)

_MAX_RECORDED = 2_000
"""Latencies recorded per collection. An OpenTelemetry histogram accepts them one by one, at some microseconds each.
Above this number, Tidings records a sample with the same proportions. `/metrics` contains all of them."""

_lock = threading.Lock()
_by_provider: WeakKeyDictionary[Any, Instruments] = WeakKeyDictionary()


def instruments_of(provider: MeterProvider | None) -> Instruments:
    """Return the instruments of a provider, or those of the global provider.

    All servers of a provider share one set, because an instrument can be created only once.
    """
    from opentelemetry import metrics

    key = metrics if provider is None else provider  # the module stands for the global provider
    with _lock:
        if key not in _by_provider:
            _by_provider[key] = Instruments(metrics.get_meter("tidings", meter_provider=provider))
        return _by_provider[key]


class _Measured:
    """One server, referenced weakly, with its counters and the latencies that were already recorded."""

    def __init__(self, server: MeasuredServer) -> None:
        self.server = weakref.ref(server)
        self.counters: Counters = server.counters
        self.recorded = Latency()


class Instruments:
    """The instruments of one provider, for all servers that use it."""

    def __init__(self, meter: Meter) -> None:
        self._lock = threading.Lock()  # each metric reader of the provider collects in its own thread
        self._servers: list[_Measured] = []
        self._collected: dict[str, dict[Labels, float]] = {}
        """The counters of servers that were garbage-collected. A counter must never decrease."""
        self._has_logged_failure = False
        self._latency = meter.create_histogram(
            LATENCY.name, LATENCY.unit, LATENCY.help, explicit_bucket_boundaries_advisory=BOUNDS
        )
        factories: dict[str, Callable[..., object]] = {
            "counter": meter.create_observable_counter,
            "level": meter.create_observable_up_down_counter,
            "gauge": meter.create_observable_gauge,
        }
        for metric in METRICS:
            if metric is not LATENCY:
                factories[metric.kind](metric.name, [self._callback(metric)], metric.unit, metric.help)

    def add(self, server: MeasuredServer) -> None:
        """Include a server in all instruments, until it is garbage-collected."""
        with self._lock:
            self._drop_collected()
            self._servers.append(_Measured(server))

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            from opentelemetry.metrics import Observation

            with self._lock:
                self._drop_collected()
                if metric is METRICS[0]:  # once per collection
                    for each in self._servers:
                        self._record_latencies(each)
                values = dict(self._collected.get(metric.name, {}))
                servers = list(self._servers)
            for each in servers:
                try:
                    _add(metric, values, each)
                except Exception as error:
                    self._fail(each, error)
                    return []  # a sum without this server would be wrong
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True))) for labels, value in values.items()
            ]

        return observe

    def _drop_collected(self) -> None:
        """Forget the servers that were garbage-collected, and keep their counters."""
        for each in [each for each in self._servers if each.server() is None]:
            self._record_latencies(each)
            self._servers.remove(each)
            for metric in METRICS:
                if metric.kind == "counter":
                    _add(metric, self._collected.setdefault(metric.name, {}), each)

    def _record_latencies(self, each: _Measured) -> None:
        """Record the latencies measured since the last collection, at the mean of each bucket."""
        latency, recorded = each.counters.counts.latency, each.recorded
        new = [now - before for now, before in zip(latency.counts, recorded.counts, strict=True)]
        total = sum(new)
        share = min(1.0, _MAX_RECORDED / total) if total else 0.0
        try:
            for bucket, number in enumerate(new):
                if number:
                    mean = (latency.sums[bucket] - recorded.sums[bucket]) / number
                    low = BOUNDS[bucket - 1] * 1.000001 if bucket else 0.0
                    value = min(max(mean, low), BOUNDS[bucket]) if bucket < len(BOUNDS) else max(mean, low)
                    for _ in range(max(1, round(number * share))):
                        self._latency.record(value)
                recorded.counts[bucket] += number
                recorded.sums[bucket] = latency.sums[bucket]
        except Exception as error:
            self._fail(each, error)

    def _fail(self, each: _Measured, error: Exception) -> None:
        """Count a failure. Log the first one only, because the same instrument fails at every collection."""
        each.counters.counts.failures["telemetry"] += 1
        if not self._has_logged_failure:
            self._has_logged_failure = True
            logger.warning("a metric failed; further failures are not logged: %r", error, exc_info=error)


def _add(metric: Metric, values: dict[Labels, float], each: _Measured) -> None:
    for labels, value in metric.read(each.counters, each.server()).items():
        before = values.get(labels, 0)
        values[labels] = max(before, value) if metric.kind == "gauge" else before + value
