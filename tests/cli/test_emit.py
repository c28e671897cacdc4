"""`tidings emit`, events of a workspace, and their subscriptions in `tidings subscriptions`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.command import DEADLINE, Served, line_with, run_command, serving, start_command, tidings
from tests.support.events import EventClient, event_receiver

pytestmark = pytest.mark.anyio

NAME = "deploy.finished"
SETTINGS = """
[events]
[policy]
webhooks = "anyone"
webhook_private = true
webhook_attempts = 1
"""
META: dict[str, Any] = {
    "description": "A deployment has finished.",
    "inputSchema": {"type": "object", "properties": {"site": {"type": "string"}}, "additionalProperties": False},
    "payloadSchema": {"type": "object", "properties": {"site": {"type": "string"}}, "required": ["site"]},
}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "board"
    (folder / "events").mkdir(parents=True)
    (folder / "tidings.toml").write_text(SETTINGS)
    (folder / "events" / f"{NAME}.meta.json").write_text(json.dumps(META))
    return folder


def client_of(server: Served, http: httpx2.AsyncClient) -> EventClient:
    return EventClient(server.url, http)


async def test_event_of_a_workspace_is_emitted_and_its_subscription_is_listed_and_revived(workspace: Path) -> None:
    async with (
        event_receiver() as receiver,
        serving(workspace) as server,
        httpx2.AsyncClient(timeout=DEADLINE, verify=False) as http,
    ):
        client = client_of(server, http)
        found = {each["name"]: each for each in (await client.request("events/list"))["events"]}
        assert (found[NAME]["inputSchema"], found[NAME]["description"]) == (META["inputSchema"], META["description"])
        key = (await client.subscribe(receiver, NAME, {"site": "a"}))["id"]

        other = await run_command("emit", workspace, NAME, '{"site": "b"}')
        emitted = await run_command("emit", workspace, NAME, '{"site": "a"}', "--json")
        assert (other.status, emitted.status) == (0, 0), (other.stderr, emitted.stderr)
        event = await receiver.next_event()
        assert (event["eventId"], event["data"]) == (emitted.json_lines()[0]["eventId"], {"site": "a"})

        receiver.answers(500)
        named = ["--matching", '{"site": "a"}', "--id", "upstream-7"]
        assert (await run_command("emit", workspace, NAME, '{"site": "*"}', *named)).stdout == "upstream-7\n"
        assert (await receiver.next_event())["eventId"] == "upstream-7"
        while (listed := (await run_command("subscriptions", workspace)).stdout) and "suspended" not in listed:
            pass
        assert f"{key}  {NAME}(site=a)  suspended  {receiver.url}" in listed
        assert "http_5xx" in listed
        receiver.answers(200)
        assert (await run_command("subscriptions", workspace, "revive", key)).status == 0
        assert (await receiver.next_event())["eventId"] == "upstream-7"
        as_json = (await run_command("subscriptions", workspace, "--json")).stdout
        assert json.loads(as_json)["event"]["name"] == NAME
        assert receiver.secret not in as_json
        assert (await run_command("subscriptions", workspace, "remove", key)).status == 0
        assert not (await run_command("subscriptions", workspace)).stdout

        while (events := (await run_command("history", workspace, "--events", "--json")).json_lines()) and (
            len(events) < 3 or events[-1]["waiting"]
        ):
            pass
        assert [each["data"]["site"] for each in events] == ["b", "a", "*"]
        last = (await run_command("history", workspace, "--events", "--limit", 1)).stdout
        assert last.endswith(f'{NAME}  upstream-7  {{"site":"*"}}\n')
        assert last.count("\n") == 1

        (await run_command("emit", workspace, NAME, "{}")).check_error("'site' is a required property", status=2)
        (await run_command("emit", workspace, "other", "{}")).check_error("there is no event type 'other'", status=2)
        await server.stop()
    (await run_command("emit", workspace, NAME, '{"site": "a"}')).check_error("no server runs with", status=1)


async def test_edited_event_type_is_served_without_a_restart(workspace: Path) -> None:
    async with serving(workspace) as server, httpx2.AsyncClient(timeout=DEADLINE, verify=False) as http:
        client = client_of(server, http)

        async def names() -> set[str]:
            return {each["name"] for each in (await client.request("events/list"))["events"]}

        (workspace / "events" / "build.failed.meta.json").write_text("{}")
        while "build.failed" not in await names():
            pass
        (workspace / "events" / f"{NAME}.meta.json").unlink()
        while NAME in await names():
            pass
        assert "build.failed" in await names()
        await server.stop()


def test_mistakes_in_event_files_are_problems(workspace: Path) -> None:
    (workspace / "events" / "two words.meta.json").write_text("{}")
    (workspace / "events" / "list.meta.json").write_text('{"inputSchema": {"type": "array"}}')
    (workspace / "events" / "typo.meta.json").write_text('{"inputschema": {}}')
    (workspace / "events" / "number.meta.json").write_text('{\n"description": 5}')
    printed = tidings("validate", workspace).stdout
    assert "'two words' is not the name of an event" in printed
    assert "list.meta.json:1: the arguments of the event 'list' must be an object" in printed
    assert "inputschema" in printed
    assert printed.count("number.meta.json") == printed.count("number.meta.json:2: description is 5") == 1
    (workspace / "tidings.toml").write_text("")
    assert "add the section [events] to tidings.toml" in tidings("validate", workspace).stdout


def test_data_must_be_an_object(workspace: Path) -> None:
    tidings("emit", workspace, NAME, "[1]").check_error("JSON must be a JSON object")
    tidings("emit", workspace, NAME, "-", stdin="nonsense").check_error("JSON must be a JSON object")
    tidings("emit", workspace, NAME, "{}", "--matching", "1").check_error("--matching must be a JSON object")


async def test_several_workers_have_no_events(workspace: Path) -> None:
    async with start_command("serve", workspace, "--port", 0, "--nats", "nats://127.0.0.1:1") as process:
        assert "[events] in tidings.toml needs one process" in await line_with(process.stderr, "tidings:")
        assert await process.wait() == 2
