"""Takes the change notifications of the user's own code as wake-ups.

These are the events of a `SubscriptionBus`, to which `ctx.notify_*()` publishes, and the notifications that a handler
sends to its client with `ctx.session.send_*()`. The list that the server returns decides whether anything changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import mcp_types as types
from mcp.server.session import ServerSession
from mcp.server.subscriptions import (
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)

from tidings.core.catalog import Catalog
from tidings.core.hub import Hub
from tidings.core.model import Feature
from tidings.sdk import internals
from tidings.sdk.source import RegistryChange, Source, Wake
from tidings.wire.methods import LISTEN

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
    """Takes the events and notifications of one server as wake-ups."""

    def __init__(self, source: Source, hub: Hub, catalog: Catalog, wake: Wake) -> None:
        """Subscribe to the buses of the server. This needs the server's own handler of listen requests, so `Sessions`
        replaces that later."""
        self._source = source
        self._hub = hub
        self._catalog = catalog
        self._wake = wake
        for bus in internals.buses_of(source.server, source.lowlevel):
            bus.subscribe(self._on_event)
        entry = source.lowlevel.get_request_handler(LISTEN)
        if entry is not None and type(entry.handler) is not ListenHandler:
            logger.warning(
                "%s: Live replaces the server's own handler of %s, and clients do not get what that would send; "
                "use live.tools, live.prompts and live.resources, or the SDK's ListenHandler(bus)",
                source.lowlevel.name,
                LISTEN,
            )

    def watch_session(self, session: ServerSession, *, is_notified: bool) -> ServerSession:
        """Return the session of a request with its change notifications taken as wake-ups.

        If Tidings notifies the client, they are not sent: the client would get each change twice."""
        return _WatchedSession(session, partial(self._replaces, is_notified))

    def _on_event(self, event: object) -> None:
        self._report(event)

    def _replaces(self, is_notified: bool, notification: object) -> bool:
        """Take a notification as a wake-up. Return whether the one that Tidings sends replaces it."""
        try:
            return self._report(notification) and is_notified
        except Exception:  # the user's call must not fail because of this
            self._hub.counts.failures["waking"] += 1
            logger.exception("a notification of the server could not be read; sending it to its client alone")
            return False

    def _report(self, event: object) -> bool:
        """Take an event as a wake-up. Return False if it is not about a change."""
        if (feature := _FEATURES.get(type(event))) is not None:
            # If the user replaced the list method of an `MCPServer`, the list may have changed for some callers only,
            # and Tidings can't see that: it believes the event. For other kinds of servers it compares the lists.
            self._wake(feature, changed=RegistryChange() if self._source.has_shared_lists else None)
        elif isinstance(event, ResourceUpdated | types.ResourceUpdatedNotification):
            uri = event.uri if isinstance(event, ResourceUpdated) else str(event.params.uri)
            self._catalog.resources.updated(self._source.normalize_uri(uri))
        else:
            return False
        return True


class _WatchedSession(ServerSession):
    """The session of one request, which does not send the notifications that a function accepts.

    `send_tool_list_changed()` and the similar methods call `send_notification`. A notification that belongs to the
    request is always sent: FastMCP sends such ones when it changes what this client alone sees."""

    def __init__(self, session: ServerSession, replaces: Callable[[types.ServerNotification], bool]) -> None:
        self.__dict__ = session.__dict__  # FastMCP keeps state there
        self._tidings_replaces = replaces

    async def send_notification(
        self, notification: types.ServerNotification, related_request_id: types.RequestId | None = None
    ) -> None:
        if related_request_id is not None or not self._tidings_replaces(notification):
            await super().send_notification(notification, related_request_id)
