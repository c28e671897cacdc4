"""Each rule of `tidings check` finds the server that breaks it, and no other rule does.

Covers `capabilities.py`, `lifecycle.py`, `notifications.py` and `trigger.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.defective_server import DefectiveServer
from tests.support.forking import forked_command
from tests.support.uvicorn_server import address_of, run_uvicorn
from tidings.check.checks import check_target
from tidings.check.report import Report
from tidings.check.rules import RULES
from tidings.check.run import CheckOptions

pytestmark = pytest.mark.anyio

OPTIONS = CheckOptions(
    target="", name="defective", token="alice", second_token="bob", trigger="change", timeout=5, quiet_time=0.3
)
TOKENS = {"alice": 3600.0, "bob": 3600.0}
STDIO = {"sigterm", "graceful-end"}
"""Rules for processes that the check starts."""
SLOW = frozenset({"slow-reader"})
"""This rule makes hundreds of requests, so only its own defective servers are checked for it."""
VARIANTS = {
    "not-requested": ("not-requested", "not-requested/uri"),
    "unchanged": ("unchanged/connect", "unchanged/lists", "unchanged/idle", "unchanged/reconnect"),
}
DEFECTS = [defect for rule in RULES if rule not in STDIO for defect in VARIANTS.get(rule, (rule,))]
EXPIRY = "token-expiry"


async def check_http(defect: str = "", rules: frozenset[str] = frozenset(RULES)) -> Report:
    server = DefectiveServer(defect, TOKENS)
    async with run_uvicorn(server, http="h11") as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        return await check_target(dataclasses.replace(OPTIONS, target=url), rules)


async def check_stdio(defect: str = "", **options: Any) -> Report:
    command = tuple(forked_command("tests/support/defective_server.py", defect))
    options = {"target": command, "token": None, "second_token": None, **options}
    return await check_target(dataclasses.replace(OPTIONS, **options))


async def test_the_correct_server_breaks_no_rule() -> None:
    report = await check_http()
    assert report.findings == []
    assert report.problems == []
    assert report.skipped.keys() == {*STDIO, EXPIRY}


async def test_the_correct_server_breaks_no_rule_on_stdio() -> None:
    report = await check_stdio()
    assert report.findings == []
    assert report.problems == []
    assert {"sigterm", "graceful-end", "told", "told-once", "slow-reader", "unsubscribe"} <= set(report.passed)


@pytest.mark.parametrize("defect", [each for each in DEFECTS if each != EXPIRY])
async def test_a_defect_breaks_its_rule_and_no_other(defect: str) -> None:
    rules = frozenset(RULES) if defect in SLOW else frozenset(RULES) - SLOW
    report = await check_http(defect, rules)
    rule = defect.partition("/")[0]
    assert report.failed == {rule}, [(each.rule.id, each.message, each.evidence) for each in report.findings]
    for finding in report.findings:
        assert finding.message
        assert finding.evidence
    assert report.problems == []


async def test_a_server_that_chooses_an_older_version_breaks_no_rule() -> None:
    server = DefectiveServer()
    server.legacy_version = "2025-06-18"
    async with run_uvicorn(server, http="h11") as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        report = await check_target(dataclasses.replace(OPTIONS, target=url, token=None), frozenset(RULES) - SLOW)
    assert (report.findings, report.problems) == ([], [])
    assert report.protocols == ["2026-07-28", "2025-06-18"]


async def test_a_legacy_server_need_not_end_the_stream_of_an_answer() -> None:
    app = MCPServer("open", log_level="CRITICAL").streamable_http_app()

    async def keep_open(scope: Any, receive: Any, send: Any) -> None:
        is_stream = False

        async def send_without_end(message: Any) -> None:
            nonlocal is_stream
            is_stream = is_stream or (b"content-type", b"text/event-stream") in message.get("headers", ())
            await send({**message, "more_body": True} if is_stream and "body" in message else message)

        await app(scope, receive, send_without_end)
        while is_stream and (await receive())["type"] != "http.disconnect":
            pass

    async with run_uvicorn(keep_open, http="h11") as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        report = await check_target(dataclasses.replace(OPTIONS, target=url), frozenset({"capability-served"}))
    assert (report.problems, report.passed) == ([], ["capability-served"])
    assert report.protocols == ["2026-07-28", "2025-11-25"]


@pytest.mark.parametrize(
    ("attributes", "error", "failed"),
    [
        (
            {"errors": {"resources/list"}},
            'was answered with {"code": -32603, "message": "Internal error"}',
            {"capability-served"},
        ),
        ({"page": {"nextCursor": "a"}}, "never ends; the server sent the cursor 'a' twice", set()),
    ],
)
async def test_a_list_that_is_refused_does_not_prevent_the_other_checks(
    attributes: dict[str, Any], error: str, failed: set[str]
) -> None:
    server = DefectiveServer()
    vars(server).update(attributes)
    async with run_uvicorn(server, http="h11") as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        report = await check_target(dataclasses.replace(OPTIONS, target=url, token=None), frozenset(RULES) - SLOW)
    assert report.failed == failed
    assert {"told", "told-once", "unchanged", "list-order"} <= set(report.passed)
    assert report.problems == [f"lists: resources/list {error}"] * 2  # for each era


async def test_a_stream_that_outlives_its_token_is_found() -> None:
    rules = frozenset({EXPIRY})
    for defect, failed in (("", set()), (EXPIRY, {EXPIRY})):
        server = DefectiveServer(defect, {"short": 2.0})
        async with run_uvicorn(server, http="h11") as running:
            url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
            options = dataclasses.replace(OPTIONS, target=url, token="short", token_expires=2.0)
            report = await check_target(options, rules)
        assert report.checked == {EXPIRY}
        assert report.failed == failed


async def test_a_replica_with_another_order_is_found() -> None:
    async with (
        run_uvicorn(DefectiveServer(), http="h11") as first,
        run_uvicorn(server := DefectiveServer(), http="h11") as second,
    ):
        urls = [f"http://127.0.0.1:{address_of(each)[1]}/mcp" for each in (first, second)]
        options = dataclasses.replace(OPTIONS, target=urls[0], replicas=(urls[1],))
        rules = frozenset({"list-order"})
        assert (await check_target(options, rules)).findings == []
        server.tools.reverse()
        (finding,) = (await check_target(options, rules)).findings
        assert finding.message.startswith("tools/list has another order in ")


async def test_a_cancelled_listen_request_that_is_told_more_is_found() -> None:
    report = await check_stdio("unsubscribe")
    assert report.failed == {"unsubscribe"}, report.findings
    assert {finding.message for finding in report.findings} == {
        "notifications/tools/list_changed came after the client had cancelled the listen request",
        "notifications/resources/updated came after the client had cancelled the listen request",
    }


@pytest.mark.parametrize("defect", sorted(STDIO))
async def test_a_process_that_ends_badly_is_found(defect: str) -> None:
    report = await check_stdio(defect, trigger=None)
    assert report.failed == {defect}, report.findings
