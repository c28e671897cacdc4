"""The names of all spans. docs/telemetry.md describes them."""

from __future__ import annotations

from tidings.core.model import Feature

__all__ = ["SPANS"]

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

SPANS = frozenset(
    {SUBSCRIBE, UNSUBSCRIBE, CLEANUP, NOTIFY_LIST, NOTIFY_CONTENT, *SEND.values(), READ_LIST, SCAN, RUN_TOOL, WRITE}
)
