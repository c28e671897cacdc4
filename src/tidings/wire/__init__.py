"""MCP as bytes: messages, methods, events, pages and addresses."""
