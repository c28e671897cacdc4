"""Send recorded lists from a bare ASGI app: the least that any ASGI app has to do.

    python -m bench.peers.servers.bare FOLDER [--starlette]

It runs under the same uvicorn as Tidings on plain ASGI. It reads the request id, and checks nothing. With
`--starlette`, it is a route of a Starlette app, as the endpoint of the SDK's app is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.routing import Route

from bench.peers.servers.scene import serve_plainly

RECORDED: Final = b"1000000"
"""The id of the recorded requests; all ids have this length."""

_ID = re.compile(rb'"id":\s*(\d+)')
_FROM_UVICORN = {b"date", b"server"}


class RecordedList:
    """An ASGI app that responds to every request with the recorded list."""

    def __init__(self, folder: Path) -> None:
        head, _, body = (folder / "list").read_bytes().partition(b"\r\n\r\n")
        named = [line.partition(b": ")[::2] for line in head.split(b"\r\n")[1:]]
        self._headers = [(name, value) for name, value in named if name.lower() not in _FROM_UVICORN]
        self._before, _, self._after = body.partition(RECORDED)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        found = _ID.search((await receive())["body"])
        if found is None:  # a start-up check of the load client
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
            await send({"type": "http.response.body", "body": b"0"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._before + found[1] + self._after})


if __name__ == "__main__":
    app: Any = RecordedList(Path(sys.argv[1]))
    if "--starlette" in sys.argv:
        app = Starlette(routes=[Route("/{path:path}", endpoint=app)])
    serve_plainly(app)
