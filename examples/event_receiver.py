"""Subscribe to an event of an MCP server, and print what it delivers until Ctrl-C.

    python examples/event_receiver.py [URL] [NAME] [ARGUMENTS]

By default it subscribes to `comment.created` of `examples/events.py`. It uses no package of Tidings: only HTTP, and the
signatures of https://www.standardwebhooks.com.
"""

import base64
import hashlib
import hmac
import json
import secrets
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = secrets.token_bytes(32)


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if not is_genuine(self.headers, body):
            self.send_error(401)
            return
        message = json.loads(body)
        if message.get("type") == "verification":
            answer = {"challenge": message["challenge"]}
        else:
            answer = {}
            print(json.dumps(message), flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: Any) -> None:
        """Print only events."""


def is_genuine(headers: Any, body: bytes) -> bool:
    """Return whether the server signed a request with the secret of this subscription, in the last five minutes."""
    sent_at = headers["webhook-timestamp"]
    signed = f"{headers['webhook-id']}.{sent_at}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
    signatures = headers["webhook-signature"].split(" ")
    is_recent = abs(time.time() - int(sent_at)) < 300
    return is_recent and any(hmac.compare_digest(each, expected) for each in signatures)


def request(url: str, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Send one request of MCP 2026-07-28."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "event-receiver", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": method,
        "Mcp-Name": params["name"],
    }
    posted = urllib.request.Request(url, json.dumps(message).encode(), headers)
    with urllib.request.urlopen(posted, timeout=60) as response:
        text = response.read().decode()
    lines = [line[5:] for line in text.splitlines() if line.startswith("data:")]
    answer: dict[str, Any] = json.loads(lines[0] if lines else text)
    if "error" in answer:
        sys.exit(f"{method}: {answer['error']['message']}")
    result: dict[str, Any] = answer["result"]
    return result


def main(
    url: str = "http://127.0.0.1:8765/mcp", name: str = "comment.created", arguments: str = "{}", *more: str
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    callback = f"http://127.0.0.1:{server.server_port}/events"
    secret = f"whsec_{base64.b64encode(KEY).decode()}"
    subscription = {"name": name, "arguments": json.loads(arguments), "delivery": {"mode": "webhook", "url": callback}}
    delivery = {**subscription["delivery"], "secret": secret}
    granted = request(url, "events/subscribe", {**subscription, "delivery": delivery})
    print(f"Subscribed to {name} until {granted['refreshBefore']}.", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        request(url, "events/unsubscribe", subscription)


if __name__ == "__main__":
    main(*sys.argv[1:])
