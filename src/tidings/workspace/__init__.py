"""A folder as an MCP server: its files become tools, prompts and resources."""

DEFAULT_POLL = 10.0
"""Seconds between two scans of all files. File events report most changes, and a scan finds the others. It costs
little, and a user does not wait long."""

TOP_LEVEL = frozenset({"events", "tools", "resources", "prompts", "server.d", "tidings.toml", "ui"})
"""The entries of the workspace folder that are read and watched."""
