"""stdio where the process is ours: the bytes of real processes, in both eras and on whatever a process may be given."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.faults.wire import Watch
from tests.support.sdk_clients import BOARD, DEADLINE, ENVIRONMENT, LEGACY, MODERN, listening, open_ear, stdio_server
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY

LONG = 3600.0
SOON = 60.0
"""Seconds for the end of a process, however busy the machine is: met only by one that does not end."""
METHODS = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
VERSIONS = (*LEGACY, MODERN)


class Pipe:
    """A client by hand: it sees every line, and reads only when it is told to."""

    def __init__(self, process: subprocess.Popen[bytes], version: str) -> None:
        self.process = process
        self.version = version
        self.told: list[dict[str, Any]] = []
        """The notifications that came so far."""
        self._ids = 0
        self._rest = b""

    def send(self, method: str, request_id: str | int | None = None, **params: Any) -> str | int:
        if request_id is None:
            self._ids += 1
            request_id = self._ids
        self.write(message(self.version, method, request_id, **params))
        return request_id

    def write(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)

    def stop(self, stream: IO[bytes] | None) -> None:
        """Close one end for good."""
        assert stream is not None
        stream.close()

    def change(self, what: str, **args: Any) -> str | int:
        return self.send("tools/call", name="change", arguments={"what": what, "args": args})

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE)
            assert ready, f"nothing came; {len(self.told)} notifications did"
            found = os.read(self.process.stdout.fileno(), 1 << 20)
            assert found, "the server is gone"
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        read: dict[str, Any] = json.loads(line)
        if "id" not in read:
            self.told.append(read)
        return read

    def answer(self, request_id: str | int) -> dict[str, Any]:
        while (read := self.line()).get("id") != request_id:
            assert "id" not in read, read
        return read

    def ask(self, method: str, request_id: str | int | None = None, **params: Any) -> dict[str, Any]:
        answer = self.answer(self.send(method, request_id, **params))
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def do(self, what: str, **args: Any) -> Any:
        answer = self.answer(self.change(what, **args))
        return json.loads(answer["result"]["content"][0]["text"]).get("result")

    def greet(self) -> None:
        if self.version != MODERN:
            client = {"name": "pipe", "version": "1"}
            self.ask("initialize", protocolVersion=self.version, capabilities={}, clientInfo=client)
            self.write(message(self.version, "notifications/initialized", None))

    def watch(self, uri: str) -> None:
        """The list of tools, and a content."""
        if self.version == MODERN:
            wanted = {"toolsListChanged": True, "resourceSubscriptions": [uri]}
            self.send("subscriptions/listen", "ear", notifications=wanted)
            assert self.line()["method"] == "notifications/subscriptions/acknowledged"
            self.told.clear()
        else:
            self.ask("resources/subscribe", uri=uri)

    @property
    def memory(self) -> int:
        """Bytes of the server's memory that are its own."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))

    def settle(self) -> None:
        """Wait until the server has nothing left to do: it used no time for a while."""
        last = -1
        for _ in range(200):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            now = int(fields[11]) + int(fields[12])
            if now == last:
                return
            last = now
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.3)
        raise AssertionError("the server never rests")


def message(version: str, method: str, request_id: str | int | None, **params: Any) -> bytes:
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if request_id is not None:
        message["id"] = request_id
    if version == MODERN:
        envelope = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientInfo": {"name": "pipe", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        params["_meta"] = envelope | params.get("_meta", {})
    if params:
        message["params"] = params
    return json.dumps(message).encode() + b"\n"


@contextmanager
def started(
    stdin: int | IO[bytes], stdout: int | IO[bytes], kind: str = "mcpserver", **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(BOARD), kind, "stdio", json.dumps(options)]
    with subprocess.Popen(command, stdin=stdin, stdout=stdout, bufsize=0, env=os.environ | ENVIRONMENT) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def piped(version: str, kind: str = "mcpserver", **options: Any) -> Iterator[Pipe]:
    with started(subprocess.PIPE, subprocess.PIPE, kind, **options) as process:
        pipe = Pipe(process, version)
        pipe.greet()
        yield pipe


def without_cursor(answer: dict[str, Any]) -> dict[str, Any]:
    result = dict(answer["result"])
    meta = {key: value for key, value in result.get("_meta", {}).items() if key != CURSOR_KEY}
    return {**answer, "result": {**result, "_meta": meta}}


# Lists


@pytest.mark.parametrize("version", VERSIONS)
def test_a_list_says_what_the_sdk_says_whoever_answers(version: str) -> None:
    """Byte for byte what the first one was, which is the SDK's; and, but for the cursor, what a server answers that
    leaves each list to the SDK."""
    methods = (*METHODS, *(["server/discover"] if version == MODERN else []))
    with (
        piped(version, policy={"list_memory": LONG}) as pipe,
        piped(version, policy={"list_memory": LONG}, middleware=True) as slow,
    ):
        for method in methods:
            first, second, third = [pipe.answer(pipe.send(method, number)) for number in (901, "zweitens", 903)]
            assert first == {**second, "id": 901} == {**third, "id": 901}
            assert list(first["result"]) == list(second["result"])
            assert without_cursor(first) == without_cursor(slow.answer(slow.send(method, 901)))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_list_is_answered_from_bytes_until_its_revision_changes(version: str) -> None:
    """An item that is changed in place, unnoticed, shows who answers: the bytes, or the SDK."""
    with piped(version, policy={"list_memory": LONG}) as pipe:
        first = pipe.ask("tools/list")
        pipe.do("quietly", key="steady")
        assert pipe.ask("tools/list", "other") == first
        # One with a cursor is the SDK's, and so is one that says anything else than the one it has answered.
        assert "Changed without a word." in str(pipe.ask("tools/list", cursor=""))
        assert "Changed without a word." in str(pipe.ask("tools/list", _meta={"progressToken": 5}))

        pipe.do("add", feature="tools", key="new")
        anew = pipe.ask("tools/list")
        assert "new" in [tool["name"] for tool in anew["tools"]]
        assert anew["_meta"][CURSOR_KEY] != first["_meta"][CURSOR_KEY]


@pytest.mark.parametrize(("kind", "options"), [("mcpserver", {"middleware": True}), ("lowlevel", {}), ("fastmcp", {})])
@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
def test_the_sdk_answers_where_middleware_or_each_caller_may_change_the_list(
    version: str, kind: str, options: dict[str, Any]
) -> None:
    with piped(version, kind, policy={"list_memory": LONG}, **options) as pipe:
        pipe.ask("tools/list")
        pipe.ask("tools/list")
        if kind == "lowlevel":
            item = {"name": "steady", "inputSchema": {"type": "object"}, "description": "Changed without a word."}
            pipe.do("own_set", feature="tools", key="steady", item=item)
        else:
            pipe.do("quietly", key="steady")
        assert "Changed without a word." in str(pipe.ask("tools/list"))


def test_what_nobody_noticed_shows_when_somebody_asks_after_a_while() -> None:
    with piped("2025-11-25", policy={"list_memory": 0.05}) as pipe:
        pipe.ask("tools/list")
        pipe.do("quietly", key="steady")
        while "Changed without a word." not in str(pipe.ask("tools/list")):
            pass
        while not pipe.told:
            pipe.line()
        assert pipe.told[0]["method"] == "notifications/tools/list_changed"


def test_an_answer_is_never_taken_for_that_of_a_list_with_the_same_id() -> None:
    with piped("2025-11-25", "lowlevel", policy={"list_memory": LONG}, shared_lists=True, only=["tools"]) as pipe:
        assert "error" in pipe.answer(pipe.send("prompts/list", "same"))
        assert "content" in pipe.ask("tools/call", "same", name="steady", arguments={})
        assert "error" in pipe.answer(pipe.send("prompts/list", "same"))


def test_a_second_handshake_forgets_what_was_answered_in_the_version_before() -> None:
    with piped("2024-11-05", policy={"list_memory": LONG}) as pipe:
        pipe.ask("tools/list")
        pipe.do("quietly", key="steady")
        assert "Changed without a word." not in str(pipe.ask("tools/list"))
        pipe.version = "2025-11-25"
        pipe.greet()
        assert "Changed without a word." in str(pipe.ask("tools/list"))


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
def test_no_list_is_older_than_a_notification_before_it(version: str) -> None:
    with piped(version) as pipe:
        pipe.watch("board://sprint")
        lists: set[str | int] = set()
        for number in range(60):
            pipe.change("add", feature="tools", key=f"t{number}")
            lists |= {pipe.send("tools/list") for _ in range(4)}
        told = 0
        while lists:
            message = pipe.line()
            if message.get("method") == "notifications/tools/list_changed":
                told = message["params"]["_meta"][CHANGE_KEY]["revision"]
            elif message.get("id") in lists:
                lists.discard(message["id"])
                assert message["result"]["_meta"][CURSOR_KEY]["topics"]["tools"]["revision"] >= told
        assert len((pipe.ask("tools/list"))["tools"]) == 62


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
def test_a_list_that_was_made_before_a_change_is_not_told_after_it(version: str) -> None:
    with piped(version, "lowlevel", shared_lists=True, late=True) as pipe:
        pipe.watch("board://sprint")
        pipe.send("tools/list", "early")
        item = {"name": "new", "inputSchema": {"type": "object"}}
        pipe.change("own_set_and_refresh", feature="tools", key="new", item=item)
        while (message := pipe.line()).get("id") != "early":
            pass
        assert pipe.told[0]["method"] == "notifications/tools/list_changed"
        assert [tool["name"] for tool in message["result"]["tools"]] == ["change", "new", "steady"]


# What a process may be given


INITIALIZE = message(
    "2025-11-25",
    "initialize",
    1,
    protocolVersion="2025-11-25",
    capabilities={},
    clientInfo={"name": "x", "version": "1"},
)


def test_files_serve_as_well(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(INITIALIZE)
    with (
        (tmp_path / "in").open("rb") as stdin,
        (tmp_path / "out").open("wb") as stdout,
        started(stdin, stdout) as board,
    ):
        assert board.wait(DEADLINE) == 0
    assert json.loads((tmp_path / "out").read_bytes())["result"]["serverInfo"]["name"] == "board"


def test_one_socket_serves_as_both_and_keeps_its_mode() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(DEADLINE)
        with started(theirs.fileno(), theirs.fileno()) as board:
            ours.sendall(INITIALIZE)
            lines = ours.makefile("rb")
            assert json.loads(lines.readline())["result"]["serverInfo"]["name"] == "board"
            assert not os.get_blocking(theirs.fileno())
            ours.shutdown(socket.SHUT_WR)
            assert board.wait(DEADLINE) == 0
        assert os.get_blocking(theirs.fileno())


@pytest.mark.parametrize("kind", ["mcpserver", "lowlevel", "fastmcp"])
def test_what_a_tool_prints_or_reads_is_not_the_clients(kind: str) -> None:
    with piped("2025-11-25", kind) as pipe:
        assert pipe.do("noise") == ""
        pipe.ask("tools/list")
        pipe.do("noise")


def test_what_is_printed_at_the_very_end_is_not_the_clients_either() -> None:
    with piped("2025-11-25") as pipe:
        pipe.do("mutter")
        pipe.stop(pipe.process.stdin)
        assert pipe.process.wait(DEADLINE) == 0
        assert pipe.process.stdout is not None
        assert pipe.process.stdout.read() == b""


def test_what_is_no_message_is_passed_over() -> None:
    with piped("2025-11-25") as pipe:
        bad = (
            b"",
            b"no JSON\n",
            b"[]\n",
            b'{"tools/list":1}\n',
            b"\xff\xfe\n",
            b'{"jsonrpc":"2.0","id":1.5,"method":"tools/list"}\n',
        )
        pipe.write(b"\n".join(bad))
        broken = message(pipe.version, "tools/call", 7, name="steady", arguments={"x": "MARK"})
        pipe.write(broken.replace(b"MARK", b"\xff"))
        assert "steady" in str(pipe.answer(7))


def test_a_list_request_that_is_no_text_is_answered_as_the_sdk_reads_it() -> None:
    with piped("2025-11-25") as pipe:
        pipe.write(b'{"jsonrpc":"2.0","id":"\xff","method":"tools/list"}\n')
        assert "steady" in str(pipe.answer("\ufffd"))
        pipe.write(b'{"jsonrpc":"2.0","id":7,"method":"tools/list","params":{"\xff":1}}\n')
        assert "steady" in str(pipe.answer(7))


# Readers who don't read


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
def test_a_client_that_does_not_read_costs_a_mailbox_and_hears_the_last_of_it(version: str) -> None:
    with piped(version, policy={"journal_changes": 10}) as pipe:
        pipe.watch("board://sprint")
        pipe.do("flood", uri="board://sprint", count=10, size=1)
        before = pipe.memory
        count, size = 2_000, 50_000
        pipe.do("flood", uri="board://sprint", count=count, size=size)
        pipe.told.clear()
        pipe.settle()
        assert pipe.memory - before < 20 << 20
        numbers: list[int] = []
        while not numbers or numbers[-1] != count - 1:
            message = pipe.line()
            numbers.append(message["params"]["metadata"]["number"])
        assert numbers == sorted(set(numbers))
        assert len(numbers) < count


def test_a_client_that_asks_and_does_not_read_costs_a_bounded_amount_and_gets_every_answer() -> None:
    with piped("2025-11-25") as pipe:
        pipe.do("crowd", count=100)
        size = len(json.dumps(pipe.ask("tools/list")))
        before = pipe.memory
        count = 3_000
        assert count * size > 150 << 20
        ids = [pipe.send("tools/list") for _ in range(count)]
        pipe.settle()
        assert pipe.memory - before < 30 << 20
        answered: list[Any] = []
        while len(answered) < count:
            answered.append((pipe.line()).get("id"))
        assert sorted(answered) == ids


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
def test_a_client_that_leaves_without_reading_does_not_keep_the_process(version: str) -> None:
    with piped(version, policy={"write_deadline": 0.3}) as pipe:
        pipe.watch("board://sprint")
        pipe.change("flood", uri="board://sprint", count=1_000, size=50_000)
        pipe.settle()
        pipe.stop(pipe.process.stdin)
        assert pipe.process.wait(SOON) == 0


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
def test_a_pipe_that_breaks_ends_the_process_quietly(version: str) -> None:
    with piped(version) as pipe:
        pipe.watch("board://sprint")
        pipe.stop(pipe.process.stdout)
        pipe.change("flood", uri="board://sprint", count=100, size=1_000)
        assert pipe.process.wait(DEADLINE) == 0


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_whose_client_does_not_read(number: signal.Signals) -> None:
    with piped("2025-11-25") as pipe:
        pipe.watch("board://sprint")
        pipe.change("flood", uri="board://sprint", count=1_000, size=50_000)
        pipe.settle()
        watch = Watch(pipe.process.pid)
        pipe.process.send_signal(number)
        deadline = time.monotonic() + DEADLINE
        while pipe.process.returncode is None:
            assert time.monotonic() < deadline, "it does not end"
            watch.look()
            with suppress(subprocess.TimeoutExpired):
                pipe.process.wait(0.02)
        assert watch.waited() < 2
        assert pipe.process.returncode == 128 + number


# The same, with the SDK's own client


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
@pytest.mark.anyio
async def test_many_changes_in_a_row_reach_the_sdks_client_in_order(version: str) -> None:
    async with open_ear(stdio_server("mcpserver"), version) as ear, listening(ear, "board://sprint"):
        await ear.change("crowd", count=50)
        await ear.mark()
        added = [name for heard in ear.heard for name in _added(heard.change)]
        assert added == [f"tool-{number}" for number in range(50)]
        assert len(await ear.names("tools")) == 52


def _added(change: dict[str, Any]) -> list[str]:
    return [each["name"] for each in change.get("changes", [change]) if each.get("operation") == "added"]
