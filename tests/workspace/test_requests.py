"""List and prompt requests: pages, and mistakes, which get -32602 and the reason, and no traceback in the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError

from tests.support.sdk_clients import MODERN, open_client
from tests.support.workspaces import serve_http, write
from tidings.live import Live
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
async def test_mistake_of_the_client_is_invalid_params(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    write(tmp_path, {"prompts/greet.md": "Hello {name}, {greeting}", "tools/t.sh": "#!/bin/sh\necho ok\n"})
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        ("prompts/get", {"name": "nothing"}, "Unknown prompt: nothing"),
        ("prompts/get", {"name": "greet"}, "greet: missing arguments: name, greeting"),
        ("prompts/get", {"name": "greet", "arguments": {"name": "Ada"}}, "greet: missing arguments: greeting"),
        ("tools/list", {"cursor": "next"}, "Unknown cursor: next"),
        ("prompts/list", {"cursor": "next"}, "Unknown cursor: next"),
        ("resources/list", {"cursor": "next"}, "Unknown cursor: next"),
        ("resources/templates/list", {"cursor": "YQ=="}, "Unknown cursor: YQ=="),
    ]
    async with serve_http(Live(Workspace(tmp_path))) as url, open_client(url, version) as client:
        for method, params, reason in mistakes:
            with pytest.raises(MCPError, match=reason) as raised:
                await client.request(method, **params)
            assert raised.value.error.code == -32602
        arguments = {"name": "Ada", "greeting": "hi"}
        assert "Hello Ada, hi" in str(await client.request("prompts/get", name="greet", arguments=arguments))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info] == []


async def test_long_list_comes_in_pages_and_files_may_change_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.workspace.requests._PAGE", 100)
    write(tmp_path, {f"resources/{number:04}.txt": "" for number in range(250)})
    live = Live(workspace := Workspace(tmp_path))
    async with serve_http(live) as url, open_client(url, MODERN) as client:
        page = await client.request("resources/list")
        uris = [resource["uri"] for resource in page["resources"]]
        sizes = [len(uris)]
        (tmp_path / "resources" / uris[-1].rpartition("/")[2]).unlink()
        workspace.rescan()
        while "nextCursor" in page:
            page = await client.request("resources/list", cursor=page["nextCursor"])
            sizes.append(len(page["resources"]))
            uris += [resource["uri"] for resource in page["resources"]]
    assert sizes == [100, 100, 51]
    assert uris == sorted(["tidings://errors", *(f"workspace:///{number:04}.txt" for number in range(250))])


def test_lists_of_a_workspace_come_from_the_cache_unless_the_user_replaces_their_handler(tmp_path: Path) -> None:
    live = Live(workspace := Workspace(tmp_path))
    methods = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
    assert all(live.list_cache.can_serve(method) for method in methods)
    entry = workspace.lowlevel.get_request_handler("tools/list")
    assert entry is not None

    async def own(ctx: Any, params: Any) -> Any:
        return await entry.handler(ctx, params)

    workspace.lowlevel.add_request_handler("tools/list", entry.params_type, own)
    assert [live.list_cache.can_serve(method) for method in methods] == [False, True, True, True]


async def test_short_list_comes_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"prompts/zeta.md": "last"})
    live = Live(workspace := Workspace(tmp_path))
    write(tmp_path, {"prompts/alpha.md": "first"})
    workspace.rescan()
    async with serve_http(live) as url, open_client(url, MODERN) as client:
        assert [prompt["name"] for prompt in (await client.request("prompts/list"))["prompts"]] == ["alpha", "zeta"]
