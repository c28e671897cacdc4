"""A live FastMCP server on stdio: `python examples/fast.py`."""

from fastmcp import FastMCP

from tidings import Live

mcp = FastMCP("fast")
live = Live(mcp)


@mcp.tool
def learn(word: str) -> str:
    """Learn a word: add a tool of that name."""
    mcp.add_tool(live_tool(word))  # notifies every client
    return f"I know {word}"


def live_tool(word: str):  # type: ignore[no-untyped-def]  # returns a Tool of FastMCP
    from fastmcp.tools import Tool

    return Tool.from_function(lambda: word, name=word)


if __name__ == "__main__":
    live.run("stdio")
