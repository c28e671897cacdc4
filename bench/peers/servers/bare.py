"""Send recorded lists from a bare ASGI app: the least that any ASGI app has to do.

    python -m bench.peers.servers.bare FOLDER

It runs under the same uvicorn as Tidings on plain ASGI. It reads the request id, and checks nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

from bench.peers.servers.scene import serve_plainly

RECORDED: Final = b"1000000"
"""The id of the recorded requests; all ids have this length."""

_ID = re.compile(rb'"id":\s*(\d+)')
_FROM_UVICORN = {b"date", b"server"}


def build(folder: Path) -> Any:
    head, _, body = (folder / "list").read_bytes().partition(b"\r\n\r\n")
    named = [line.partition(b": ")[::2] for line in head.split(b"\r\n")[1:]]
    headers = [(name, value) for name, value in named if name.lower() not in _FROM_UVICORN]
    before, _, after = body.partition(RECORDED)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        found = _ID.search((await receive())["body"])
        if found is None:  # a start-up check of the load client
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
            await send({"type": "http.response.body", "body": b"0"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": before + found[1] + after})

    return app


if __name__ == "__main__":
    serve_plainly(build(Path(sys.argv[1])))
