"""Tracing, as the core and the sources use it: the names of spans, and a tracer that does nothing.

`tidings.telemetry.tracing` has the tracer that creates spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tidings.core.model import Feature, Notification

__all__ = [
    "CLEANUP",
    "DELIVER_EVENT",
    "NOTIFY_CONTENT",
    "NOTIFY_LIST",
    "READ_LIST",
    "RUN_TOOL",
    "SCAN",
    "SEND",
    "SPANS",
    "SUBSCRIBE",
    "UNSUBSCRIBE",
    "WRITE",
    "SpanOutcome",
    "Tracer",
]

# Names of spans; docs/telemetry.md describes them.
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
DELIVER_EVENT = "events.deliver"
SPANS = frozenset(
    {SUBSCRIBE, UNSUBSCRIBE, CLEANUP, NOTIFY_LIST, NOTIFY_CONTENT, *SEND.values(), READ_LIST, SCAN, RUN_TOOL, WRITE}
    | {DELIVER_EVENT}
)


class SpanOutcome:
    """The result of a traced piece of work."""

    __slots__ = ("is_error", "text")

    def __init__(self) -> None:
        self.text = "ok"
        self.is_error = False

    def set(self, text: str, *, is_error: bool = True) -> None:
        self.text, self.is_error = text, is_error


class Tracer:
    """Creates spans and passes traces from requests to notifications. This base class does neither."""

    def span(
        self, name: str, *, cause: Mapping[str, str] | None = None, **attributes: Any
    ) -> AbstractContextManager[SpanOutcome]:
        """Trace the work of a `with` block. `cause` is the trace that led to it."""
        return nullcontext(SpanOutcome())

    def current_trace(self) -> Mapping[str, str] | None:
        return None

    def continue_trace(self, meta: object) -> None:
        """Continue the trace in the `_meta` of a request, for the rest of the present task."""

    def enter(self, notification: Notification) -> object:
        """Make the trace of a notification the current one. The result is passed to `leave`."""
        return None

    def leave(self, entered: object) -> None: ...
