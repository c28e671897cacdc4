"""JSON-RPC requests of both eras, and the HTTP headers that belong to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ACCEPT_BOTH",
    "INITIALIZED",
    "LATEST_LEGACY",
    "LISTS",
    "META",
    "MODERN",
    "initialize",
    "modern_headers",
    "modern_message",
]

MODERN = "2026-07-28"
LATEST_LEGACY = "2025-11-25"
CLIENT_INFO = {"name": "dör", "version": "1"}
"""A name that is not ASCII."""
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": CLIENT_INFO,
    "io.modelcontextprotocol/clientCapabilities": {},
}
"""The `_meta` of every modern request."""
ACCEPT_BOTH = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
LISTS = {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}
"""The `notifications` of a listen request for all lists."""
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}


def modern_message(
    method: str, request_id: Any = 1, params: Mapping[str, Any] | None = None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    params = {"_meta": {**META, **(meta or {})}, **(params or {})}
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def modern_headers(method: str, params: Mapping[str, Any] | None = None) -> dict[str, str]:
    named = {"Mcp-Name": params["name"]} if params and "name" in params else {}
    return {**ACCEPT_BOTH, "MCP-Protocol-Version": MODERN, "Mcp-Method": method, **named}


def initialize(version: str = LATEST_LEGACY, **params: Any) -> dict[str, Any]:
    """Return the first request of a legacy client."""
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": CLIENT_INFO, **params}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
