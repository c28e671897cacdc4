"""Random list requests get the same response as from the SDK."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.http_server import META, HttpResponse, LocalServer, RawClient, example_server, serving
from tests.support.lists import LISTED, fill_cache
from tests.support.sdk_clients import MODERN
from tests.support.stress import sized

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
VALUES = {
    "Host": ["127.0.0.1:80", "localhost:1", "evil.example", ""],
    "Origin": ["http://localhost:5", "http://evil.example", "null"],
    "Accept": ["*/*", "application/*, text/*", "text/event-stream", "application/json;q=1, text/event-stream;q=0.1"],
    "Content_Type": ["application/json; charset=utf-8", "APPLICATION/JSON", "application/jsonx", "text/plain"],
    "MCP_Protocol_Version": ["2025-06-18", "2026-07-28 ", "2031-01-01", ""],
    "Mcp_Method": ["tools/list", "prompts/list", "server/discover", "subscriptions/other", ""],
    "Mcp_Name": ["weather", ""],
    "Mcp_Session_Id": ["nobody", "own", "own"],
    "Traceparent": [TRACEPARENT],
    "X_Other": ["x"],
}
HEADERS = st.fixed_dictionaries(
    {}, optional={name: st.none() | st.sampled_from(values) for name, values in VALUES.items()}
)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
TRACES = st.sampled_from([TRACEPARENT, "vendor=1", "x"]) | JSON
METAS = st.just(META) | st.builds(
    lambda meta, traces: {**META, **meta, **traces},
    st.dictionaries(st.sampled_from([*META, "progressToken", "x"]), JSON, max_size=3),
    st.just({}) | st.dictionaries(st.sampled_from(["traceparent", "tracestate", "baggage"]), TRACES),
)
PARAMS = st.builds(
    lambda meta, more: {"_meta": meta, **more},
    METAS,
    st.just({}) | st.dictionaries(st.sampled_from(["cursor", "x"]), JSON, max_size=1),
)
BODIES = st.builds(
    lambda members, cut: json.dumps(members, ensure_ascii=cut % 2 == 0).encode()[: None if cut < 9 else -1],
    st.fixed_dictionaries(
        {
            "jsonrpc": st.just("2.0") | st.sampled_from(["1.0", 2]),
            "id": st.integers() | st.text(max_size=5) | JSON,
            "method": st.just("tools/list") | st.sampled_from(["prompts/list", "server/discover", "nothing"]),
            "params": PARAMS | JSON,
        },
        optional={"extra": JSON},
    ),
    st.integers(0, 9),
)


@pytest.mark.stress
def test_random_requests_get_the_sdk_response() -> None:
    with asyncio.Runner() as runner:
        context = serving(example_server())
        local = runner.run(context.__aenter__())
        runner.run(fill_cache(local))
        session = runner.run(session_of(local))

        @example(headers={}, body=LISTED)
        @example(headers={}, body=list_with_trace(tracestate=[[]]))
        @example(headers={}, body=list_with_trace(baggage=[1]))
        @settings(max_examples=sized(150, 1_500), deadline=None, suppress_health_check=list(HealthCheck))
        @given(headers=st.just({}) | HEADERS, body=st.just(LISTED) | BODIES)
        def check(headers: dict[str, str | None], body: bytes) -> None:
            def raw(client: RawClient) -> bytes:
                named = {"MCP_Protocol_Version": MODERN, "Mcp_Method": "tools/list", **headers}
                if named.get("Mcp_Session_Id") == "own":
                    named |= session
                return client.request(body, **named)

            async def ask() -> None:
                said = without_new_session(await local.sdk_response(raw))
                for _ in range(3):
                    assert without_new_session(await local.send(raw)) == said

            runner.run(ask())

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))


def list_with_trace(**fields: object) -> bytes:
    request = json.loads(LISTED)
    request["params"]["_meta"] |= {"traceparent": TRACEPARENT, **fields}
    return json.dumps(request).encode()


async def session_of(local: LocalServer) -> dict[str, str | None]:
    async with local.client() as client:
        return await client.initialize("2025-06-18")


def without_new_session(answer: HttpResponse) -> HttpResponse:
    """Remove the id that the SDK sends even for a session that it refuses to open."""
    is_refused = b"200" not in answer.status
    return answer._replace(headers=[each for each in answer.headers if not is_refused or each[0] != b"mcp-session-id"])
