"""A folder as an MCP server: its files become tools, prompts and resources."""
