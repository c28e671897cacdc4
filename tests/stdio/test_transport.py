"""stdio of real processes, in both eras, on pipes, sockets and files."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from mcp_types import CONNECTION_CLOSED

from tests.support.board_actions import UNNOTICED
from tests.support.faults.wire import WaitMeter
from tests.support.forking import ENVIRONMENT
from tests.support.messages import META, initialize
from tests.support.sdk_clients import DEADLINE, MODERN, stdio_server
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY

LONG = 3600.0
METHODS = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
both_eras = pytest.mark.parametrize("version", ["2025-11-25", MODERN])


class Pipe:
    """A client that sees every line, and reads only when the test says so."""

    def __init__(self, process: subprocess.Popen[bytes], version: str) -> None:
        self.process = process
        self.pid = 0
        """The id of the board's process. `process` only starts it and waits for it."""
        self.version = version
        self.told: list[dict[str, Any]] = []
        """The notifications received so far."""
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

    def change(self, what: str, **args: Any) -> str | int:
        return self.send("tools/call", name="change", arguments={"what": what, "args": args})

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE)
            assert ready, f"no line after {len(self.told)} notifications"
            found = os.read(self.process.stdout.fileno(), 1 << 20)
            assert found, "the server closed its output"
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
            self.ask("initialize", **initialize(self.version)["params"])
            self.write(message(self.version, "notifications/initialized", None))
        self.pid = self.do("pid")

    def watch(self, uri: str) -> None:
        """Watch the list of tools and a resource."""
        if self.version == MODERN:
            wanted = {"toolsListChanged": True, "resourceSubscriptions": [uri]}
            self.send("subscriptions/listen", "client", notifications=wanted)
            assert self.line()["method"] == "notifications/subscriptions/acknowledged"
            self.told.clear()
        else:
            self.ask("resources/subscribe", uri=uri)

    @property
    def memory(self) -> int:
        """Private memory of the server in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))

    def settle(self) -> None:
        """Wait until the server has used no CPU time for a while."""
        last = -1
        for _ in range(200):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            now = int(fields[11]) + int(fields[12])
            if now == last:
                return
            last = now
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.3)
        raise AssertionError("the server is never idle")


def message(version: str, method: str, request_id: str | int | None, **params: Any) -> bytes:
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if request_id is not None:
        message["id"] = request_id
    if version == MODERN:
        params["_meta"] = META | params.get("_meta", {})
    if params:
        message["params"] = params
    return json.dumps(message).encode() + b"\n"


@contextmanager
def started(
    stdin: int | IO[bytes], stdout: int | IO[bytes], kind: str = "mcpserver", **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    server = stdio_server(kind, **options)
    command, environment = [server.command, *server.args], os.environ | ENVIRONMENT
    with subprocess.Popen(command, stdin=stdin, stdout=stdout, bufsize=0, env=environment) as process:
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


@both_eras
def test_list_from_the_cache_equals_the_response_of_the_sdk(version: str) -> None:
    """The server with middleware leaves each list to the SDK; only the cursor differs."""
    methods = (*METHODS, *(["server/discover"] if version == MODERN else []))
    with (
        piped(version, policy={"list_max_age": LONG}) as pipe,
        piped(version, policy={"list_max_age": LONG}, middleware=True) as slow,
    ):
        for method in methods:
            first, second, third = [pipe.answer(pipe.send(method, number)) for number in (901, "zweitens", 903)]
            assert first == {**second, "id": 901} == {**third, "id": 901}
            assert list(first["result"]) == list(second["result"])
            assert without_cursor(first) == without_cursor(slow.answer(slow.send(method, 901)))


@both_eras
def test_list_is_answered_from_the_cache_until_its_revision_changes(version: str) -> None:
    """A change in place, which Tidings does not notice, shows whether the cache or the SDK answers."""
    with piped(version, policy={"list_max_age": LONG}) as pipe:
        first = pipe.ask("tools/list")
        pipe.do("quietly", key="steady")
        assert pipe.ask("tools/list", "other") == first
        # The SDK answers a request with a cursor, and one with other params than before.
        assert UNNOTICED in str(pipe.ask("tools/list", cursor=""))
        assert UNNOTICED in str(pipe.ask("tools/list", _meta={"progressToken": 5}))

        pipe.do("add", feature="tools", key="new")
        second = pipe.ask("tools/list")
        assert "new" in [tool["name"] for tool in second["tools"]]
        assert second["_meta"][CURSOR_KEY] != first["_meta"][CURSOR_KEY]


@pytest.mark.parametrize(("kind", "options"), [("mcpserver", {"middleware": True}), ("lowlevel", {}), ("fastmcp", {})])
@both_eras
def test_sdk_answers_if_middleware_or_the_caller_can_change_the_list(
    version: str, kind: str, options: dict[str, Any]
) -> None:
    with piped(version, kind, policy={"list_max_age": LONG}, **options) as pipe:
        pipe.ask("tools/list")
        pipe.ask("tools/list")
        if kind == "lowlevel":
            item = {"name": "steady", "inputSchema": {"type": "object"}, "description": UNNOTICED}
            pipe.do("own_set", feature="tools", key="steady", item=item)
        else:
            pipe.do("quietly", key="steady")
        assert UNNOTICED in str(pipe.ask("tools/list"))


def test_response_is_not_taken_for_that_of_a_list_request_with_the_same_id() -> None:
    with piped("2025-11-25", "lowlevel", policy={"list_max_age": LONG}, shared_lists=True, only=["tools"]) as pipe:
        assert "error" in pipe.answer(pipe.send("prompts/list", "same"))
        assert "content" in pipe.ask("tools/call", "same", name="steady", arguments={})
        assert "error" in pipe.answer(pipe.send("prompts/list", "same"))


def test_second_handshake_does_not_use_responses_of_the_first() -> None:
    with piped("2024-11-05", policy={"list_max_age": LONG}) as pipe:
        pipe.ask("tools/list")
        pipe.do("quietly", key="steady")
        assert UNNOTICED not in str(pipe.ask("tools/list"))
        pipe.version = "2025-11-25"
        pipe.greet()
        assert UNNOTICED in str(pipe.ask("tools/list"))


@both_eras
def test_list_is_never_older_than_a_notification_before_it(version: str) -> None:
    with piped(version) as pipe:
        pipe.watch("board://sprint")
        lists: set[str | int] = set()
        for number in range(30):
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
        assert len((pipe.ask("tools/list"))["tools"]) == 32


@both_eras
def test_list_read_before_a_change_is_not_sent_after_its_notification(version: str) -> None:
    with piped(version, "lowlevel", shared_lists=True, late=True) as pipe:
        pipe.watch("board://sprint")
        pipe.send("tools/list", "early")
        item = {"name": "new", "inputSchema": {"type": "object"}}
        pipe.change("own_set_and_refresh", feature="tools", key="new", item=item)
        while (message := pipe.line()).get("id") != "early":
            pass
        assert pipe.told[0]["method"] == "notifications/tools/list_changed"
        assert [tool["name"] for tool in message["result"]["tools"]] == ["change", "steady", "new"]


# Pipes, sockets and files


INITIALIZE = json.dumps(initialize()).encode() + b"\n"


def test_server_runs_on_files(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(INITIALIZE)
    with (
        (tmp_path / "in").open("rb") as stdin,
        (tmp_path / "out").open("wb") as stdout,
        started(stdin, stdout) as board,
    ):
        assert board.wait(DEADLINE) == 0
    assert json.loads((tmp_path / "out").read_bytes())["result"]["serverInfo"]["name"] == "board"


def test_server_runs_on_one_socket_and_restores_its_mode() -> None:
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
def test_tool_can_not_write_to_or_read_from_the_client(kind: str) -> None:
    with piped("2025-11-25", kind) as pipe:
        assert pipe.do("noise") == ""
        pipe.ask("tools/list")
        pipe.do("noise")


def test_output_at_exit_does_not_reach_the_client() -> None:
    with piped("2025-11-25") as pipe:
        pipe.do("print_later")
        assert pipe.process.stdin is not None
        assert pipe.process.stdout is not None
        pipe.process.stdin.close()
        assert pipe.process.wait(DEADLINE) == 0
        assert pipe.process.stdout.read() == b""


INVALID: dict[bytes, tuple[int | None, int, str] | None] = {
    b"no JSON": (None, -32700, "Parse error"),
    b"\xff\xfe": (None, -32700, "Parse error"),
    b'[{"jsonrpc":"2.0","id":5,"method":"tools/list"}]': (None, -32600, "batches are not supported"),
    b'{"tools/list":1}': (None, -32600, "not a message of JSON-RPC 2.0"),
    b'{"jsonrpc":"2.0","id":1.5,"method":"tools/list"}': (None, -32600, "not a message of JSON-RPC 2.0"),
    b'{"jsonrpc":"1.0","id":5,"method":"tools/list"}': (5, -32600, "not a message of JSON-RPC 2.0"),
    b'{"jsonrpc":"2.0","method":"notifications/initialized","params":5}': None,
    b'{"jsonrpc":"2.0","id":5,"result":7}': None,
}
"""Lines, and the id, code and text of the error; None if a line gets no answer."""


def test_invalid_line_is_logged_and_answered_unless_it_is_no_request(capfd: pytest.CaptureFixture[str]) -> None:
    with piped("2025-11-25") as pipe:
        for line, answer in INVALID.items():
            pipe.write(b"\n" + line + b"\n")
            pipe.send("ping", "next")
            read = pipe.line()
            if answer is not None:
                assert (read["id"], read["error"]["code"]) == answer[:2]
                assert answer[2] in read["error"]["message"]
                read = pipe.line()
            assert read["id"] == "next"
    assert capfd.readouterr().err.count("a line of standard input was refused") == len(INVALID)


@pytest.fixture
def board() -> Iterator[Pipe]:
    with piped("2025-11-25") as pipe:
        yield pipe


def test_invalid_utf8_is_replaced(board: Pipe) -> None:
    broken = message(board.version, "tools/call", 7, name="steady", arguments={"x": "MARK"})
    board.write(broken.replace(b"MARK", b"\xff"))
    assert "steady" in str(board.answer(7))
    board.write(b'{"jsonrpc":"2.0","id":"\xff","method":"tools/list"}\n')
    assert "steady" in str(board.answer("\ufffd"))


# Input that ends


@both_eras
@pytest.mark.parametrize("has_files", [True, False], ids=["files", "pipes"])
def test_input_that_ends_at_once_is_answered_completely(tmp_path: Path, version: str, has_files: bool) -> None:
    requests = [*METHODS, *METHODS, "tools/call", "tools/list"]
    lines = [message(version, method, number) for number, method in enumerate(requests)]
    change = {"what": "add", "args": {"feature": "tools", "key": "new"}}
    lines[8] = message(version, "tools/call", 8, name="change", arguments=change)
    if version == MODERN:
        wanted = {"toolsListChanged": True}
        lines.insert(0, message(version, "subscriptions/listen", "client", notifications=wanted))
    else:
        lines[:0] = [INITIALIZE, message(version, "notifications/initialized", None)]
    if has_files:
        (tmp_path / "in").write_bytes(b"".join(lines))
        with (
            (tmp_path / "in").open("rb") as stdin,
            (tmp_path / "out").open("wb") as stdout,
            started(stdin, stdout) as process,
        ):
            assert process.wait(DEADLINE) == 0
        output = (tmp_path / "out").read_bytes()
    else:
        with started(subprocess.PIPE, subprocess.PIPE) as process:
            output, _ = process.communicate(b"".join(lines), DEADLINE)
    messages = [json.loads(line) for line in output.splitlines()]
    answers = {each["id"]: each["result"] for each in messages if "result" in each}
    assert answers.keys() >= set(range(len(requests)))
    told = [each["method"] for each in messages if "id" not in each]
    assert told.count("notifications/tools/list_changed") == 1


@pytest.mark.slow  # it waits for the call
def test_call_that_blocks_does_not_keep_a_process_whose_input_has_ended(board: Pipe) -> None:
    call = board.change("block")
    assert board.process.stdin is not None
    board.process.stdin.close()
    assert board.answer(call)["error"]["code"] == CONNECTION_CLOSED
    assert board.process.wait(DEADLINE) == 0


def test_server_runs_on_a_terminal() -> None:
    ours, theirs = os.openpty()
    with open(ours, "r+b", buffering=0) as terminal, started(theirs, theirs):  # noqa: PTH123  # a descriptor
        os.close(theirs)
        terminal.write(message("2025-11-25", "ping", "hello"))
        text = b""
        while b'"result"' not in text:
            assert select.select([ours], [], [], DEADLINE)[0]
            text += terminal.read(4096)


# Clients that do not read


@both_eras
def test_client_that_does_not_read_costs_little_memory_and_gets_the_last_version(version: str) -> None:
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


@pytest.mark.slow
def test_client_that_sends_without_reading_costs_bounded_memory_and_gets_every_response() -> None:
    with piped("2025-11-25") as pipe:
        pipe.do("add_many", count=100)
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


@both_eras
def test_process_exits_if_the_client_closes_without_reading(version: str) -> None:
    with piped(version, policy={"write_deadline": 0.3}) as pipe:
        pipe.watch("board://sprint")
        pipe.change("flood", uri="board://sprint", count=1_000, size=50_000)
        pipe.settle()
        assert pipe.process.stdin is not None
        pipe.process.stdin.close()
        assert pipe.process.wait(DEADLINE) == 0


@both_eras
def test_process_exits_with_0_if_the_pipe_breaks(version: str) -> None:
    with piped(version) as pipe:
        pipe.watch("board://sprint")
        assert pipe.process.stdout is not None
        pipe.process.stdout.close()
        pipe.change("flood", uri="board://sprint", count=100, size=1_000)
        assert pipe.process.wait(DEADLINE) == 0


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_process_whose_client_does_not_read(number: signal.Signals) -> None:
    with piped("2025-11-25") as pipe:
        pipe.watch("board://sprint")
        pipe.change("flood", uri="board://sprint", count=1_000, size=50_000)
        pipe.settle()
        watch = WaitMeter(pipe.pid)
        pipe.process.send_signal(number)
        deadline = time.monotonic() + DEADLINE
        while pipe.process.returncode is None:
            assert time.monotonic() < deadline, "the process does not end"
            watch.sample()
            with suppress(subprocess.TimeoutExpired):
                pipe.process.wait(0.02)
        assert watch.waited() < 2
        assert pipe.process.returncode == 128 + number
