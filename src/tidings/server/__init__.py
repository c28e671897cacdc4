"""Everything that knows the SDK and FastMCP."""
