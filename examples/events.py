"""A server with MCP Events, for a receiver on the same machine: `python examples/events.py [--port 8765]`.

Start `python examples/event_receiver.py` beside it. The tool `comment` then causes an event:
`python examples/call.py http://127.0.0.1:8765/mcp comment document_id=d1 text=Hello`.
"""

import argparse
from dataclasses import dataclass

from mcp.server.mcpserver import MCPServer

from tidings import Live, Policy

mcp = MCPServer("comments")
# Only to try it: everybody may subscribe, and events may go to this machine. The defaults are safe.
policy = Policy(webhooks="anyone", webhook_private=True)
live = Live(mcp, events=True, policy=policy)

DOCUMENT = {
    "type": "object",
    "properties": {"document_id": {"type": "string", "description": "Only comments of this document."}},
    "additionalProperties": False,
}


@live.event("comment.created", arguments=DOCUMENT)
@dataclass
class CommentCreated:
    """Somebody has commented on a document."""

    document_id: str
    text: str


@mcp.tool()
def comment(document_id: str, text: str) -> str:
    """Comment on a document."""
    return live.emit("comment.created", CommentCreated(document_id, text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8765)
    live.run("http", port=parser.parse_args().port)
