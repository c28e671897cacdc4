"""An OTLP collector that keeps each request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

__all__ = ["SECRET", "Collector", "collecting"]

SECRET = "hunter2"


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        self.received: Queue[tuple[str, bytes]] = Queue()
        self.answers = threading.Event()
        """If cleared, the collector reads requests and does not answer."""
        self.answers.set()
        super().__init__(("127.0.0.1", 0), _Receiver)

    @property
    def endpoint(self) -> str:
        return f"http://user:{SECRET}@127.0.0.1:{self.server_address[1]}"


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:  # a name of http.server
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Collector)
        self.server.received.put((self.path, body))
        self.server.answers.wait()
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.answers.set()
            collector.shutdown()
            thread.join()
