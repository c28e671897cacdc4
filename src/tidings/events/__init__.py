"""MCP Events: the server delivers its changes and events to URLs that clients subscribe."""

from tidings.events.types import EventTopic

__all__ = ["EventTopic"]
