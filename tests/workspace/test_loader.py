"""What each kind of file in a workspace gives, asked by a real client.

What a folder registers is in test_workspace_registered, what is wrong with a file in test_workspace_trouble.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from mcp.client.client import Client

from tests.support.workspaces import call, read, run, write
from tidings.core.model import Feature
from tidings.workspace.files import walk
from tidings.workspace.source import Workspace


def test_settings_name_the_server_and_a_folder_without_them_is_named_after_itself(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert Workspace(tmp_path / "plain").settings.name == "plain"
    assert Workspace(tmp_path / "plain").settings.policy.announce
    write(
        tmp_path / "told",
        {
            "tidings.toml": 'name = "told"\nversion = "1.2"\ninstructions = "Ask first."\n'
            '[policy]\ndetail = "none"\n[tools]\ntimeout = 5\n'
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("told", "1.2")
        assert client.instructions == "Ask first."
        assert (workspace.settings.policy.detail, workspace.settings.timeout) == ("none", 5)

    run(tmp_path / "told", scenario)


PYTHON = '''
import asyncio
from dataclasses import dataclass
from mcp.server.mcpserver import Context

@dataclass
class Sum:
    value: int

def add(a: int, b: int = 1) -> Sum:
    """Add two numbers."""
    return Sum(_helper(a, b))

async def later(text: str, ctx: Context) -> str:
    await asyncio.sleep(0)
    await ctx.report_progress(1, 2, "half")
    return text

def _helper(a: int, b: int) -> int:
    return a + b
'''


def test_every_public_function_with_hints_is_a_tool_that_runs_as_in_the_sdk(tmp_path: Path) -> None:
    write(tmp_path, {"tools/sums.py": PYTHON})

    async def scenario(client: Client, workspace: Workspace) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert sorted(tools) == ["add", "later"]
        assert tools["add"].description == "Add two numbers."
        assert tools["add"].input_schema["required"] == ["a"]
        assert tools["later"].input_schema["properties"].keys() == {"text"}
        assert await call(client, "add", {"a": 2}) == {"value": 3}
        steps: list[Any] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            steps.append((progress, total, message))

        result = await client.call_tool("later", {"text": "hi"}, progress_callback=on_progress)
        assert getattr(result.content[0], "text", None) == "hi"
        assert steps == [(1, 2, "half")]

    run(tmp_path, scenario)


def test_a_python_tool_is_run_as_a_fresh_module_when_it_changed(tmp_path: Path) -> None:
    source = "calls = []\ndef count(x: int) -> int:\n    calls.append(x)\n    return len(calls)\n"
    write(tmp_path, {"tools/count.py": source})

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert await call(client, "count", {"x": 1}) == {"result": 1}
        assert await call(client, "count", {"x": 1}) == {"result": 2}
        write(tmp_path, {"tools/count.py": source + "# changed\n"})
        workspace.rescan()
        assert await call(client, "count", {"x": 1}) == {"result": 1}

    run(tmp_path, scenario)


def test_an_executable_says_what_it_is_in_its_comment_or_beside_it(tmp_path: Path) -> None:
    meta = {
        "name": "site-deploy",
        "title": "Deploy",
        "description": "From the file",
        "inputSchema": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
        "outputSchema": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
        "annotations": {"readOnlyHint": True},
        "icons": [{"src": "https://example.com/i.png"}],
        "timeout": 7,
        "env": {"REGION": "north"},
    }
    write(
        tmp_path,
        {
            "tools/say.sh": "#!/bin/sh\n# @describe Say it\n# @title Sayer\n# @arg what:string! What to say\n"
            '# @arg n:integer\necho "$TIDINGS_ARG_WHAT"\n',
            "tools/deploy.py": "#!/usr/bin/env python3\nimport json, os, sys\n"
            'print(json.dumps({"to": json.load(sys.stdin)["to"] + os.environ["REGION"]}))\n',
            "tools/deploy.meta.json": json.dumps(meta),
            "tools/README.md": "Not a tool",
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert sorted(tools) == ["say", "site-deploy"]
        assert (tools["say"].description, tools["say"].title) == ("Say it", "Sayer")
        assert tools["say"].input_schema == {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "What to say"}, "n": {"type": "integer"}},
            "required": ["what"],
        }
        assert await call(client, "say", {"what": "hello; rm -rf $(pwd)"}) == "hello; rm -rf $(pwd)"
        deploy = tools["site-deploy"].model_dump(by_alias=True, mode="json", exclude_none=True)
        for field in ("title", "description", "inputSchema", "outputSchema", "annotations", "icons"):
            assert deploy[field] == meta[field]
        assert await call(client, "site-deploy", {"to": "the "}) == {"to": "the north"}
        refused = await client.call_tool("site-deploy", {})
        assert refused.is_error
        assert "'to' is a required property" in getattr(refused.content[0], "text", "")

    run(tmp_path, scenario)


def test_a_folder_may_hold_one_tool_and_what_it_needs(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/report/tool.sh": "#!/bin/sh\ncat tools/report/data.txt\n",
            "tools/report/tool.meta.json": '{"description": "Reports"}',
            "tools/report/data.txt": "numbers",
            "tools/report/helper.py": "raise SystemExit",
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        [tool] = (await client.list_tools()).tools
        assert (tool.name, tool.description) == ("report", "Reports")
        assert await call(client, "report") == "numbers"
        assert workspace.problems == ()

    run(tmp_path, scenario)


def test_progress_lines_become_progress_notifications(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/slow.py": "#!/usr/bin/env python3\nimport os\n"
            'channel = os.fdopen(int(os.environ["TIDINGS_PROGRESS_FD"]), "w")\n'
            "for step in (1, 2):\n"
            '    print(f\'{{"progress": {step}, "total": 2, "message": "step {step}"}}\', file=channel)\n'
            'channel.flush()\nprint("done")\n'
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        steps: list[Any] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            steps.append((progress, total, message))

        await client.call_tool("slow", {}, progress_callback=on_progress)
        assert steps == [(1, 2, "step 1"), (2, 2, "step 2")]

    run(tmp_path, scenario)


def test_any_file_is_a_resource(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "resources/notes/today is.md": "# Today",
            "resources/logo.meta.json": '{"uri": "logo://main", "name": "Logo", "mimeType": "image/png", '
            '"title": "The logo"}',
            "resources/logs.meta.json": '{"uriTemplate": "log://{day}", "name": "logs", "path": "logs/{day}.txt"}',
            "logs/monday.txt": "It rained",
        },
    )
    (tmp_path / "resources" / "logo.png").write_bytes(b"\x89PNG\xff")

    async def scenario(client: Client, workspace: Workspace) -> None:
        listed = {each.uri: each for each in (await client.list_resources()).resources}
        assert listed.keys() == {"workspace:///notes/today%20is.md", "logo://main", "tidings://errors"}
        note, logo = listed["workspace:///notes/today%20is.md"], listed["logo://main"]
        assert (note.name, note.mime_type, note.size) == ("notes/today is.md", "text/markdown", 7)
        assert (logo.name, logo.title, logo.mime_type, logo.size) == ("Logo", "The logo", "image/png", 5)
        [template] = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "log://{day}"
        assert await read(client, note.uri) == "# Today"
        assert await read(client, "log://monday") == "It rained"
        contents = await client.read_resource("logo://main")
        assert getattr(contents.contents[0], "blob", None) == base64.b64encode(b"\x89PNG\xff").decode()

    run(tmp_path, scenario)


def test_a_prompt_has_arguments_and_may_have_several_messages(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "prompts/review.md": "---\ndescription: Review\narguments:\n  - name: diff\n    description: The change\n"
            '    required: true\n---\nLook at {diff} in {"json": 1}\n@assistant\nI will.\n@user\nGo.\n',
            "prompts/plain.txt": "Say {word} twice: {{word}}, ${word}",
            "prompts/odd.md": "---\narguments: 3\n---\nx",
            "prompts/worse.md": "---\ndescription: [\n---\nx",
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        prompts = {prompt.name: prompt for prompt in (await client.list_prompts()).prompts}
        assert sorted(prompts) == ["plain", "review"]
        [argument] = prompts["review"].arguments or []
        assert (argument.name, argument.description, argument.required) == ("diff", "The change", True)
        messages = (await client.get_prompt("review", {"diff": "D"})).messages
        said = [(message.role, getattr(message.content, "text", None)) for message in messages]
        assert said == [("user", 'Look at D in {"json": 1}'), ("assistant", "I will."), ("user", "Go.")]
        [plain] = (await client.get_prompt("plain", {"word": "moin"})).messages
        assert getattr(plain.content, "text", None) == "Say moin twice: moin, moin"
        assert [problem.path for problem in workspace.problems] == ["prompts/odd.md", "prompts/worse.md"]

    run(tmp_path, scenario)


def test_helpers_beside_a_tool_can_be_imported_and_are_no_tools(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/_shared_code.py": "def twice(x: int) -> int:\n    return 2 * x\n",
            "tools/double.py": "from _shared_code import twice\nsquare = lambda x: x * x\n"
            "def double(x: int) -> int:\n    return twice(x)\n",
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["double"]
        assert await call(client, "double", {"x": 4}) == {"result": 8}
        assert workspace.problems == ()

    run(tmp_path, scenario)


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    mark = "\ufeff"
    write(
        tmp_path,
        {
            "tidings.toml": f'{mark}name = "marked"\n',
            "prompts/p.md": f"{mark}---\ndescription: Marked\n---\nText",
            "tools/t.sh": "#!/bin/sh\necho t\n",
            "tools/t.meta.json": f'{mark}{{"description": "Marked"}}',
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert workspace.problems == ()
        assert workspace.settings.name == "marked"
        [prompt] = (await client.list_prompts()).prompts
        [tool] = (await client.list_tools()).tools
        assert prompt.description == tool.description == "Marked"

    run(tmp_path, scenario)


def test_an_event_of_the_folder_itself_hides_none_of_those_inside(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    workspace = Workspace(tmp_path)
    write(tmp_path, {"tools/k.py": "def k(x: int) -> int:\n    return x\n"})
    workspace.rescan([tmp_path, tmp_path / "tools" / "k.py"])
    assert [each["name"] for each in workspace.list_now(Feature.TOOLS)] == ["k"]


def test_packages_that_link_each_other_are_walked_once_by_each_link(tmp_path: Path) -> None:
    count = 14
    for number in range(count):
        write(tmp_path, {f"tools/p{number}/index.js": ""})
        (tmp_path / f"tools/p{number}/node_modules").mkdir()
        for other in range(number + 1, count):
            (tmp_path / f"tools/p{number}/node_modules/p{other}").symlink_to(tmp_path / f"tools/p{other}")
    links = count * (count - 1) // 2
    assert len(list(walk(tmp_path))) == count + links
    below = {str(path) for path in walk(tmp_path, "tools/p0/node_modules/p1")}
    assert below == {"tools/p0/node_modules/p1/index.js"}
