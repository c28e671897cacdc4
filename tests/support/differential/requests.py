"""Random HTTP requests to an MCP server: valid ones of both eras, and ones that are wrong in a few places.

The same number always gives the same request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.messages import META, MODERN, initialize

__all__ = ["HttpRequest", "random_request"]

LISTS = ["tools/list", "prompts/list", "resources/list", "resources/templates/list"]
LISTEN = "subscriptions/listen"
VERSIONS = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

MODERN_METHODS = [*LISTS * 3, *["server/discover", LISTEN] * 5, "tools/call", "prompts/get", "resources/read"]
LEGACY_METHODS = [*LISTS * 3, *["initialize", "ping"] * 3, "tools/call", "prompts/get", "resources/read"]
OTHER_METHODS = ["initialize", "ping", "notifications/initialized", "notifications/cancelled", "logging/setLevel"]
OTHER_METHODS += ["completion/complete", "nothing", "", "tools/List", "server/discover", LISTEN, "resources/subscribe"]
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "tools/call": [{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"city": "x"}}, {"name": "no"}],
    "prompts/get": [{"name": "greet", "arguments": {"city": "x"}}, {"name": "no"}],
    "resources/read": [{"uri": "local://r"}, {"uri": "local://t/x"}, {"uri": "local://no"}],
    LISTEN: [
        {"notifications": {"toolsListChanged": True}},
        {"notifications": {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}},
        {"notifications": {"resourceSubscriptions": ["local://r"]}},
        {"notifications": {}},
    ],
}

JSON_VALUES: list[Any] = [None, True, False, 0, 1, -1, 1.0, 1.5, 2**53, 2**70, 1e400, "", "a", "1", "ü", "\x00"]
JSON_VALUES += ["\ud800", [], {}, [1], {"a": 1}, ["a", None], {"": []}, "x" * 300, [[[[]]]]]
IDS: list[Any] = [0, 1, -7, 2**53, 2**63, 2**70, "", "a", "ü", "1", "\x7f", "\n", '"', "\\", "é\u2028", "\ud800"]
IDS += ["x" * 500, 1.0, 1.5, True, None, [], {}]
TOPIC_VALUES: list[Any] = [True, False, None, 1, 0, "true", [], {}]
URI_LISTS: list[Any] = [[], ["local://r"], ["local://r", "local://r"], ["nothing"], [""], ["ü://ü"], [1], [None]]
URI_LISTS += ["local://r", None]
CAPABILITIES: list[Any] = [
    {"extensions": {"a/b": {}}},
    {"roots": {}},
    {"roots": 1},
    {"extensions": []},
    {"sampling": {}},
]
METHOD_VALUES = [each.encode() for each in (*LISTS, LISTEN, "server/discover")]
VERSION_VALUES = [each.encode() for each in (*VERSIONS, MODERN)]
HEADER_VALUES: dict[bytes, list[bytes]] = {
    b"host": [b"127.0.0.1:80", b"localhost:1", b"evil.example", b""],
    b"origin": [b"http://localhost:5", b"http://evil.example", b"null", b""],
    b"accept": [b"*/*", b"application/*, text/*", b"text/event-stream", b"application/json", b"", b"a, */*;q=0"],
    b"content-type": [
        b"application/json; charset=utf-8",
        b"APPLICATION/JSON",
        b"application/jsonx",
        b"text/plain",
        b"",
    ],
    b"mcp-protocol-version": [*VERSION_VALUES, b"2031-01-01", b"", b"\xff", b"2026-07-28x"],
    b"mcp-method": [*METHOD_VALUES, b"", b"TOOLS/LIST", b"\xc3\xbc"],
    b"mcp-name": [b"weather", b"clock", b"local://r", b"", b"=?base64?Y2xvY2s=?=", b"=?base64?!?="],
    b"mcp-session-id": [b"nobody", b"", b"\xff", b"a b"],
    b"last-event-id": [b"1", b"x", b""],
    b"traceparent": [TRACEPARENT.encode(), b"x"],
    b"content-encoding": [b"gzip"],
    b"x-other": [b"1"],
}
"""Values of the headers that a server reads, and of some that it does not."""


@dataclass
class HttpRequest:
    method: str
    headers: list[tuple[bytes, bytes]]
    """Names in lower case. The value `session:2` stands for the id of the third session that was opened."""
    chunks: list[bytes] = field(default_factory=lambda: [b""])
    """The body, in parts."""
    path: str = "/mcp"

    def with_session(self, session_id: bytes | None) -> HttpRequest:
        """Return the request with the id of a session in place of its number, or without one."""
        headers = [(name, session_id if value.startswith(b"session:") else value) for name, value in self.headers]
        named = [(name, value) for name, value in headers if value is not None]
        return HttpRequest(self.method, named, self.chunks, self.path)

    @property
    def session_number(self) -> int | None:
        for name, value in self.headers:
            if name == b"mcp-session-id" and value.startswith(b"session:"):
                return int(value.removeprefix(b"session:"))
        return None


def random_request(seed: int, number: int, *, sessions: int) -> HttpRequest:
    """Return a request. `sessions` is how many legacy sessions there are."""
    rng = random.Random(f"{seed}-{number}")
    kind = rng.random()
    if kind < 0.08 and sessions:
        return _without_body(rng, sessions)
    is_modern = kind < 0.6
    message, headers = _modern(rng) if is_modern else _legacy(rng, sessions)
    mistakes = rng.choice([0, 0, 1, 1, 1, 2, 3])
    body: bytes | None = None
    for _ in range(mistakes):
        mistake = rng.choice(
            [_change_header, _change_header, _change_member, _change_member, _change_params, _change_params]
        )
        mistake(rng, message, headers)
    body = _encode(rng, message)
    if rng.random() < 0.08:
        body = _damage(rng, body)
    method = "POST" if rng.random() < 0.98 else rng.choice(["GET", "DELETE", "PUT", "OPTIONS", "HEAD", "PATCH"])
    path = "/mcp" if rng.random() < 0.99 else rng.choice(["/mcp/", "/", "/mcp?x=1"])
    return HttpRequest(method, headers, _split(rng, body), path)


def _without_body(rng: random.Random, sessions: int) -> HttpRequest:
    headers = [(b"host", b"127.0.0.1:80"), (b"accept", b"text/event-stream"), _session(rng, sessions)]
    if rng.random() < 0.7:
        headers.append((b"mcp-protocol-version", rng.choice([*VERSIONS, MODERN]).encode()))
    for _ in range(rng.choice([0, 0, 1, 2])):
        _change_header(rng, {}, headers)
    return HttpRequest(rng.choice(["GET", "GET", "DELETE"]), headers)


def _modern(rng: random.Random) -> tuple[dict[str, Any], list[tuple[bytes, bytes]]]:
    method = rng.choice(MODERN_METHODS if rng.random() < 0.9 else OTHER_METHODS)
    params = {"_meta": dict(META), **_arguments(rng, method)}
    message = {"jsonrpc": "2.0", "id": rng.choice(IDS[:2]), "method": method, "params": params}
    headers = _common_headers()
    headers += [(b"mcp-protocol-version", MODERN.encode()), (b"mcp-method", method.encode())]
    if method in ("tools/call", "prompts/get", "resources/read"):
        headers.append((b"mcp-name", str(params.get("name", params.get("uri"))).encode()))
    if rng.random() < 0.05:
        headers.append(_session(rng, 3))
    return message, headers


def _legacy(rng: random.Random, sessions: int) -> tuple[dict[str, Any], list[tuple[bytes, bytes]]]:
    method = rng.choice(LEGACY_METHODS if rng.random() < 0.85 else OTHER_METHODS)
    headers = _common_headers()
    if method == "initialize":
        message = initialize(rng.choice([*VERSIONS, "2031-01-01"]))
        if rng.random() < 0.9:
            return message, headers
    else:
        message = {"jsonrpc": "2.0", "id": rng.choice(IDS[:2]), "method": method}
        if (params := _arguments(rng, method)) or rng.random() < 0.5:
            message["params"] = params
        if method.startswith("notifications/"):
            message.pop("id")
    if sessions and rng.random() < 0.95:
        headers.append(_session(rng, sessions))
    if rng.random() < 0.7:
        headers.append((b"mcp-protocol-version", rng.choice(VERSIONS).encode()))
    return message, headers


def _arguments(rng: random.Random, method: str) -> dict[str, Any]:
    # Through JSON, to have a copy that may be changed.
    copied: dict[str, Any] = json.loads(json.dumps(rng.choice(ARGUMENTS.get(method, [{}]))))
    return copied


def _common_headers() -> list[tuple[bytes, bytes]]:
    return [
        (b"host", b"127.0.0.1:80"),
        (b"accept", b"application/json, text/event-stream"),
        (b"content-type", b"application/json"),
    ]


def _session(rng: random.Random, sessions: int) -> tuple[bytes, bytes]:
    return b"mcp-session-id", b"session:%d" % rng.randrange(max(sessions, 1))


# Mistakes


def _change_header(rng: random.Random, message: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    index = rng.randrange(len(headers))
    name, value = headers[index]
    match rng.randrange(6):
        case 0:
            del headers[index]
            if not headers:
                headers.append((b"x-other", b"1"))
        case 1:
            headers.append((name, value))
        case 2:
            headers.insert(rng.randrange(len(headers) + 1), (name, rng.choice(HEADER_VALUES[name])))
        case 3:
            headers[index] = name, value.upper() if not value.startswith(b"session:") else value
        case 4:
            headers[index] = name, rng.choice(HEADER_VALUES[name])
        case _:
            name = rng.choice(list(HEADER_VALUES))
            headers.append((name, rng.choice(HEADER_VALUES[name])))


def _change_member(rng: random.Random, message: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    match rng.randrange(6):
        case 0 | 1:
            message["id"] = rng.choice(IDS)
        case 2:
            message.pop(rng.choice(["jsonrpc", "id", "method", "params"]), None)
        case 3:
            message[rng.choice(["extra", "result", "error", "ID", ""])] = rng.choice(JSON_VALUES)
        case 4:
            message["method"] = rng.choice([*OTHER_METHODS, *LISTS])
        case _:
            message[rng.choice(["jsonrpc", "method", "params"])] = rng.choice(JSON_VALUES)


def _change_params(rng: random.Random, message: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    params = message.get("params")
    if not isinstance(params, dict):
        message["params"] = params = {}
    meta = params.get("_meta")
    match rng.randrange(9):
        case 0:
            params[rng.choice(["cursor", "x", "_meta", "name", "uri", "arguments", "notifications"])] = rng.choice(
                JSON_VALUES
            )
        case 1 if isinstance(meta, dict) and meta:
            del meta[rng.choice(list(meta))]
        case 2 if isinstance(meta, dict):
            meta[rng.choice([*META, "x", "progressToken", "traceparent", "tracestate", "baggage"])] = rng.choice(
                JSON_VALUES
            )
        case 3 if isinstance(meta, dict):
            meta["traceparent"] = TRACEPARENT
        case 4 if isinstance(meta, dict):
            meta["io.modelcontextprotocol/protocolVersion"] = rng.choice([*VERSIONS, MODERN, "2031-01-01", ""])
        case 5 if isinstance(meta, dict):
            meta["io.modelcontextprotocol/clientCapabilities"] = rng.choice(CAPABILITIES)
        case 6:
            params["_meta"] = {"progressToken": rng.choice(IDS)}
        case 7 | 8 if isinstance(topics := params.get("notifications"), dict):
            name = rng.choice(["toolsListChanged", "promptsListChanged", "resourcesListChanged", "x"])
            topics[name] = rng.choice(TOPIC_VALUES)
            if rng.random() < 0.5:
                topics["resourceSubscriptions"] = rng.choice(URI_LISTS)
        case _:
            params[rng.choice(["x", "cursor"])] = rng.choice(["", "a", "x" * 300])


def _encode(rng: random.Random, message: Any) -> bytes:
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
    text = json.dumps(message, ensure_ascii=rng.random() < 0.5, separators=separators)
    return text.encode("utf-8", "surrogatepass")


def _damage(rng: random.Random, body: bytes) -> bytes:
    damages: list[Callable[[], bytes]] = [
        lambda: body[: rng.randrange(len(body))],
        lambda: body + rng.choice([b"}", b" ", b"\n{}", b"\x00", b","]),
        lambda: rng.choice([b"\xef\xbb\xbf", b"  \n", b"\x00"]) + body,
        lambda: b"[%b]" % body,
        lambda: b"[%b,%b]" % (body, body),
        lambda: body.replace(b'"jsonrpc"', b'"jsonrpc":"2.0","jsonrpc"', 1),
        lambda: body.replace(b'"method"', b'"method":"ping","method"', 1),
        lambda: body.replace(b'"id"', b'"id":7,"id"', 1),
        lambda: body.replace(b"a", b"\xff", 1),
        lambda: body.decode("utf-8", "replace").encode("utf-16"),
        lambda: body.replace(b'"', b"'"),
        lambda: b"[" * 5000,
        lambda: rng.choice([b"", b"null", b"1", b'"x"', b"{}", b"[]", b"NaN", b'{"jsonrpc":"2.0"}', b"\xff"]),
        lambda: body[:-1] + b',"x":"' + b"x" * rng.choice([5000, 70_000]) + b'"}',
        lambda: rng.randbytes(rng.randrange(60)),
    ]
    return rng.choice(damages)()


def _split(rng: random.Random, body: bytes) -> list[bytes]:
    """Return the body in parts, some of them empty."""
    if rng.random() < 0.8:
        return [body]
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.choice([1, 2, 5])))
    return [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
