"""Log lines of `tidings serve` about what others wrote: no secret in one, no line forged, and all of them in JSON."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mcp import Client
from rich.console import Console

from tests.support.command import DEADLINE, GRACE, line_with, replace_file, start_command
from tests.support.otlp_collector import SECRET
from tidings.cli.logs import TextFormatter
from tidings.cli.status import Panel, Snapshot
from tidings.server.authorization import Principal
from tidings.workspace.problems import Problem

pytestmark = pytest.mark.anyio

TITLE = "\x1b]0;forged\x07"
"""What sets a terminal's title."""


@pytest.mark.parametrize("options", [(), ("--log-format", "json")], ids=["text", "json"])
async def test_what_people_hide_in_the_uri_of_a_file_is_not_said(board: Path, options: tuple[str, ...]) -> None:
    uri = f"https://me:{SECRET}@host/hidden?token={SECRET}"
    added = "added https://host/hidden" if options else "resource https://host/hidden added"
    wanted, said = ("content of https://host/hidden updated", added), ""
    async with asyncio.timeout(DEADLINE), start_command("serve", board, "--json", "--port", 0, *options) as process:
        await process.stdout.readline()
        replace_file(board / "resources" / "hidden.meta.json", json.dumps({"uri": uri}))
        replace_file(board / "resources" / "hidden.md", "first")
        while not all(each in said for each in wanted):
            line = await process.stderr.readline()
            assert line, said
            said += line.decode()
        process.terminate()
        said += (await process.stderr.read()).decode()
    assert SECRET not in said


def test_no_line_of_a_traceback_can_be_taken_for_one_of_the_log() -> None:
    """A tool may raise what a client has sent it."""
    try:
        raise ValueError(f"no such name: {TITLE}\n12:00:00 all is well")
    except ValueError:
        record = logging.LogRecord("tidings", logging.ERROR, "", 0, "a tool failed", (), sys.exc_info())
    first, *rest = TextFormatter("%(asctime)s %(message)s", "%H:%M:%S").format(record).split("\n")
    assert first.endswith("error: a tool failed")
    assert rest[-2:] == [r"  ValueError: no such name: \x1b]0;forged\x07", "  12:00:00 all is well"]
    assert all(line.startswith("  ") for line in rest)


def test_no_problem_of_a_file_commands_the_terminal() -> None:
    terminal = io.StringIO()
    panel = Panel(Console(file=terminal, force_terminal=True, width=120), "board")
    problem = Problem("tools/bad.py", 1, f"ValueError: {TITLE}")
    with panel.open():
        panel.show(Snapshot(problems=(problem,)))
    assert r"\x1b]0;forged" in terminal.getvalue()
    assert TITLE[:-1] not in terminal.getvalue()


def test_who_asks_is_named_without_the_claims_of_its_token() -> None:
    principal = Principal("client", "subject", ("read",), {"session": SECRET})
    assert "client" in repr(principal)
    assert SECRET not in repr(principal)


async def test_a_header_for_the_collector_that_is_none_is_not_shown(board: Path) -> None:
    """Most often it is a token whose name was forgotten."""
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://[{SECRET}",  # is no URL, which harms nobody
        "OTEL_EXPORTER_OTLP_HEADERS": f"Bearer {SECRET}",
        "OTEL_TRACES_SAMPLER": "nonsense",
    }
    # What is wrong with other settings is said as it is.
    wanted, said = ("nonsense", "a header for the collector is not name=value"), ""
    async with asyncio.timeout(DEADLINE), start_command("serve", board, "--json", "--port", 0, env=env) as process:
        await process.stdout.readline()
        while not all(each in said for each in wanted):
            line = await process.stderr.readline()
            assert line, said
            said += line.decode()
        process.terminate()
        said += (await process.stderr.read()).decode()
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
    assert SECRET not in said


INSTRUMENTED = """
import logging
from collections import Counter
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from tidings.cli.otlp import export_telemetry

trace.set_tracer_provider(TracerProvider())
logging.basicConfig(format="%(message)s")
failures = Counter()
with export_telemetry("board", failures):
    logging.getLogger("opentelemetry.exporter.mine").warning("in its own words")
print(dict(failures))
"""


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9"], ids=["nowhere", "instrumented"])
def test_what_the_users_own_exporters_say_is_theirs(endpoint: str) -> None:
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    ran = subprocess.run(
        [sys.executable, "-c", INSTRUMENTED], env=env, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert "in its own words" in ran.stderr.splitlines()
    assert ran.stdout == "{}\n"


async def test_the_last_word_about_calls_that_hang_is_json_too(board: Path) -> None:
    begun = """print('{"message": "begun"}', file=sys.stderr, flush=True)"""
    stuck = f"import sys, time\n\ndef stuck() -> None:\n    {begun}\n    time.sleep(600)\n"
    (board / "tools" / "stuck.py").write_text(stuck)
    options = ("--log-format", "json", "--json", "--port", 0)
    async with asyncio.timeout(DEADLINE), start_command("serve", board, *options) as process:
        url = json.loads(await process.stdout.readline())["url"]
        async with Client(url) as client:
            call = asyncio.create_task(client.call_tool("stuck"))
            await line_with(process.stderr, "begun")
            process.terminate()
            assert await asyncio.wait_for(process.wait(), GRACE) == 0
            said = [json.loads(line) for line in (await process.stderr.read()).decode().splitlines()]
            call.cancel()
    assert [each["level"] for each in said if "calls still run" in each["message"]] == ["warning"]


async def test_what_python_says_of_a_tools_warnings_and_threads_is_json_too(board: Path) -> None:
    careless = (
        "import threading, warnings",
        "def careless() -> None:",
        "    warnings.warn('two\\nlines')",
        "    threading.Thread(target=int, args=['x']).start()",
    )
    (board / "tools" / "careless.py").write_text("\n".join(careless))
    options = ("--log-format", "json", "--json", "--port", 0)
    async with asyncio.timeout(DEADLINE), start_command("serve", board, *options) as process:
        async with Client(json.loads(await process.stdout.readline())["url"]) as client:
            await client.call_tool("careless")
        said = [json.loads(await process.stderr.readline())]
        while "exception" not in said[-1]:
            said.append(json.loads(await process.stderr.readline()))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
    assert [each["level"] for each in said if "two\nlines" in each["message"]] == ["warning"]
    assert said[-1]["exception"].endswith("invalid literal for int() with base 10: 'x'")
