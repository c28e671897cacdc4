"""A run is bounded in time, output and memory, and leaves nothing behind, whatever the executable does."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import select
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.loops import anyio_backend
from tidings.workspace import process
from tidings.workspace.process import CannotStart, Outcome, run_process

DEADLINE = 60.0
GRACE = 0.2
LIMITS = (0.1, 1.0, 5.0, DEADLINE)  # seconds; the first is enough for a shell script on an idle machine

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE", GRACE)


class Pulse:
    """A named pipe that every process of a run holds open: it ends when the last of them is gone."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def has_ended(self) -> bool:
        readable, _, _ = select.select([self.descriptor], [], [], DEADLINE)
        return bool(readable) and os.read(self.descriptor, 1) == b""


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[Pulse]:
    pulse = Pulse(tmp_path / "pulse")
    yield pulse
    os.close(pulse.descriptor)


def script(folder: Path, text: str, name: str = "tool.sh", shell: str = "/bin/sh") -> str:
    path = folder / name
    path.write_text(f"#!{shell}\n{text}\n", "utf-8")
    path.chmod(0o755)
    return str(path)


def real(path: Path) -> Path:
    return path.resolve()


def open_descriptors() -> int:
    gc.collect()  # what others let go of is not closed while we count
    return len(list(Path("/dev/fd").iterdir()))


async def run(folder: Path, text: str, **options: Any) -> Outcome:
    given: dict[str, Any] = {
        "stdin": b"",
        "env": {"PATH": os.environ["PATH"]},
        "cwd": folder,
        "timeout": DEADLINE,
        "max_output": 1 << 20,
    }
    async with asyncio.timeout(2 * DEADLINE):
        return await run_process([script(folder, text)], **given | options)


async def run_out_of_time(folder: Path, text: str, said: bytes = b"") -> Outcome:
    """A run that meets its time limit, and not before the tool has said this, or anything."""
    for timeout in LIMITS:
        outcome = await run(folder, text, timeout=timeout)
        assert outcome.is_timeout
        if outcome.stdout and said in outcome.stdout:
            return outcome
    raise AssertionError(f"nothing was said in {DEADLINE} s")


# What it gives and takes


async def test_input_environment_directory_and_output_are_those_of_the_call(tmp_path: Path) -> None:
    text = 'cat; echo " $NAME $(pwd -P)"; echo trouble >&2; exit 3'
    outcome = await run(tmp_path, text, stdin=b"given", env={"PATH": os.environ["PATH"], "NAME": "ä\u2028🎉"})

    assert outcome.stdout.decode() == f"given ä\u2028🎉 {real(tmp_path)}\n"
    assert outcome == Outcome(3, outcome.stdout, b"trouble\n", is_timeout=False, is_truncated=False)


async def test_no_shell_reads_the_command(tmp_path: Path) -> None:
    command = [script(tmp_path, 'printf "%s|" "$@"'), "$(id)", "`id`", "-rf", "; exit 9", "*", ""]
    outcome = await run_process(
        command, stdin=b"", env={}, cwd=tmp_path, timeout=DEADLINE, max_output=1000, on_line=None
    )

    assert outcome.stdout == b"$(id)|`id`|-rf|; exit 9|*||"


async def test_a_signal_that_ends_the_tool_is_its_status(tmp_path: Path) -> None:
    outcome = await run(tmp_path, "kill -USR1 $$")

    assert outcome.status == -signal.SIGUSR1


async def test_a_tool_that_never_reads_its_input_is_not_waited_for(tmp_path: Path) -> None:
    big = b"x" * (8 << 20)

    assert (await run(tmp_path, "echo done", stdin=big)).stdout == b"done\n"
    assert (await run(tmp_path, "exec <&-; echo closed", stdin=big)).stdout == b"closed\n"
    assert (await run(tmp_path, "head -c 3", stdin=big)).stdout == b"xxx"


async def test_a_large_input_arrives_whole(tmp_path: Path) -> None:
    assert int((await run(tmp_path, "wc -c", stdin=b"y" * 5_000_000)).stdout) == 5_000_000


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "does not exist"),
        ("#!/no/such/interpreter\n", 0o755, "interpreter"),
        ("#!/bin/sh\n", 0o644, "chmod +x"),
        ("echo hi\n", 0o755, "first line"),
    ],
    ids=["absent", "interpreter", "mode", "shebang"],
)
async def test_what_can_not_be_started_says_why(tmp_path: Path, content: str | None, mode: int, said: str) -> None:
    path = tmp_path / "tool"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    before = open_descriptors()
    with pytest.raises(CannotStart, match=re.escape(said)):
        await run_process([str(path)], stdin=b"", env={}, cwd=tmp_path, timeout=1, max_output=1, line_fd_env="L")
    assert open_descriptors() == before


async def test_a_file_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    path = Path(script(tmp_path, "echo saved"))
    editor = os.open(path, os.O_WRONLY)
    asyncio.get_running_loop().call_later(0.02, os.close, editor)

    outcome = await run_process([str(path)], stdin=b"", env={}, cwd=tmp_path, timeout=DEADLINE, max_output=100)
    assert outcome.stdout == b"saved\n"


# Lines


async def test_each_line_is_handed_over_as_it_comes(tmp_path: Path) -> None:
    """The tool ends only if what it wrote was heard while it was running."""
    heard: list[str] = []

    def hear(line: str) -> None:
        heard.append(line)
        (tmp_path / line).touch()

    text = """for name in one two; do
        echo $name >"/dev/fd/$LINES_FD"
        until [ -e $name ]; do sleep 0.01; done
    done; printf 'tränen 🎉' >"/dev/fd/$LINES_FD" """
    outcome = await run(tmp_path, text, on_line=hear, line_fd_env="LINES_FD")

    assert outcome.status == 0
    assert heard == ["one", "two", "tränen 🎉"]


async def test_a_line_too_long_is_dropped_and_the_next_one_is_heard(tmp_path: Path) -> None:
    heard: list[str] = []
    text = 'exec 3>"/dev/fd/$L"; head -c 1000000 /dev/zero >&3; echo >&3; echo short >&3'
    await run(tmp_path, text, on_line=heard.append, line_fd_env="L")

    assert heard == ["short"]


async def test_a_listener_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(line: str) -> None:
        raise LookupError(line)

    outcome = await run(tmp_path, 'echo hi >"/dev/fd/$L"; echo done', on_line=fail, line_fd_env="L")

    assert outcome.stdout == b"done\n"
    assert "LookupError: hi" in caplog.text


# Limits


async def test_a_gigabyte_of_output_costs_no_more_than_the_limit(tmp_path: Path, pulse: Pulse) -> None:
    limit = 1 << 20
    tracemalloc.start()
    try:
        text = f"exec 9>{pulse.path}; head -c 1073741824 /dev/zero; echo never"
        outcome = await run(tmp_path, text, max_output=limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert outcome.is_truncated
    assert outcome.status is None
    assert len(outcome.stdout) == limit
    assert peak < 4 * limit
    assert pulse.has_ended


async def test_of_a_gigabyte_on_stderr_the_end_is_kept(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        outcome = await run(tmp_path, "head -c 1073741824 /dev/zero >&2; echo the end >&2; echo fine")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (outcome.status, outcome.stdout) == (0, b"fine\n")
    assert outcome.stderr.endswith(b"the end\n")
    assert len(outcome.stderr) == process.STDERR_TAIL
    assert peak < 4 << 20


async def test_a_tool_that_takes_too_long_is_ended_and_keeps_what_it_said(
    tmp_path: Path, pulse: Pulse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE", DEADLINE)  # it ends by itself, as soon as the machine lets it
    text = f"exec 9>{pulse.path}; trap 'echo bye; exit 0' TERM; echo hello; sleep 1000 & wait"
    outcome = await run_out_of_time(tmp_path, text, said=b"hello")

    assert outcome.is_timeout
    assert outcome.status is None
    assert outcome.stdout == b"hello\nbye\n"
    assert pulse.has_ended


async def test_a_tool_that_ignores_sigterm_is_killed(tmp_path: Path, pulse: Pulse) -> None:
    text = f"exec 9>{pulse.path}; trap '' TERM; echo deaf; while :; do sleep 1000; done"
    outcome = await run_out_of_time(tmp_path, text)

    assert outcome.is_timeout
    assert outcome.stdout == b"deaf\n"
    assert pulse.has_ended


async def test_a_child_that_ignores_sigterm_goes_with_its_parent(tmp_path: Path, pulse: Pulse) -> None:
    deaf = script(tmp_path, "trap '' TERM; echo listening; while :; do sleep 1000; done", name="deaf.sh")
    outcome = await run_out_of_time(tmp_path, f"exec 9>{pulse.path}; {deaf} & wait")

    assert outcome.is_timeout
    assert pulse.has_ended


async def test_a_fork_that_outlives_its_parent_neither_hangs_the_call_nor_survives_it(
    tmp_path: Path, pulse: Pulse
) -> None:
    outcome = await run(tmp_path, f"exec 9>{pulse.path}; sleep 1000 & echo answer; exit 0")

    assert outcome == Outcome(0, b"answer\n", b"", is_timeout=False, is_truncated=False)
    assert pulse.has_ended


async def test_a_fork_that_closed_its_output_does_not_survive_either(tmp_path: Path, pulse: Pulse) -> None:
    outcome = await run(tmp_path, f"exec 9>{pulse.path}; sleep 1000 >/dev/null 2>&1 & echo answer")

    assert outcome.stdout == b"answer\n"
    assert pulse.has_ended


async def test_what_a_helper_still_writes_after_the_exit_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LINGER", DEADLINE)  # the end of the pipe ends the wait
    outcome = await run(tmp_path, "(until [ -e go ]; do :; done; echo late) & touch go; echo early; exit 0")

    assert sorted(outcome.stdout.split()) == [b"early", b"late"]


async def test_a_process_that_left_the_group_does_not_hang_the_call(tmp_path: Path) -> None:
    leave = "import os, signal; os.setsid(); print(os.getpid(), flush=True); open('left', 'w'); signal.pause()"
    text = f'"{sys.executable}" -c "{leave}" & until [ -e left ]; do sleep 0.01; done; exit 6'
    outcome = await run(tmp_path, text)
    os.kill(int(outcome.stdout), signal.SIGKILL)

    assert outcome.status == 6


# Cancellation


async def started(folder: Path, text: str, **options: Any) -> asyncio.Task[Outcome]:
    """The task of a run whose tool has said that it is under way."""
    under_way = asyncio.Event()
    task = asyncio.create_task(
        run(folder, text, line_fd_env="L", on_line=lambda line: under_way.set(), **options), name="run"
    )
    async with asyncio.timeout(DEADLINE):
        await under_way.wait()
    return task


STUBBORN = "exec 9>pulse; trap '' TERM; echo x >\"/dev/fd/$L\"; sleep 1000 & while :; do sleep 1000; done"


async def test_cancelling_the_call_ends_the_group(tmp_path: Path, pulse: Pulse) -> None:
    stopped: list[bool] = []
    task = await started(tmp_path, STUBBORN, on_stop=lambda: stopped.append(True))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert stopped == [True]
    assert pulse.has_ended


async def cancelled_twice(task: asyncio.Task[Outcome]) -> None:
    task.cancel()
    asyncio.get_running_loop().call_later(GRACE / 4, task.cancel)
    await task


async def test_cancelling_twice_kills_the_group_at_once(
    tmp_path: Path, pulse: Pulse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop may be about to close: nothing is left for it to do."""
    descriptors = open_descriptors()
    task = await started(tmp_path, STUBBORN)
    monkeypatch.setattr(process, "GRACE", 2 * DEADLINE)
    with pytest.raises(asyncio.CancelledError):
        await cancelled_twice(task)

    assert open_descriptors() == descriptors
    assert pulse.has_ended


async def test_a_cancel_scope_of_anyio_ends_the_group(tmp_path: Path, pulse: Pulse) -> None:
    with anyio.CancelScope() as scope:
        await run(tmp_path, STUBBORN, line_fd_env="L", on_line=lambda line: scope.cancel())

    assert scope.cancelled_caught
    assert pulse.has_ended


# Many, and elsewhere


async def test_a_hundred_calls_at_once(tmp_path: Path, pulse: Pulse) -> None:
    path = script(tmp_path, f'exec 9>{pulse.path}; read -r line; echo "$line"; echo $line >&2; exit 4')
    descriptors = open_descriptors()

    async def call(number: int) -> Outcome:
        return await run_process(
            [path],
            stdin=f"{number}\n".encode(),
            env={"PATH": os.environ["PATH"]},
            cwd=tmp_path,
            timeout=5 * DEADLINE,
            max_output=1000,
            line_fd_env="L",
        )

    outcomes = await asyncio.gather(*map(call, range(100)))

    assert [int(outcome.stdout) for outcome in outcomes] == list(range(100))
    assert [int(outcome.stderr) for outcome in outcomes] == list(range(100))
    assert {outcome.status for outcome in outcomes} == {4}
    assert pulse.has_ended
    assert open_descriptors() == descriptors


async def test_without_pidfd_a_thread_waits(tmp_path: Path, pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(38, "not here")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)

    assert (await run(tmp_path, "sleep 1000 & echo hi; exit 5")).status == 5
    assert (await run_out_of_time(tmp_path, f"exec 9>{pulse.path}; echo hi; sleep 1000")).status is None
    assert pulse.has_ended
    with pytest.raises(asyncio.CancelledError):
        await cancelled_twice(await started(tmp_path, STUBBORN))
    assert pulse.has_ended


async def test_a_process_that_can_not_be_watched_is_not_left(
    tmp_path: Path, pulse: Pulse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left to watch it with, and no thread either."""

    def watch(run: object) -> None:
        with pulse.path.open("rb"):  # it is under way: it has opened the other end
            raise RuntimeError("can't start new thread")

    descriptors = open_descriptors()
    monkeypatch.setattr(process._Run, "_watch_exit", watch)
    with pytest.raises(RuntimeError, match="new thread"):
        await run(tmp_path, STUBBORN, line_fd_env="L", stdin=b"x")

    assert pulse.has_ended
    assert open_descriptors() == descriptors
