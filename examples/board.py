"""A sprint board that notifies its clients: `python examples/board.py`, or `uvicorn examples.board:app`."""

import argparse

from mcp.server.mcpserver import MCPServer

from tidings import Live

mcp = MCPServer("board")
live = Live(mcp)
tasks = ["Write the docs"]


@mcp.resource("board://sprint")
def sprint() -> str:
    return "\n".join(tasks)


@mcp.tool()
def add_task(title: str) -> str:
    """Put a task on the board."""
    tasks.append(title)
    live.resources.updated("board://sprint", tasks=len(tasks))  # notifies every subscriber of this URI
    return f"{len(tasks)} tasks"


@mcp.tool()
def open_sprint() -> str:
    """Start a sprint. An open sprint can be closed."""
    live.tools.add(close_sprint, replace=True)  # notifies every client
    return "open"


def close_sprint() -> str:
    """Take all tasks off the board."""
    tasks.clear()
    live.resources.updated("board://sprint", tasks=0)
    live.tools.remove("close_sprint")
    return "closed"


app = live.http_app()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8765)
    port = parser.parse_args().port
    print(
        f"Serving the board on http://127.0.0.1:{port}/mcp; stop with Ctrl-C. Try, in another terminal:\n"
        f"  .venv/bin/tidings watch http://127.0.0.1:{port}/mcp --feature tools --uri board://sprint\n"
        "and in a third one, while it runs:\n"
        f"  .venv/bin/python examples/call.py http://127.0.0.1:{port}/mcp open_sprint\n"
        f"  .venv/bin/python examples/call.py http://127.0.0.1:{port}/mcp add_task title='Ship it'\n"
        f"  .venv/bin/python examples/call.py http://127.0.0.1:{port}/mcp close_sprint",
        flush=True,
    )
    live.run("http", port=port, log_level="warning")
