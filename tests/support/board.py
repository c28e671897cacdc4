"""The server of the Live tests: one small board, as each kind of server, on either transport.

    python tests/support/board.py KIND TRANSPORT [OPTIONS]

Clients change it through its tool `change`: `what` names a method of the board (in `board_actions.py` for all kinds, in
`kinds.py` for one), `args` are its arguments, and `where` says where it runs: in the request, on a worker thread of the
request, later on the event loop, or on a thread outside any request. The result is JSON: the value that the method
returned, or the class and text of its error.

OPTIONS is a JSON object: `policy` (settings), `deny` (refused topics by principal, "*" for no authentication),
`asks` ("sync" or "async": how `authorize` is written), `auth` (tokens are needed, `tokens.py`), `shared_lists`,
`middleware` (the server has one of its own), `only` (the features of a low-level server), `late` (its tools are listed
as they were before the next refresh), `terms` (by principal, "*" for no authentication), `app` (options of the HTTP
app) and `telemetry` (a mode of `telemetry.py`, or false for none).
On HTTP the first line of standard output is the port.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from typing import Any

import uvicorn

from tests.support.kinds import BOARDS
from tests.support.tokens import authentication
from tidings.http.app import serve_app


def main() -> None:
    kind, transport, *rest = sys.argv[1:]
    options: dict[str, Any] = json.loads(rest[0]) if rest else {}
    logging.basicConfig(level="WARNING", format="%(name)s %(levelname)s %(message)s")
    board = BOARDS[kind](options)
    # No list handler hangs here. A busy machine may take long to read the lists for the first time.
    board.live.list_reader.request_timeout = 60.0
    if transport == "stdio":
        board.live.run("stdio")
        return
    listener = socket.create_server(("127.0.0.1", 0))
    # A low-level server gets its authentication with the app.
    needs = authentication() if options.get("auth") and kind == "lowlevel" else {}
    app = board.live.http_app(**options.get("app", {}), **needs)
    # Before anything is served: the backlog of the socket holds early connections.
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    if options.get("own"):
        serve_app(app, sockets=[listener], log_level="warning")
        return
    # With this parser no stream is parked, as with any other ASGI server.
    parser = options.get("parser", "h11")
    config = uvicorn.Config(app, http=parser, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
