"""RFC 6570 templates for the hub's patterns, read by the SDK."""

from __future__ import annotations

from mcp.shared.uri_template import UriTemplate

from tidings.core.patterns import Match

__all__ = ["read_template"]


def read_template(text: str) -> Match:
    """What tells whether a URI matches the template; ValueError if it is none."""
    template = UriTemplate.parse(text)
    return lambda uri: template.match(uri) is not None
