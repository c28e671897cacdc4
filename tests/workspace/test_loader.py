"""The items of each kind of file, as a real client sees them. Python tools are in `test_python`.

Covers `executable.py`, `items.py`, `prompts.py`, `settings.py` and `tools.py`.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
from mcp import MCPError
from mcp.client.client import Client

from tests.support.command import tidings
from tests.support.workspaces import call, call_with_progress, list_names, read, script, serve, write
from tidings.core.model import Feature
from tidings.workspace.files import walk
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

SCRIPT = "#!/bin/sh\necho hi\n"


async def test_settings_name_the_server_and_the_folder_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert Workspace(tmp_path / "plain").settings.name == "plain"
    assert Workspace(tmp_path / "plain").settings.policy.announce
    assert Workspace(tmp_path / "plain").server.version == "0.0.0"
    text = (
        'name = "set"\nversion = "1.2"\ninstructions = "Ask first."\n[policy]\ndetail = "none"\n[tools]\ntimeout = 5\n'
    )
    write(tmp_path, {"ws/tidings.toml": text})
    async with serve(tmp_path / "ws") as (client, workspace):
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("set", "1.2")
        assert client.instructions == "Ask first."
        assert (workspace.settings.policy.detail, workspace.settings.timeout) == ("none", 5)


async def test_executable_is_described_by_its_comment_or_its_meta_file(tmp_path: Path) -> None:
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
            "tools/add.py": "def add(a: int, b: int) -> int:\n    return a + b\n",
        },
    )
    for name in ("README.md", "add.py"):
        (tmp_path / "tools" / name).chmod(0o755)  # as all files are on some file systems
    async with serve(tmp_path) as (client, _):
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert sorted(tools) == ["add", "say", "site-deploy"]
        assert await call(client, "add", {"a": 1, "b": 2}) == {"result": 3}
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


async def test_folder_can_contain_one_tool_and_its_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/report/tool.sh": "#!/bin/sh\ncat tools/report/data.txt\n",
            "tools/report/tool.meta.json": '{"description": "Reports"}',
            "tools/report/examples/tool.meta.json": '{"description": "an example"}',
            "tools/report/data.txt": "numbers",
            "tools/report/helper.py": "raise SystemExit",
        },
    )
    async with serve(tmp_path) as (client, workspace):
        [tool] = (await client.list_tools()).tools
        assert (tool.name, tool.description) == ("report", "Reports")
        assert await call(client, "report") == "numbers"
        assert workspace.problems == ()


async def test_progress_lines_become_progress_notifications(tmp_path: Path) -> None:
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
    async with serve(tmp_path) as (client, _):
        assert await call_with_progress(client, "slow", {}) == ("done", [(1, 2, "step 1"), (2, 2, "step 2")])


async def test_every_file_is_a_resource(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "resources/notes/today is.md": "# Today",
            "resources/a.svg": "<svg/>",
            "resources/logo.meta.json": '{"uri": "logo://main", "name": "Logo", "mimeType": "image/png", '
            '"title": "The logo"}',
            "resources/logs.meta.json": '{"uriTemplate": "log://{day}", "name": "logs", "path": "logs/{day}.txt"}',
            "logs/monday.txt": "It rained",
        },
    )
    (tmp_path / "resources" / "logo.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "resources" / "b.txt.gz").write_bytes(b"\x1f\x8b\xff")
    async with serve(tmp_path) as (client, _):
        listed = {resource.uri: resource for resource in (await client.list_resources()).resources}
        types = {uri.removeprefix("workspace:///"): resource.mime_type for uri, resource in listed.items()}
        assert types == {
            "notes/today%20is.md": "text/markdown",
            "a.svg": "image/svg+xml",
            "b.txt.gz": "application/gzip",
            "logo://main": "image/png",
            "tidings://errors": "text/plain",
        }
        note, logo = listed["workspace:///notes/today%20is.md"], listed["logo://main"]
        assert (note.name, note.size) == ("notes/today is.md", 7)
        assert (logo.name, logo.title, logo.size) == ("Logo", "The logo", 5)
        [template] = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "log://{day}"
        assert await read(client, note.uri) == "# Today"
        assert await read(client, "workspace:///a.svg") == "<svg/>"
        assert await read(client, "log://monday") == "It rained"
        contents = await client.read_resource("logo://main")
        assert getattr(contents.contents[0], "blob", None) == base64.b64encode(b"\x89PNG\xff").decode()


async def test_template_reaches_no_hidden_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".env": "secret",
            ".tidings/state.db": "secret",
            "docs/a.txt": "open",
            "resources/any.meta.json": '{"uriTemplate": "file:///{+path}", "name": "any"}',
        },
    )
    async with serve(tmp_path) as (client, _):
        assert await read(client, "file:///docs/a.txt") == "open"
        for path in (".env", ".tidings/state.db", "x" * 300):
            with pytest.raises(MCPError, match="Unknown resource"):
                await client.read_resource(f"file:///{path}")


async def test_prompt_has_arguments_and_several_messages(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "prompts/review.md": "---\ndescription: Review\narguments:\n  - name: diff\n    description: The change\n"
            '    required: true\n---\nLook at {diff} in {"json": 1}\n@assistant\nI will.\n@user\nGo.\n',
            "prompts/plain.txt": "Say {word} twice: {{word}}, ${word}",
        },
    )
    async with serve(tmp_path) as (client, _):
        prompts = {prompt.name: prompt for prompt in (await client.list_prompts()).prompts}
        assert sorted(prompts) == ["plain", "review"]
        [argument] = prompts["review"].arguments or []
        assert (argument.name, argument.description, argument.required) == ("diff", "The change", True)
        messages = (await client.get_prompt("review", {"diff": "D"})).messages
        texts = [(message.role, getattr(message.content, "text", None)) for message in messages]
        assert texts == [("user", 'Look at D in {"json": 1}'), ("assistant", "I will."), ("user", "Go.")]
        [plain] = (await client.get_prompt("plain", {"word": "moin"})).messages
        assert getattr(plain.content, "text", None) == "Say moin twice: moin, moin"


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    bom = "\ufeff"
    write(
        tmp_path,
        {
            "tidings.toml": f'{bom}name = "marked"\n',
            "prompts/p.md": f"{bom}---\ndescription: Marked\n---\nText",
            "tools/t.sh": SCRIPT,
            "tools/t.meta.json": f'{bom}{{"description": "Marked"}}',
        },
    )
    workspace = Workspace(tmp_path)
    assert (workspace.problems, workspace.settings.name) == ((), "marked")
    [prompt], [tool] = workspace.read_items(Feature.PROMPTS), workspace.read_items(Feature.TOOLS)
    assert prompt["description"] == tool["description"] == "Marked"


def test_other_files_beside_a_tool_are_ignored(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/a.sh": SCRIPT,
            "tools/a.md": "# About it",
            "tools/a.meta.json": '{"description": "own", "inputSchema": {"properties": {"x": {"type": "string"}}}}',
            "tools/#a.sh#": SCRIPT,
            "resources/a.txt": "a",
            "resources/a.txt___jb_tmp___": "",
        },
    )
    for name in ("l", "m"):
        (tmp_path / "resources" / name).symlink_to(".")  # a cycle of links
    Path(os.fsdecode(os.fsencode(tmp_path / "tools") + b"/z\xff.sh")).touch(0o755)  # not valid UTF-8
    workspace = Workspace(tmp_path)
    assert workspace.problems == ()
    [tool] = workspace.read_items(Feature.TOOLS)
    assert tool["description"] == "own"
    assert tool["inputSchema"] == {"type": "object", "properties": {"x": {"type": "string"}}}
    assert list_names(workspace, Feature.RESOURCES) == ["a.txt", "errors"]


def test_link_to_itself_is_like_a_missing_file(tmp_path: Path) -> None:
    template = '{"uriTemplate": "t://{name}", "path": "resources/a/{name}"}'
    write(
        tmp_path, {"tools/good.sh": SCRIPT, "resources/a.meta.json": '{"path": "a"}', "resources/t.meta.json": template}
    )
    for name in (".gitignore", "tidings.toml", "server.d", "tools/a.sh", "resources/a", "prompts"):
        (tmp_path / name).symlink_to(Path(name).name)
    workspace = Workspace(tmp_path)
    assert list_names(workspace, Feature.TOOLS) == ["good"]
    assert [str(problem) for problem in workspace.problems] == ["resources/a.meta.json: the file 'a' does not exist"]
    (tmp_path / "resources" / "b").symlink_to("b")
    workspace.rescan([tmp_path / "resources" / "b"])


def test_packages_that_link_to_each_other_are_walked_once_per_link(tmp_path: Path) -> None:
    count = 14
    for number in range(count):
        write(tmp_path, {f"tools/p{number}/index.js": ""})
        (tmp_path / f"tools/p{number}/packages").mkdir()
        for other in range(number + 1, count):
            (tmp_path / f"tools/p{number}/packages/p{other}").symlink_to(tmp_path / f"tools/p{other}")
    links = count * (count - 1) // 2
    assert len(list(walk(tmp_path))) == count + links
    assert list(map(str, walk(tmp_path, "tools/p0/packages/p1"))) == ["tools/p0/packages/p1/index.js"]


@pytest.mark.parametrize("name", ["😀 all", "a\x7fb", "q\"u'o", "-dash", "ünï"])
def test_new_workspace_is_valid_for_any_name(tmp_path: Path, name: str) -> None:
    assert tidings("new", tmp_path / name).status == 0
    workspace = Workspace(tmp_path / name)
    assert (workspace.problems, workspace.settings.name) == ((), name)


@pytest.mark.parametrize(
    ("allowlist", "served"),
    [
        ("one", ["one"]),
        ("one, three  absent", ["one", "three"]),
        ("*", ["one", "three", "two"]),
        ("", ["one", "three", "two"]),
    ],
)
async def test_only_tools_in_the_allowlist_of_mcp_bash_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowlist: str, served: list[str]
) -> None:
    monkeypatch.setenv("MCPBASH_TOOL_ALLOWLIST", allowlist)
    names = ("one", "two", "three")
    write(tmp_path, {f"tools/{name}.sh": script(name) for name in names} | {"prompts/two.md": "text"})
    for _ in range(2):
        workspace = Workspace(tmp_path)
        assert list_names(workspace) == served
        assert list_names(workspace, Feature.PROMPTS) == ["two"]
        async with Client(workspace.server) as client:
            for name in names:
                result = await client.call_tool(name)
                assert result.is_error == (name not in served)
        entries = ", ".join(f'{{"name": "{name}", "path": "{name}.sh"}}' for name in names)
        write(tmp_path, {"server.d/register.json": f'{{"tools": [{entries}]}}'})
