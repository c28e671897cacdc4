"""Projects of mcp-bash-framework, served as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest

from tests.support.workspaces import call, get_problems, list_names, serve, write
from tidings.core.model import Feature
from tidings.sdk import internals
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

SDK = '#!/usr/bin/env bash\nset -euo pipefail\nsource "${MCP_SDK:?}/tool-sdk.sh"\n'
PAGE = "<!DOCTYPE html><title>Weather</title>"


async def test_paths_are_relative_to_the_file_the_kind_or_the_project(tmp_path: Path) -> None:
    files = {"prompts/review/review.txt": "Review {{it}}", "resources/notes/n.txt": "note"}
    for number, path in enumerate(("review.txt", "review/review.txt", "prompts/review/review.txt")):
        files[f"prompts/review/p{number}.meta.json"] = json.dumps({"name": f"p{number}", "path": path})
    files["prompts/review/README.md"] = "How to use {this} folder"
    files["resources/notes/r.meta.json"] = json.dumps({"uri": "note://r", "path": "resources/notes/n.txt"})
    write(tmp_path, files)

    async with serve(tmp_path) as (client, workspace):
        assert workspace.problems == ()
        assert list_names(workspace, Feature.PROMPTS) == ["p0", "p1", "p2", "review"]
        for number in range(3):
            prompt = await client.get_prompt(f"p{number}", {"it": "this"})
            assert prompt.messages[0].content == types.TextContent(text="Review this")
        contents = (await client.read_resource("note://r")).contents
        assert isinstance(contents[0], types.TextResourceContents)
        assert contents[0].text == "note"


@pytest.mark.parametrize("form", ["file://{root}/data/a.txt", "file://./data/a.txt", "file:///data/a.txt"])
async def test_file_uris_are_kept_and_name_the_file(tmp_path: Path, form: str) -> None:
    uri = form.format(root=tmp_path)
    write(tmp_path, {"data/a.txt": "content", "resources/a/a.meta.json": json.dumps({"name": "a", "uri": uri})})

    async with serve(tmp_path) as (client, workspace):
        assert [problem.message for problem in workspace.problems] == []
        contents = (await client.read_resource(uri)).contents
        assert isinstance(contents[0], types.TextResourceContents)
        assert (contents[0].uri, contents[0].text) == (uri, "content")


async def test_tools_may_be_nested_in_folders(tmp_path: Path) -> None:
    meta = json.dumps({"name": "deep-tool"})
    write(
        tmp_path,
        {
            "tools/group/deep/tool.sh": SDK + "mcp_emit_text deep\n",
            "tools/group/deep/tool.meta.json": meta,
            "tools/group/deep/lib/tool.sh": SDK + "exit 1\n",  # for the tool's own use
            "tools/group/other/tool.sh": SDK + "mcp_emit_text other\n",
        },
    )

    async with serve(tmp_path) as (client, workspace):
        assert list_names(workspace) == ["deep-tool", "other"]
        assert await call(client, "deep-tool", {}) == "deep"


async def test_env_script_sets_variables_of_tools_and_registrations(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "server.d/env.sh": 'echo noise; export REGION="north of ${MCPBASH_PROJECT_ROOT##*/}"; HIDDEN=1\n',
            "server.d/register.py": "#!/usr/bin/env python3\nimport json, os\n"
            'print(json.dumps({"prompts": [{"name": os.environ["REGION"], "path": "p.txt"}]}))\n',
            "p.txt": "text",
            "tools/env.sh": '#!/bin/sh\necho "$REGION ${HIDDEN:-hidden}"; cat\n',
        },
    )

    async with serve(tmp_path) as (client, workspace):
        assert list_names(workspace, Feature.PROMPTS) == [f"north of {tmp_path.name}"]
        assert await call(client, "env", {"a": 1}) == f'north of {tmp_path.name} hidden\n{{"a":1}}'

        (tmp_path / "server.d/env.sh").write_text("return 3\n")
        result = await client.call_tool("env", {})
        assert result.is_error
        assert isinstance(result.content[0], types.TextContent)
        assert "server.d/env.sh failed with status 3" in result.content[0].text


async def test_register_script_has_the_registration_functions(tmp_path: Path) -> None:
    tool = json.dumps({"name": "by-hand", "path": "manual.sh", "inputSchema": {"type": "object"}})
    template = json.dumps({"name": "logs", "uriTemplate": "log://{day}", "path": "logs/{day}.txt"})
    write(
        tmp_path,
        {
            "tools/manual.sh": SDK + "mcp_emit_text manual\n",
            "tools/auto/tool.sh": SDK + "mcp_emit_text auto\n",
            "prompts/p.txt": "{{x}}",
            "logs/monday.txt": "quiet",
        },
    )
    (tmp_path / "server.d").mkdir()
    script = tmp_path / "server.d" / "register.sh"  # not executable: the framework sources it
    script.write_text(
        f"set -euo pipefail\nmcp_tools_manual_begin\nmcp_tools_register_manual '{tool}'\nmcp_tools_manual_finalize\n"
        f"mcp_resources_templates_manual_begin\nmcp_resources_templates_register_manual '{template}'\n"
        "mcp_resources_templates_manual_finalize\nmcp_prompts_manual_begin\nmcp_prompts_manual_finalize\n"
        'mcp_register_resource \'{"name":"r","uri":"r://r","path":"logs/monday.txt"}\'\n'
    )

    async with serve(tmp_path) as (client, workspace):
        assert workspace.problems == ()
        assert list_names(workspace) == ["by-hand"]
        assert list_names(workspace, Feature.PROMPTS) == ["p"]  # a kind without an item is not replaced
        assert await call(client, "by-hand", {}) == "manual"
        for uri in ("r://r", "log://monday"):
            contents = (await client.read_resource(uri)).contents
            assert isinstance(contents[0], types.TextResourceContents)
            assert contents[0].text == "quiet"

    script.write_text("mcp_tools_register_manual 'not json'\n")
    assert get_problems(tmp_path)[0].startswith("server.d/register.sh: the output is not a JSON object")


async def test_pages_are_resources_and_linked_to_their_tools(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "server.d/server.meta.json": json.dumps({"name": "sky"}),
            "tools/weather/tool.sh": SDK + "mcp_emit_text sunny\n",
            "tools/weather/ui/index.html": PAGE,
            "tools/weather/ui/ui.meta.json": json.dumps(
                {"description": "A card", "meta": {"csp": {"connectDomains": ["https://example.com"]}}}
            ),
            "ui/board/page.html": PAGE,
            "ui/board/ui.meta.json": json.dumps({"entrypoint": "page.html", "meta": {"prefersBorder": False}}),
        },
    )

    async with serve(tmp_path) as (client, workspace):
        assert workspace.problems == ()
        (tool,) = (await client.list_tools()).tools
        assert tool.meta == {"ui": {"resourceUri": "ui://sky/weather", "visibility": ["model", "app"]}}
        pages = {page.uri: page for page in (await client.list_resources()).resources}
        weather, board = pages["ui://sky/weather"], pages["ui://sky/board"]
        assert (weather.name, weather.description) == ("weather", "A card")
        assert weather.mime_type == "text/html;profile=mcp-app"
        csp = {"connectDomains": ["https://example.com"]}
        assert weather.meta == {"ui": {"csp": csp, "permissions": {}, "prefersBorder": True}}
        assert board.meta == {"ui": {"csp": {}, "permissions": {}, "prefersBorder": False}}
        contents = (await client.read_resource("ui://sky/weather")).contents
        assert isinstance(contents[0], types.TextResourceContents)
        assert (contents[0].text, contents[0].mime_type) == (PAGE, "text/html;profile=mcp-app")
        assert contents[0].meta == weather.meta


def test_progress_extends_the_time_of_a_tool_that_says_so(tmp_path: Path) -> None:
    meta: dict[str, Any] = {"timeoutSecs": 5, "progressExtendsTimeout": True}
    write(tmp_path, {"tools/a/tool.sh": SDK, "tools/a/tool.meta.json": json.dumps(meta)})
    write(tmp_path, {"tools/b/tool.sh": SDK, "tools/b/tool.meta.json": json.dumps(meta | {"maxTimeoutSecs": 60})})
    write(tmp_path, {"tools/c/tool.sh": SDK, "tools/c/tool.meta.json": json.dumps({"timeoutSecs": 5})})
    write(tmp_path, {"tools/d/tool.sh": SDK, "tools/d/tool.meta.json": json.dumps(meta | {"maxTimeoutSecs": "x"})})

    workspace = Workspace(tmp_path)
    tools = internals.registry_of(workspace.server, "tools")
    limits = {name: (tool.executable.timeout, tool.executable.max_timeout) for name, tool in tools.items()}

    assert limits == {"a": (5, 600), "b": (5, 60), "c": (5, None)}
    (problem,) = map(str, workspace.problems)
    assert problem.startswith("tools/d/tool.meta.json:1: maxTimeoutSecs is 'x'; it must be a positive number")
