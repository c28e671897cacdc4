"""What the server itself says of changes, as the SDK offers it, taken as wake-ups.

That are the events of a `SubscriptionBus`, to which `ctx.notify_*()` publishes, and the notifications that a handler
sends to its own client with `ctx.session.send_*()`. The list that the server returns decides whether anything changed.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

import mcp_types as types
from mcp.server.session import ServerSession
from mcp.server.subscriptions import PromptsListChanged, ResourcesListChanged, ResourceUpdated, ToolsListChanged

from tidings.core.hub import Hub
from tidings.core.model import Feature
from tidings.server import internals
from tidings.server.methods import LISTEN
from tidings.server.source import ItemChange, Source, Wake

__all__ = ["ChangeEvents"]

logger = logging.getLogger(__name__)

_FEATURES: Final[dict[type, Feature]] = {
    ToolsListChanged: Feature.TOOLS,
    types.ToolListChangedNotification: Feature.TOOLS,
    PromptsListChanged: Feature.PROMPTS,
    types.PromptListChangedNotification: Feature.PROMPTS,
    ResourcesListChanged: Feature.RESOURCES,
    types.ResourceListChangedNotification: Feature.RESOURCES,
}


class ChangeEvents:
    """Wakes Tidings up for the events and notifications of one server."""

    def __init__(self, source: Source, hub: Hub, wake: Wake) -> None:
        """Follow the buses of the server. Call it before the server's handler of listen requests is replaced."""
        self._source = source
        self._hub = hub
        self._wake = wake
        for bus in internals.buses_of(source.server, source.lowlevel):
            bus.subscribe(self._on_event)
        if internals.has_own_listen_handler(source.lowlevel):
            logger.warning(
                "%s: Live replaces the server's own handler of %s, and clients do not get what that would send; "
                "use live.tools, live.prompts and live.resources, or the SDK's ListenHandler(bus)",
                source.lowlevel.name,
                LISTEN,
            )

    def watch_session(self, session: ServerSession, *, is_notified: bool) -> ServerSession:
        """Return the same session, whose notifications of changes wake Tidings up.

        They are not sent if Tidings notifies the client, which would otherwise get each change twice."""
        return internals.WatchedSession(session, partial(self._replaces, is_notified))

    def _on_event(self, event: object) -> None:
        self._report(event)

    def _replaces(self, is_notified: bool, notification: object) -> bool:
        try:
            return self._report(notification) and is_notified
        except Exception:  # the user's call must not fail because of this
            self._hub.counts.failures["waking"] += 1
            logger.exception("a notification of the server could not be read; sending it to its client alone")
            return False

    def _report(self, event: object) -> bool:
        """Wake up. Return False if the event says nothing of a change."""
        if (feature := _FEATURES.get(type(event))) is not None:
            # An `MCPServer` whose list the user replaced shows each caller its own, and only the user knows that it has
            # changed. The others would be told twice of a change that was read before this event.
            self._wake(feature, changed=ItemChange() if self._source.has_shared_lists else None)
        elif isinstance(event, ResourceUpdated | types.ResourceUpdatedNotification):
            uri = event.uri if isinstance(event, ResourceUpdated) else str(event.params.uri)
            self._hub.catalog.resources.updated(self._source.normalize_uri(uri))
        else:
            return False
        return True
