"""MCP Events: clients subscribe to changes and to events of the server, which are delivered to a URL."""

from tidings.events.types import EventTopic

__all__ = ["EventTopic"]
