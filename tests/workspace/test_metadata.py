"""What files of a workspace say of themselves, and what is said of them when it can't be meant: file, line, reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mcp import MCPError
from mcp.client.client import Client

from tests.support.command import tidings
from tests.support.workspaces import read, run, write
from tidings.core.model import Feature
from tidings.workspace.source import Workspace

SCRIPT = "#!/bin/sh\necho hi\n"


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("tools/a.meta.json", '{\n "name": "a",\n "x": }', "tools/a.meta.json:3: not a JSON object"),
        ("tools/a.meta.json", '{\n\n"timeout": "x"}', "tools/a.meta.json:3: timeout is 'x'"),
        ("tools/a.meta.json", '{\n"inputSchema": {"type": "strin"}}', "tools/a.meta.json:2: inputSchema is not a JSON"),
        (
            "tools/a.meta.json",
            '{\n"inputSchema": {"type": "string"}}',
            "tools/a.meta.json:2: inputSchema has the type",
        ),
        ("tools/a.meta.json", '{\n"title": 7}', "tools/a.meta.json:2: title: "),
        ("tools/a.meta.json", '{\n"env": 7}', "tools/a.meta.json:2: env is 7"),
        (
            "tools/a.meta.json",
            '{"x":' + "[" * 100_000,
            "tools/a.meta.json:1: not a JSON object: it is nested",
        ),
        ("tools/b.meta.json", '{\n"annotations": 7}', "tools/b.meta.json:2: annotations: "),
        ("tools/b.meta.json", '{\n"name": 7}', "tools/b.meta.json:2: name is 7; it must be a string"),
        ("resources/a.meta.json", '{\n"annotations": 5}', "resources/a.meta.json:2: annotations: "),
        ("resources/t.meta.json", '{"uriTemplate": "t://{x}",\n"title": 5}', "resources/t.meta.json:2: title: "),
        ("prompts/a.md", "---\nname: x\ntitle: 5\n---\nhi", "prompts/a.md:3: title: "),
        ("prompts/a.md", "---\nname: x\ntitle: a\x07b\n---\nhi", "prompts/a.md:3: front matter is not YAML"),
        ("prompts/a.md", "---\nname: x\nrole: system\n---\nhi", "prompts/a.md:3: role is 'system'"),
        ("prompts/a.md", "---\ntitle: a\nhi {x}", "prompts/a.md:1: front matter has no end"),
        ("prompts/a.md", "---\ntitle: 2024-13-77\n---\nhi", "prompts/a.md:2: front matter can't be read"),
        ("prompts/a.md", "---\narguments: {required: 5}\n---\nhi", "prompts/a.md:2: arguments must be a list, or"),
        ("prompts/a.md", "---\narguments: [b, b]\n---\nhi", "prompts/a.md:2: argument 'b' is declared twice"),
        ("server.d/register.json", "{\n\n garbage", "server.d/register.json:3: not a JSON object"),
        (
            "server.d/register.sh",
            "#!/bin/sh\necho garbage\n",
            "server.d/register.sh: the output is not a JSON object",
        ),
        ("server.d/server.meta.json", '{\n"name": "\udcff"}', "server.d/server.meta.json:2: not UTF-8"),
        ("tidings.toml", "a=" + "[" * 100_000, "tidings.toml: not TOML: it is nested too deeply"),
        ("tidings.toml", "[register]\ntimeout=1\n[tools]\ntimeout='x'", "tidings.toml:4: [tools] timeout is 'x'"),
        ("tidings.toml", "tools = 5", "tidings.toml:1: tools is 5; it must be a section, [tools]"),
        ("tidings.toml", "[tools]\nenv = [1]", "tidings.toml:2: [tools] env is [1]; it must be a list of strings"),
        ("tools/b.py", "raise ValueError('a\\nb')", "tools/b.py:1: ValueError: a b"),
        ("tools/e\nvil.py", "x =", "tools/e vil.py:1: invalid syntax"),
    ],
)
def test_what_can_not_be_meant_is_named_with_file_and_line(tmp_path: Path, file: str, text: str, problem: str) -> None:
    write(tmp_path, {"tools/a.sh": SCRIPT, "tools/b.py": "def b() -> int:\n    return 1\n", "resources/a.txt": "a"})
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o755 if text.startswith("#!") else 0o644)
    [found] = Workspace(tmp_path).problems
    assert str(found).startswith(problem)


def test_a_file_beside_a_tool_takes_nothing_from_what_is_said_of_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/a.sh": SCRIPT,
            "tools/a.md": "# About it",
            "tools/a.meta.json": '{"description": "said", "inputSchema": {"properties": {"x": {"type": "string"}}}}',
            "tools/r/tool.sh": SCRIPT,
            "tools/r/tool.meta.json": '{"description": "own"}',
            "tools/r/examples/tool.meta.json": '{"description": "an example"}',
            "tools/#a.sh#": SCRIPT,
            "resources/a.txt___jb_tmp___": "",
        },
    )
    workspace = Workspace(tmp_path)
    assert workspace.problems == ()
    tools = {tool["name"]: tool for tool in workspace.list_now(Feature.TOOLS)}
    assert {name: tool["description"] for name, tool in tools.items()} == {"a": "said", "r": "own"}
    assert tools["a"]["inputSchema"] == {"type": "object", "properties": {"x": {"type": "string"}}}
    assert len(workspace.list_now(Feature.RESOURCES)) == 1


def test_a_file_is_of_its_own_kind_whatever_it_holds(tmp_path: Path) -> None:
    write(tmp_path, {"resources/a.svg": "<svg/>"})
    (tmp_path / "resources" / "b.txt.gz").write_bytes(b"\x1f\x8b\xff")

    async def scenario(client: Client, workspace: Workspace) -> None:
        kinds = {each.name: each.mime_type for each in (await client.list_resources()).resources}
        assert (kinds["a.svg"], kinds["b.txt.gz"]) == ("image/svg+xml", "application/gzip")
        assert await read(client, "workspace:///a.svg") == "<svg/>"  # as text if it is UTF-8

    run(tmp_path, scenario)


def test_who_names_a_file_of_a_template_reaches_no_hidden_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".env": "secret",
            ".tidings/state.db": "secret",
            "docs/a.txt": "open",
            "resources/any.meta.json": '{"uriTemplate": "file:///{+path}", "name": "any"}',
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert await read(client, "file:///docs/a.txt") == "open"
        for path in (".env", ".tidings/state.db", "x" * 300):
            with pytest.raises(MCPError, match="Unknown resource"):
                await client.read_resource(f"file:///{path}")

    run(tmp_path, scenario)


def test_settings_that_lead_out_of_the_workspace_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "outside.toml").write_text('name = "outside"')
    root = tmp_path / "root"
    root.mkdir()
    (root / "tidings.toml").symlink_to(tmp_path / "outside.toml")
    assert asyncio.run(_name_of(root)) == "root"


async def _name_of(root: Path) -> str:
    return Workspace(root).server.name


@pytest.mark.parametrize("name", ["😀 all", "a\x7fb", "q\"u'o", "-dash", "ünï"])
def test_a_new_workspace_is_valid_whatever_its_name(tmp_path: Path, name: str) -> None:
    assert tidings("new", tmp_path / name).status == 0
    workspace = Workspace(tmp_path / name)
    assert (workspace.problems, workspace.settings.name) == ((), name)
