"""RFC 6570 templates as patterns of the hub, parsed by the SDK."""

from __future__ import annotations

from mcp.shared.uri_template import UriTemplate

from tidings.core.patterns import Match

__all__ = ["read_template"]


def read_template(text: str) -> Match:
    """Return a function that says whether a URI matches the template. Raise `ValueError` if it is invalid."""
    template = UriTemplate.parse(text)
    return lambda uri: template.match(uri) is not None
