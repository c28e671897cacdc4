"""The methods of MCP by name, and one table of those that list items."""

from __future__ import annotations

from typing import Final, NamedTuple

from tidings.core.model import Feature

__all__ = [
    "CACHEABLE_METHODS",
    "CALL_METHODS",
    "CALL_TOOL",
    "CANCELLED",
    "DISCOVER",
    "GET_PROMPT",
    "INITIALIZE",
    "INITIALIZED",
    "LISTEN",
    "LIST_CHANGED",
    "LIST_METHODS",
    "METHOD_NOT_FOUND",
    "READ_RESOURCE",
    "SUBSCRIBE",
    "UNSUBSCRIBE",
    "ListMethod",
    "list_methods",
]


class ListMethod(NamedTuple):
    feature: Feature
    member: str
    """The member of the result that holds the items."""
    key: str
    """The member that identifies an item."""
    function: str
    """The method of the SDK's `MCPServer` and `Client` that returns the items."""

    @property
    def attribute(self) -> str:
        """The attribute of the SDK's result that holds the items."""
        return self.function.removeprefix("list_")


LIST_METHODS: Final = {
    "tools/list": ListMethod(Feature.TOOLS, "tools", "name", "list_tools"),
    "prompts/list": ListMethod(Feature.PROMPTS, "prompts", "name", "list_prompts"),
    "resources/list": ListMethod(Feature.RESOURCES, "resources", "uri", "list_resources"),
    "resources/templates/list": ListMethod(
        Feature.RESOURCES, "resourceTemplates", "uriTemplate", "list_resource_templates"
    ),
}
LIST_CHANGED: Final = {feature.method: feature for feature in Feature}
"""The feature that each notification of a list names."""
DISCOVER: Final = "server/discover"
LISTEN: Final = "subscriptions/listen"
INITIALIZE: Final = "initialize"
INITIALIZED: Final = "notifications/initialized"
CANCELLED: Final = "notifications/cancelled"
CALL_TOOL: Final = "tools/call"
GET_PROMPT: Final = "prompts/get"
READ_RESOURCE: Final = "resources/read"
SUBSCRIBE: Final = "resources/subscribe"
UNSUBSCRIBE: Final = "resources/unsubscribe"

CALL_METHODS: Final = {CALL_TOOL: Feature.TOOLS, GET_PROMPT: Feature.PROMPTS, READ_RESOURCE: Feature.RESOURCES}
"""The methods that use one item. The `key_field` of the feature is the parameter that names it."""

METHOD_NOT_FOUND: Final = -32601
"""The code of the error for a method that the server does not have."""

CACHEABLE_METHODS: Final = frozenset({*LIST_METHODS, DISCOVER})
"""Methods whose response can be the same for every client."""


def list_methods(feature: Feature) -> dict[str, ListMethod]:
    """Return the methods that list the items of a feature."""
    return {name: method for name, method in LIST_METHODS.items() if method.feature is feature}
