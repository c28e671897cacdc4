"""A pytest plugin for the SDK's own tests: writes the outcome of each test to a file, and may make every server live.

It reads its settings from the environment, because it is loaded in every process of pytest-xdist:

* `SDK_SUITE_OUTCOMES`: the file to write.
* `SDK_SUITE_MODE`: "plain" for the servers of the SDK as they are, "live" for servers in `Live`, or "live-additions".
  "live" removes the documented additions from the responses, so that they hide no other difference.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel

MODE = os.environ["SDK_SUITE_MODE"]
outcomes: dict[str, tuple[str, str]] = {}
"""Test id → outcome, and the end of the error."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (report.when == "call" or not report.passed) and outcomes.get(report.nodeid, ("passed",))[0] == "passed":
        outcomes[report.nodeid] = report.outcome, report.longreprtext[-3000:] if report.failed else ""


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # pytest-xdist sets this in its processes
        Path(os.environ["SDK_SUITE_OUTCOMES"]).write_text(json.dumps(outcomes))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> object:
    """Give each test an event loop of its own. The suite shares one per module, and some failures close it."""
    if fixturedef.argname != "_module_runner_lease":
        return None
    fixturedef.cached_result = (None, fixturedef.cache_key(request), None)
    return True


def make_servers_live(*, keep_additions: bool) -> None:
    """Wrap every server in `Live` when it is constructed."""
    from tidings import Live, Policy

    policy = None if keep_additions else Policy(detail="none")
    constructing = 0

    def wrap(kind: type) -> None:
        construct = kind.__init__  # type: ignore[misc]

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal constructing
            constructing += 1
            try:
                construct(self, *args, **kwargs)
            finally:
                constructing -= 1
            if not constructing:  # not the low-level server of an `MCPServer`
                # Without telemetry: some tests replace the tracer of the SDK, and compare what it sends.
                live = Live(self, policy=policy, telemetry=False)
                if not keep_additions:
                    live.lowlevel.middleware.insert(0, _remove_additions)

        kind.__init__ = init  # type: ignore[misc]

    wrap(Server)
    wrap(MCPServer)


async def _remove_additions(ctx: Any, call_next: Any) -> Any:
    """Remove what Tidings adds to responses: the cursor in `_meta`, and the extension in the capabilities."""
    result = await call_next(ctx)
    if isinstance(result, BaseModel):
        meta = getattr(result, "meta", None)
        return result.model_copy(update={"meta": _without(meta, "dev.tidings/cursor")}) if meta else result
    if isinstance(result, dict):
        result = _replaced(result, "_meta", "dev.tidings/cursor")
        if isinstance(result.get("capabilities"), dict):
            capabilities = _replaced(result["capabilities"], "extensions", "dev.tidings/changes")
            return {**result, "capabilities": capabilities}
    return result


_remove_additions.__module__ = "tidings.sdk_suite"  # middleware of other modules makes Live pass requests to the SDK


def _replaced(owner: dict[str, Any], member: str, key: str) -> dict[str, Any]:
    """Return a dict without a key of one of its members, and without that member if it is empty then."""
    if key not in (owner.get(member) or ()):
        return owner
    left = _without(owner.get(member), key)
    return {name: value for name, value in {**owner, member: left}.items() if name != member or value is not None}


def _without(values: dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    return {name: value for name, value in (values or {}).items() if name != key} or None


if MODE != "plain":
    make_servers_live(keep_additions=MODE == "live-additions")
