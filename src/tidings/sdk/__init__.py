"""Everything that knows the code of the SDK and FastMCP: how a server of each kind is read and changed."""
