"""Problems are reported with file, line and reason, and affect no other file. Covers `checks.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.workspaces import call, get_problems, list_names, script, serve, write
from tidings.core.model import Feature
from tidings.live import Live
from tidings.workspace.problems import ERRORS
from tidings.workspace.source import Workspace

NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("tools/a.meta.json", '{\n "name": "a",\n "x": }', "3: not a JSON object"),
        ("tools/a.meta.json", '{\n\n"timeout": "x"}', "3: timeout is 'x'"),
        ("tools/a.meta.json", '{\n"inputSchema": {"type": "strin"}}', "2: inputSchema is not a JSON schema"),
        ("tools/a.meta.json", '{\n"inputSchema": {"type": "string"}}', "2: inputSchema has the type 'string'"),
        ("tools/a.meta.json", '{\n"title": 7}', "2: title: "),
        ("tools/a.meta.json", '{\n"env": 7}', "2: env is 7"),
        ("tools/a.meta.json", '{"x":' + NESTED, "1: not a JSON object: it is nested"),
        ("tools/b.meta.json", '{\n"annotations": 7}', "2: annotations: "),
        ("tools/b.meta.json", '{\n"name": 7}', "2: name is 7; it must be a string"),
        ("resources/a.meta.json", '{\n"annotations": 5}', "2: annotations: "),
        ("resources/t.meta.json", '{"uriTemplate": "t://{x}",\n"title": 5}', "2: title: "),
        ("prompts/a.md", "---\nname: x\ntitle: 5\n---\nhi", "3: title: "),
        ("prompts/a.md", "---\nname: x\ntitle: a\x07b\n---\nhi", "3: front matter is not YAML"),
        ("prompts/a.md", "---\ndescription: [\n---\nx", "3: front matter is not YAML"),
        ("prompts/a.md", "---\nname: x\nrole: system\n---\nhi", "3: role is 'system'"),
        ("prompts/a.md", "---\ntitle: a\nhi {x}", "1: front matter has no end"),
        ("prompts/a.md", "---\ntitle: 2024-13-77\n---\nhi", "2: front matter can't be read"),
        ("prompts/a.md", "---\narguments: 3\n---\nx", "2: arguments is 3; it must be a list"),
        ("prompts/a.md", "---\narguments: {required: 5}\n---\nhi", "2: arguments must be a list, or"),
        ("prompts/a.md", "---\narguments: [b, b]\n---\nhi", "2: argument 'b' is declared twice"),
        ("server.d/register.json", "{\n\n garbage", "3: not a JSON object"),
        ("server.d/register.sh", "#!/bin/sh\necho garbage\n", " the output is not a JSON object"),
        ("server.d/server.meta.json", '{\n"name": "\udcff"}', "2: not UTF-8"),
        ("tidings.toml", "name = [", "1: not TOML"),
        ("tidings.toml", "a=" + NESTED, " not TOML: it is nested"),
        ("tidings.toml", "\nnom = 'x'", "2: nom is not a setting"),
        ("tidings.toml", "name = 1", "1: name is 1; it must be a string"),
        ("tidings.toml", "[policy]\nquiet_gap = -1", "2: [policy] quiet_gap is -1"),
        (
            "tidings.toml",
            "[register]\ntimeout=1\n[tools]\ntimeout='x'",
            "4: [tools] timeout is 'x'; it must be a number",
        ),
        ("tidings.toml", "tools = 5", "1: tools is 5; it must be a section, [tools]"),
        ("tidings.toml", "[tools]\nenv = [1]", "2: [tools] env is [1]; it must be a list of strings"),
        ("tidings.toml", "[tol]", "1: [tol] is not a section; did you mean [tools]?"),
        ("events/e.meta.json", "", " the file is empty"),
        ("tools/d.sh", "echo\n", " is not executable and has no first line like #!/bin/sh, so it is not a tool"),
        ("tools/deploy", "echo\n", " is not executable and has no first line like #!/bin/sh, so it is not a tool"),
        ("tools/d/main.py", "", " is not a tool: in a folder, only tool.* is one"),
        ("tools/d/main.zsh", "echo\n", " is not a tool: in a folder, only tool.* is one"),
        ("server.d/register.py", "#!/bin/sh", " is not executable, so it does not run; make it executable"),
        ("tools/b.py", "raise ValueError('a\\nb')", "1: ValueError: a b"),
        ("tools/e\nvil.py", "x =", "1: invalid syntax"),
    ],
)
def test_invalid_file_is_reported_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, text: str, problem: str
) -> None:
    write(
        tmp_path, {"tools/a.sh": script("A"), "tools/b.py": "def b() -> int:\n    return 1\n", "resources/a.txt": "a"}
    )
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o755 if path.name == "register.sh" else 0o644)
    [found] = get_problems(tmp_path)
    assert found.startswith(f"{file}:{problem}".replace("\n", " "))
    assert found in caplog.text


def test_a_script_that_is_not_executable_is_reported_and_not_served(tmp_path: Path) -> None:
    write(tmp_path, {"tools/a.sh": script("A"), "tools/_lib.sh": "echo"})
    path = tmp_path / "tools" / "a.sh"
    workspace = Workspace(tmp_path)
    assert (list_names(workspace), workspace.problems) == (["a"], ())
    path.chmod(0o644)
    workspace.rescan()
    assert list_names(workspace) == []
    assert [str(problem) for problem in workspace.problems] == [
        "tools/a.sh: is not executable, so it is not a tool; make it executable with `chmod +x`"
    ]
    path.chmod(0o755)
    workspace.rescan()
    assert (list_names(workspace), workspace.problems) == (["a"], ())


def test_documents_and_data_are_not_reported(tmp_path: Path) -> None:
    write(tmp_path, {"tools/a.sh": script("A"), "tools/LICENSE": "MIT", "tools/data.csv": "1", "tools/d/_lib.sh": "A"})
    (tmp_path / "tools" / "library").write_bytes(b"\x00\x01")
    assert get_problems(tmp_path) == []


def test_a_folder_that_serves_nothing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workspace = Workspace(tmp_path)
    for _ in ("at the start", "when it becomes empty"):
        assert "this folder serves nothing yet; add a file to tools/" in caplog.text
        caplog.clear()
        write(tmp_path, {"prompts/a.md": "A"})
        workspace.rescan()
        assert workspace.problems == ()
        (tmp_path / "prompts" / "a.md").unlink()
        workspace.rescan()


def test_a_folder_with_a_registration_script_is_not_logged_as_serving_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register = """#!/bin/sh
echo '{"resourceTemplates": [{"name": "t", "uriTemplate": "t://{x}", "path": "data"}]}'
"""
    write(tmp_path, {"server.d/register.sh": register, "data/a.txt": "a"})
    assert Workspace(tmp_path).problems == ()
    assert caplog.text == ""


def test_clients_are_told_whether_a_folder_with_events_only_serves_something(tmp_path: Path) -> None:
    write(tmp_path, {"tidings.toml": "[events]"})
    workspace = Workspace(tmp_path)
    contents = Live(workspace).catalog.resources
    revisions = [contents.content(ERRORS).revision]
    for files in ({"events/deploy.meta.json": "{}"}, {}):
        shutil.rmtree(tmp_path / "events", ignore_errors=True)
        write(tmp_path, files)
        workspace.rescan()
        assert bool(workspace.problems) is not bool(files)
        revisions.append(contents.content(ERRORS).revision)
    assert revisions == sorted(set(revisions))


def test_settings_linked_from_outside_are_reported_and_not_read(tmp_path: Path) -> None:
    root = tmp_path / "ws"
    settings = root / "tidings.toml"
    write(tmp_path, {"outside.toml": 'name = "outside"\n', "ws/prompts/a.md": "A"})
    workspace = Workspace(root)
    settings.symlink_to(tmp_path / "outside.toml")
    write(root, {"prompts/b.md": "B"})
    workspace.rescan([settings, root / "prompts" / "b.md"])
    for linked in (workspace, Workspace(root)):
        assert list_names(linked, Feature.PROMPTS) == ["a", "b"]
        [problem] = linked.problems
        assert str(problem).startswith("tidings.toml: is a link to a file outside the workspace")
        assert (linked.settings.name, linked.server.name) == ("ws", "ws")
    settings.unlink()
    write(root, {"tidings.toml": 'instructions = "Ask."\n'})
    workspace.rescan()
    assert (workspace.problems, workspace.settings.instructions) == ((), "Ask.")


@pytest.mark.anyio
async def test_duplicate_name_is_served_once_and_reported(tmp_path: Path) -> None:
    write(tmp_path, {f"tools/{name}.sh": f"#!/bin/sh\n# @name same\necho {name}\n" for name in ("a", "b")})
    async with serve(tmp_path) as (client, workspace):
        assert await call(client, "same") == "a"
        assert "tools/a defines it too" in str(workspace.problems[0])
        (tmp_path / "tools" / "a.sh").unlink()
        workspace.rescan()
        assert await call(client, "same") == "b"
        assert workspace.problems == ()


def test_other_items_are_listed_if_one_can_not_be_sent(tmp_path: Path) -> None:
    function = "def {}(x: int) -> int:\n    {}\n    return x\n"
    write(
        tmp_path,
        {
            "tools/large.py": function.format("large", f'"{"x" * (2 << 20)}"'),
            "tools/half.py": function.format("half", '"\\ud800"'),
            "tools/good.py": function.format("good", '"Good."'),
        },
    )
    workspace = Workspace(tmp_path)
    assert list_names(workspace) == ["good"]
    assert [problem.path for problem in workspace.problems] == ["tools/half.py", "tools/large.py"]
