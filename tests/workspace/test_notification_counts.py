"""Notifications counted by clients.

A new legacy session gets one notification per list, then one for each real change, and none otherwise.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx2
import pytest
from mcp.client.stdio import StdioServerParameters

from tests.support.command import DEADLINE, TIDINGS, replace_file
from tests.support.forking import forked_command
from tests.support.sdk_clients import MODERN, MUTED, RecordingClient, open_client
from tests.support.wire_clients import read_answer
from tests.support.workspaces import MARKER, PROMPTS, RESOURCES, TOOLS, UPDATED, script, serve_http, write
from tidings.live import Live
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

LISTS = [PROMPTS, RESOURCES, TOOLS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"resources/marker.txt": "0", "tools/test_tool.sh": script("A tool")})
    for name in ("prompts", "server.d"):
        (tmp_path / name).mkdir()
    return tmp_path


def add_tool(root: Path, name: str) -> None:
    write(root, {f".{name}": script("A tool")})
    (root / f".{name}").replace(root / "tools" / f"{name}.sh")


def open_session(folder: Path, version: str = "2025-11-25") -> AbstractAsyncContextManager[RecordingClient]:
    """Connect a client over standard input and output."""
    command, *arguments = forked_command(TIDINGS, "serve", folder, "--stdio")
    return open_client(StdioServerParameters(command=command, args=arguments), version)


def get_methods(client: RecordingClient) -> list[str]:
    return [received.method for received in client.received]


async def wait_for_count(client: RecordingClient, count: int) -> None:
    await client.until(lambda: len(client.received) >= count, f"notification {count}")


async def list_all(client: RecordingClient) -> None:
    for feature in ("tools", "prompts", "resources") * 5:
        await client.request(f"{feature}/list")


async def settle(client: RecordingClient, folder: Path) -> list[str]:
    """Return the notifications until now. That of a marker file comes after all of them."""
    await client.subscribe(MARKER)
    replace_file(folder / "resources" / "marker.txt", "1")
    await client.until(lambda: UPDATED in get_methods(client), "the marker")
    *methods, marker = get_methods(client)
    assert marker == UPDATED
    return methods


async def test_new_session_gets_one_notification_per_list(folder: Path) -> None:
    for _ in range(2):  # the second session gets them again
        async with open_session(folder) as client:
            await client.request("tools/list")
            await client.request("tools/list")
            await wait_for_count(client, 3)
            await list_all(client)
            assert sorted(await settle(client, folder)) == LISTS
        replace_file(folder / "resources" / "marker.txt", "0")


async def test_damaged_state_file_costs_one_notification_per_list(folder: Path) -> None:
    async with open_session(folder) as client:
        await wait_for_count(client, 3)
    state = folder / ".tidings" / "state.db"
    state.write_bytes(b"damaged" * 1_000)
    async with open_session(folder) as client:
        await wait_for_count(client, 3)
        add_tool(folder, "another")
        assert sorted(await settle(client, folder)) == sorted([*LISTS, TOOLS])


async def test_protocol_2025_03_26_gets_no_list_changed(folder: Path) -> None:
    async with open_session(folder, MUTED) as client:
        add_tool(folder, "another")
        while len((await client.request("tools/list"))["tools"]) < 2:
            pass
        assert await settle(client, folder) == []


async def test_real_change_is_one_notification(folder: Path) -> None:
    async with open_session(folder, "2025-06-18") as client:
        await wait_for_count(client, 3)
        add_tool(folder, "another")
        await wait_for_count(client, 4)
        (folder / "tools" / "another.sh").touch()
        await list_all(client)
        assert (await settle(client, folder))[3:] == [TOOLS]


async def test_changing_registration_is_one_notification_per_run(folder: Path) -> None:
    write(
        folder,
        {
            "server.d/register.sh": "#!/bin/sh\n"
            'echo run >> "$TIDINGS_WORKSPACE/runs"\n'
            'number=$(wc -l < "$TIDINGS_WORKSPACE/runs" | tr -d " ")\n'
            'echo "{\\"tools\\": [{\\"name\\": \\"n$number\\", \\"path\\": \\"test_tool.sh\\"}]}"\n',
            "tidings.toml": "[register]\nttl = 0.3\n",
        },
    )

    def count_runs() -> int:
        return len((folder / "runs").read_text().splitlines())

    async with open_session(folder) as client:
        await wait_for_count(client, 6)
        assert get_methods(client).count(TOOLS) >= 4
        start, before = time.monotonic(), count_runs()
        await list_all(client)
        # Requests don't run the script.
        assert count_runs() - before <= (time.monotonic() - start) / 0.3 + 1
        assert get_methods(client).count(TOOLS) <= count_runs()


async def test_unsubscribe_by_uri_returns_an_empty_result(folder: Path) -> None:
    async with open_session(folder) as client:
        await wait_for_count(client, 3)
        uri = "workspace:///notes.txt"
        assert await client.request("resources/subscribe", uri=uri) == {}
        assert await client.request("resources/unsubscribe", uri=uri) == {}
        (folder / "resources" / "notes.txt").write_text("x")
        await wait_for_count(client, 4)
        assert (await settle(client, folder))[3:] == [RESOURCES]


async def test_without_announce_only_changes_are_sent(folder: Path) -> None:
    write(folder, {"tidings.toml": "[policy]\nannounce = false\n"})
    async with open_session(folder) as client:
        await list_all(client)
        add_tool(folder, "another")
        await wait_for_count(client, 1)
        assert await settle(client, folder) == [TOOLS]


async def test_counts_are_the_same_over_http_for_each_client(folder: Path) -> None:
    workspace = Workspace(folder)
    async with (
        serve_http(Live(workspace, policy=workspace.settings.policy)) as url,
        open_client(url, "2025-06-18") as one,
        open_client(url, "2025-11-25") as two,
        open_client(url, MUTED) as muted,
        open_client(url, MODERN) as modern,
    ):
        for client in (one, two):
            await wait_for_count(client, 3)
            await list_all(client)
        add_tool(folder, "another")
        for client in (one, two):
            await wait_for_count(client, 4)
        for _ in range(2):  # a stream that returns and missed nothing gets nothing
            async with modern.listen():
                await list_all(modern)
        async with modern.listen():
            (folder / "prompts" / "last.md").write_text("The end")
            for client, expected in (
                (one, [*LISTS, TOOLS, PROMPTS]),
                (two, [*LISTS, TOOLS, PROMPTS]),
                (modern, [PROMPTS]),
            ):
                await wait_for_count(client, len(expected))
                methods = get_methods(client)
                assert sorted(methods[:3]) + methods[3:] == expected
            [prompt] = (await muted.request("prompts/list"))["prompts"]
            assert (prompt["name"], muted.received) == ("last", [])


async def test_handshake_over_http_may_leave_out_everything(folder: Path) -> None:
    headers = {"Accept": "application/json, text/event-stream"}
    async with serve_http(Live(Workspace(folder))) as url, httpx2.AsyncClient() as client:
        for params, version in (({}, "2025-11-25"), ({"protocolVersion": MUTED}, MUTED)):
            request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
            response = await client.post(url, json=request, headers=headers)
            assert read_answer(response.text)["result"]["protocolVersion"] == version
        response = await client.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "initialize"}, headers=headers)
        assert "initialize has no params" in read_answer(response.text)["error"]["message"]


# The tests of the document that describes the fault, word for word. Only its temporary folder is another one.

FRESH_SESSION = """
rm -rf /tmp/mcp-test && mkdir -p /tmp/mcp-test/{tools,resources,prompts,server.d}
MCPBASH_PROJECT_ROOT=/tmp/mcp-test ./bin/mcp-bash << 'EOF' | grep -c "list_changed"
{"jsonrpc":"2.0","id":"init","method":"initialize","params":{}}
{"jsonrpc":"2.0","method":"notifications/initialized"}
{"jsonrpc":"2.0","id":"l1","method":"tools/list"}
{"jsonrpc":"2.0","id":"l2","method":"tools/list"}
EOF
"""

SETUP = """
    local test_dir
    test_dir="$(mktemp -d)"
    mkdir -p "${test_dir}/tools"
    cat > "${test_dir}/tools/test_tool.sh" << 'TOOL'
#!/usr/bin/env bash
# @describe A test tool
echo "ok"
TOOL
    chmod +x "${test_dir}/tools/test_tool.sh"
"""

FAST_SEQUENCE = """
    # The exact repro from the bug report
    # Set up a workspace with at least one tool to ensure registries exist
    local count
    count=$(MCPBASH_PROJECT_ROOT="${test_dir}" ./bin/mcp-bash << 'EOF' 2>/dev/null | grep -c "list_changed"
{"jsonrpc":"2.0","id":"init","method":"initialize","params":{}}
{"jsonrpc":"2.0","method":"notifications/initialized"}
{"jsonrpc":"2.0","id":"l1","method":"tools/list"}
{"jsonrpc":"2.0","id":"l2","method":"tools/list"}
EOF
    )

    rm -rf "${test_dir}"

    # With registries present, expect exactly 3 notifications (one triplet)
    # NOT 0 (that would mean notifications are broken)
    # NOT >3 (that would mean spurious notifications)
    assert_eq 3 "${count}" "Fast sequence should produce exactly one triplet of notifications"
"""

OLD_PROTOCOL = """
    # Set up workspace with tools to ensure notifications WOULD fire on newer protocol
    local count
    count=$(MCPBASH_PROJECT_ROOT="${test_dir}" ./bin/mcp-bash << 'EOF' 2>/dev/null | grep -c "list_changed"
{"jsonrpc":"2.0","id":"init","method":"initialize","params":{"protocolVersion":"2025-03-26"}}
{"jsonrpc":"2.0","method":"notifications/initialized"}
{"jsonrpc":"2.0","id":"l1","method":"tools/list"}
EOF
    )

    rm -rf "${test_dir}"

    assert_eq 0 "${count}" "Protocol 2025-03-26 should suppress list_changed notifications"
"""


@pytest.mark.parametrize(
    ("script", "count"),
    [
        pytest.param(FRESH_SESSION, "3", id="fresh session"),
        pytest.param(f"fast() {{\n{SETUP}{FAST_SEQUENCE}}}\nfast", "3", id="fast sequence"),
        pytest.param(f"old() {{\n{SETUP}{OLD_PROTOCOL}}}\nold", "0", id="old protocol"),
    ],
)
def test_script_of_the_source_document_counts_as_it_expects(tmp_path: Path, script: str, count: str) -> None:
    command = f'exec {shlex.join(forked_command(TIDINGS))} serve "$MCPBASH_PROJECT_ROOT" --stdio'
    write(tmp_path, {"bin/mcp-bash": f"#!/bin/sh\n{command}\n"})
    script = script.replace("/tmp/mcp-test", str(tmp_path / "mcp-test"))
    script = f'assert_eq() {{ echo "$2"; [ "$1" = "$2" ] || echo "$3"; }}\n{script}'
    run = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=False
    )  # grep fails if it finds nothing
    assert run.stdout == f"{count}\n"
