from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.command import EXAMPLE, tidings
from tests.support.workspaces import write


def test_example_is_valid() -> None:
    assert tidings("validate", EXAMPLE).status == 0


def test_control_characters_in_names_and_problems_are_escaped(tmp_path: Path) -> None:
    write(tmp_path, {"tools/\x1b[2J.py": "def (", "tidings.toml": 'name = "\\u001b[2J"\n"\\u001b[1m" = 1\n'})
    found = tidings("validate", tmp_path)
    assert found.status == 1
    assert r"\x1b[2J.py" in found.stdout
    assert "\x1b" not in found.stdout
    assert "2 problems" in found.stdout  # though two checks find the wrong setting


def test_validate_prints_file_and_line_of_each_problem(board: Path) -> None:
    (board / "tools" / "broken.py").write_text("def fine() -> str:\n    return ''\n\ndef broken(:\n")
    (board / "tools" / "other.py").write_text("def add_task(title: str) -> str:\n    return title\n")
    (board / "tools" / "plain.sh").write_text("#!/bin/sh\necho\n")
    (board / "prompts" / "bad.md").write_text("---\ndescription: [\n---\n")
    (board / "tidings.toml").write_text('name = "board"\nnmae = 1\n')

    as_text = tidings("validate", board)
    as_json = tidings("validate", board, "--json")

    assert as_text.status == as_json.status == 1
    lines = as_text.stdout.splitlines()
    for place in ("tools/broken.py:4:", "tools/other:1:", "tools/plain.sh:1:", "tidings.toml:2:"):
        assert any(line.startswith(f"{board}/{place} ") for line in lines), (place, lines)
    assert any(re.match(rf"{board}/prompts/bad.md:\d: ", line) for line in lines)
    assert "5 problems" in lines[-1]
    assert "\x1b" not in as_text.stdout
    problems = json.loads(as_json.stdout)["problems"]
    assert len(problems) == 5
    assert ("tools/broken.py", 4) in {(problem["path"], problem["line"]) for problem in problems}


def list_problems(root: Path) -> list[str]:
    problems = json.loads(tidings("validate", root, "--json").stdout)["problems"]
    return [f"{problem['path']}:{problem['line']}: {problem['message']}" for problem in problems]


def test_validate_finds_scripts_that_would_not_start(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/good.sh": "#!/usr/bin/env -S sh -e\necho\n",
            "tools/absent.sh": "#!/usr/bin/env no-such-interpreter\n",
            "tools/gone.rb": "#!/no/such/ruby\n",
            "tools/windows/tool.sh": "#!/bin/sh\necho\n",
            "tools/later.sh": "#!/bin/sh\necho\necho\n",
            "tools/empty.sh": "#!\necho\n",
            "tools/plain.sh": "echo\n",
            "tools/windows/lib/common.sh": "echo\n",  # for the tool's own use
            "tools/windows/lib/page.js": "#!/bin/sh\n",
            "tools/marked.sh": "",
            "tools/crlf.py": "#!/usr/bin/env python3\n",
        },
    )
    (tmp_path / "tools/marked.sh").write_bytes(b"\xef\xbb\xbf#!/bin/sh\necho\n")
    (tmp_path / "tools/marked.sh").chmod(0o755)
    (tmp_path / "tools/crlf.py").write_bytes(b"#!/usr/bin/env python3\r\n")
    for name in ("plain.sh", "windows/lib/common.sh"):
        (tmp_path / "tools" / name).chmod(0o755)
    (tmp_path / "tools/windows/lib/page.js").chmod(0o644)
    (tmp_path / "tools/windows/tool.sh").write_bytes(b"#!/bin/sh\r\necho\r\n")
    (tmp_path / "tools/later.sh").write_bytes(b"#!/bin/sh\necho\r\n")

    crlf = "has Windows line ends (CRLF), with which a script does not run; save it with LF"
    assert list_problems(tmp_path) == [
        "tools/absent.sh:1: its interpreter 'no-such-interpreter' does not exist on this machine",
        f"tools/crlf.py:1: {crlf}",
        "tools/empty.sh:1: its first line names no interpreter; write for example #!/usr/bin/env bash",
        "tools/gone.rb:1: its interpreter '/no/such/ruby' does not exist on this machine",
        f"tools/later.sh:2: {crlf}",
        "tools/marked.sh:1: starts with a byte order mark (BOM), and can't be started; save it without BOM",
        "tools/plain.sh:1: has no first line like #!/bin/sh, so it can't be started",
        f"tools/windows/tool.sh:1: {crlf}",
    ]


def test_validate_finds_every_fault_of_a_file(tmp_path: Path) -> None:
    meta = '{\n"descripton": "x",\n"title": 3,\n"timeout": "soon",\n'
    meta += '"inputSchema": {"type": "objekt"},\n"zzz": 1,\n"_note": 1\n}'
    write(
        tmp_path,
        {
            "tools/a.sh": "#!/bin/sh\n",
            "tools/a.meta.json": meta,
            "resources/b.txt": "text",
            "resources/b.meta.json": '{"mimetype": "text/plain",\n"annotations": []}',
            "tidings.toml": 'nmae = "x"\nversion = 1\n[tools]\ntimout = 3\nenv = "A"\nttl = 1\ntitle = "x"\n'
            "[evnts]\n[polic]\nx = 1\n[policy]\nquietgap = 1\n[events]\nx = 1\n",
            "Tools/c.py": "",
            "resource/c.txt": "",
        },
    )

    found = "\n".join(list_problems(tmp_path))

    for place, text in {
        "resources/b.meta.json:1": "mimetype is not a known key, and has no effect; did you mean mimeType?",
        "resources/b.meta.json:2": "annotations is []; it must be an object",
        "tidings.toml:1": "nmae is not a setting; did you mean name?",
        "tidings.toml:2": "version is 1; it must be a string",
        "tidings.toml:4": "[tools] timout is not a setting; did you mean timeout?",
        "tidings.toml:5": "[tools] env is 'A'; it must be a list of strings",
        "tidings.toml:6": "[tools] ttl is not a setting; it belongs in [register]",
        "tidings.toml:7": "[tools] title is not a setting; it belongs above the first section",
        "tidings.toml:8": "[evnts] is not a section; did you mean [events]?",
        "tidings.toml:9": "[polic] is not a section; did you mean [policy]?",
        "tidings.toml:12": "[policy] quietgap is not a setting; did you mean quiet_gap?",
        "tidings.toml:14": "[events] x is not a setting; this section has none",
        "Tools:None": "is not read; did you mean tools?",
        "resource:None": "is not read; did you mean resources?",
        "tools/a.meta.json:2": "descripton is not a known key, and has no effect; did you mean description?",
        "tools/a.meta.json:3": "title is 3; it must be a string",
        "tools/a.meta.json:4": "timeout is 'soon'; it must be a number",
        "tools/a.meta.json:5": "inputSchema is not a JSON schema: ",
        "tools/a.meta.json:6": "zzz is not a known key, and has no effect; use one of ",
    }.items():
        assert f"{place}: {text}" in found
    assert len(found.splitlines()) == 19


def test_validate_finds_links_that_lead_outside(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(tmp_path, {"outside.txt": "secret", "folder/x.txt": "x", "project/resources/in.txt": "in"})
    (root / "resources/out.txt").symlink_to(tmp_path / "outside.txt")
    (root / "resources/far").symlink_to(tmp_path / "folder")
    (root / "resources/near.txt").symlink_to("in.txt")
    (root / "resources/gone.txt").symlink_to("absent.txt")
    (tmp_path / "folder/link").symlink_to("x.txt")
    (root / "prompts").symlink_to(tmp_path / "folder")
    (root / "tidings.toml").symlink_to("absent.toml")

    assert list_problems(root) == [
        "prompts:None: is a link out of the workspace, and not served; replace it by a copy",
        "resources/far:None: is a link out of the workspace, and not served; replace it by a copy",
        "resources/gone.txt:None: is a link to a file that does not exist; it is not served",
        "resources/out.txt:None: is a link out of the workspace, and not served; replace it by a copy",
        "tidings.toml:None: is a link to a file that does not exist; it is not served",
    ]


def test_validate_names_what_is_not_supported_of_mcp_bash(tmp_path: Path) -> None:
    registration = {
        "version": 1,
        "completions": [{"name": "c", "path": "completions/c.sh"}],
        "resources": [{"uri": "echo://hi", "path": "a.txt", "provider": "echo"}],
        "resourceTemplates": [{"name": "repo", "uriTemplate": "git+https://{repo}/{+path}"}],
    }
    write(
        tmp_path,
        {
            "a.txt": "placeholder",
            "server.d/register.json": json.dumps(registration, indent=1),
            "server.d/policy.sh": "mcp_tools_policy_check() { return 0; }\n",
            "completions/c.sh": "#!/bin/sh\n",
            "providers/echo.sh": "#!/bin/sh\n",
            "tools/t/tool.sh": "#!/bin/sh\n",
            "tools/other/other.sh": "#!/bin/sh\n",
            "tools/other/other.meta.json": "{}",
            "tools/t/tool.meta.json": '{"icons": [{"src": "./icon.svg"}, {"src": "https://example.com/i.png"}]}',
            "ui/board/ui.meta.json": '{"template": "form", "config": {}}',
        },
    )

    found = "\n".join(list_problems(tmp_path))

    for place, text in {
        "completions:None": "completions are not supported",
        "providers:None": "providers other than 'file' are not supported",
        "server.d/policy.sh:None": "policy.sh is not supported",
        "server.d/register.json:3": "completions are not supported",
        "server.d/register.json:13": "resources, item 1: provider 'echo' is not supported",
        "server.d/register.json:19": "resourceTemplates, item 1: git+https URIs can't be read",
        "tools/other/other.meta.json:None": "describes no tool: in a folder, only tool.* is one",
        "tools/other/other.sh:None": "is not a tool: in a folder, only tool.* is one",
        "tools/t/tool.meta.json:1": "the icon './icon.svg' is a local file",
        "ui/board/ui.meta.json:1": "pages from a template are not supported",
    }.items():
        assert f"{place}: {text}" in found
    assert len(found.splitlines()) == 10

    (tmp_path / "server.d/register.json").unlink()
    (tmp_path / "server.d/register.sh").write_text("#!/usr/bin/env bash\nmcp_completion_register_manual '{}'\n")
    assert "server.d/register.sh:2: completions are not supported" in "\n".join(list_problems(tmp_path))
