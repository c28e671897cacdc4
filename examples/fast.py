"""A FastMCP server: `python examples/fast.py` speaks stdio."""

from fastmcp import FastMCP

from tidings import Live

mcp = FastMCP("fast")
live = Live(mcp)


@mcp.tool
def learn(word: str) -> str:
    """Learn a word: from then on there is a tool of that name."""
    mcp.add_tool(live_tool(word))  # every client is told
    return f"I know {word}"


def live_tool(word: str):  # type: ignore[no-untyped-def]  # FastMCP's own Tool
    from fastmcp.tools import Tool

    return Tool.from_function(lambda: word, name=word)


if __name__ == "__main__":
    live.run("stdio")
