"""A run has limits for time, output and memory, and leaves no process and no open file."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.loops import anyio_backend
from tests.support.shared_pipe import SharedPipe
from tests.support.waiting import DEADLINE
from tidings.runtime.child import STDERR_TAIL, CannotStart
from tidings.workspace.process import Outcome, run_process

GRACE = 0.2
TIMEOUTS = (0.1, 1.0, 5.0, DEADLINE)  # seconds; the first is enough for a shell script on an idle machine

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio


def write_script(folder: Path, text: str, name: str = "tool.sh") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)
    return str(path)


def resolve(path: Path) -> Path:
    return path.resolve()


def count_descriptors() -> int:
    gc.collect()
    return len(list(Path("/dev/fd").iterdir()))


async def run(folder: Path, text: str, *arguments: str, **options: Any) -> Outcome:
    defaults: dict[str, Any] = {
        "stdin": b"",
        "env": {"PATH": os.environ["PATH"]},
        "cwd": folder,
        "timeout": DEADLINE,
        "max_output": 1 << 20,
        "grace": GRACE,
    }
    async with asyncio.timeout(2 * DEADLINE):
        return await run_process([write_script(folder, text), *arguments], **defaults | options)


async def run_until_timeout(folder: Path, text: str, grace: float = GRACE) -> Outcome:
    """Run until a timeout that is long enough for the tool to print something."""
    for timeout in TIMEOUTS:
        outcome = await run(folder, text, timeout=timeout, grace=grace)
        assert outcome.is_timeout
        assert outcome.status is None
        if outcome.stdout:
            return outcome
    raise AssertionError(f"no output within {DEADLINE} s")


# Input and output


async def test_input_environment_directory_and_output(tmp_path: Path) -> None:
    text = 'cat; echo " $NAME $(pwd -P)"; echo trouble >&2; exit 3'
    outcome = await run(tmp_path, text, stdin=b"given", env={"PATH": os.environ["PATH"], "NAME": "ä\u2028🎉"})

    assert outcome.stdout.decode() == f"given ä\u2028🎉 {resolve(tmp_path)}\n"
    assert outcome == Outcome(3, outcome.stdout, b"trouble\n", is_timeout=False, is_truncated=False)


async def test_no_shell_interprets_the_command(tmp_path: Path) -> None:
    arguments = ("$(id)", "`id`", "-rf", "; exit 9", "*", "")
    outcome = await run(tmp_path, 'printf "%s|" "$@"', *arguments)

    assert outcome.stdout.decode() == "".join(f"{argument}|" for argument in arguments)


async def test_signal_is_the_status(tmp_path: Path) -> None:
    assert (await run(tmp_path, "kill -USR1 $$")).status == -signal.SIGUSR1


@pytest.mark.parametrize(
    ("text", "stdout"),
    [("echo done", b"done\n"), ("exec <&-; echo closed", b"closed\n"), ("head -c 3", b"xxx"), ("wc -c", b"8388608\n")],
)
async def test_large_input_does_not_block(tmp_path: Path, text: str, stdout: bytes) -> None:
    assert (await run(tmp_path, text, stdin=b"x" * (8 << 20))).stdout.lstrip() == stdout


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (None, 0, "does not exist"),
        ("#!/no/such/interpreter\n", 0o755, "interpreter"),
        ("#!/bin/sh\n", 0o644, "chmod +x"),
        ("echo hi\n", 0o755, "first line"),
    ],
    ids=["absent", "interpreter", "mode", "shebang"],
)
async def test_failed_start_has_a_reason(tmp_path: Path, content: str | None, mode: int, message: str) -> None:
    path = tmp_path / "tool"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    before = count_descriptors()
    with pytest.raises(CannotStart, match=re.escape(message)):
        await run_process([str(path)], stdin=b"", env={}, cwd=tmp_path, timeout=1, max_output=1, on_line=print)
    assert count_descriptors() == before


async def test_file_that_is_being_written_is_retried(tmp_path: Path) -> None:
    path = write_script(tmp_path, "echo saved")
    editor = os.open(path, os.O_WRONLY)
    asyncio.get_running_loop().call_later(0.02, os.close, editor)

    outcome = await run_process([path], stdin=b"", env={}, cwd=tmp_path, timeout=DEADLINE, max_output=100)
    assert outcome.stdout == b"saved\n"


# Lines


async def test_lines_are_passed_on_while_the_tool_runs(tmp_path: Path) -> None:
    """The tool only ends if its lines have an effect while it runs."""
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        (tmp_path / line).touch()

    text = """for name in one two; do
        echo $name >"/dev/fd/$TIDINGS_PROGRESS_FD"
        until [ -e $name ]; do sleep 0.01; done
    done; printf 'tränen 🎉' >"/dev/fd/$TIDINGS_PROGRESS_FD" """
    outcome = await run(tmp_path, text, on_line=on_line)

    assert outcome.status == 0
    assert lines == ["one", "two", "tränen 🎉"]


async def test_too_long_line_is_dropped(tmp_path: Path) -> None:
    lines: list[str] = []
    text = 'exec 3>"/dev/fd/$TIDINGS_PROGRESS_FD"; head -c 1000000 /dev/zero >&3; echo >&3; echo short >&3'
    await run(tmp_path, text, on_line=lines.append)

    assert lines == ["short"]


async def test_failing_callback_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(line: str) -> None:
        raise LookupError(line)

    outcome = await run(tmp_path, 'echo hi >"/dev/fd/$TIDINGS_PROGRESS_FD"; echo done', on_line=fail)

    assert outcome.stdout == b"done\n"
    assert "LookupError: hi" in caplog.text


# Limits


@pytest.fixture
def get_peak() -> Iterator[Callable[[], int]]:
    """Return the peak of allocated memory so far."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


async def test_gigabyte_of_output_is_truncated(tmp_path: Path, pipe: SharedPipe, get_peak: Callable[[], int]) -> None:
    limit = 1 << 20
    text = f"exec 9>{pipe.path}; head -c 1073741824 /dev/zero; echo never"
    outcome = await run(tmp_path, text, max_output=limit)

    assert (outcome.is_truncated, outcome.status, len(outcome.stdout)) == (True, None, limit)
    assert get_peak() < 4 * limit
    assert pipe.has_ended


async def test_only_the_end_of_stderr_is_kept(tmp_path: Path, get_peak: Callable[[], int]) -> None:
    outcome = await run(tmp_path, "head -c 134217728 /dev/zero >&2; echo the end >&2; echo fine")

    assert (outcome.status, outcome.stdout) == (0, b"fine\n")
    assert outcome.stderr.endswith(b"the end\n")
    assert len(outcome.stderr) == STDERR_TAIL
    assert get_peak() < 4 << 20


async def test_progress_restarts_the_timeout_up_to_a_limit(tmp_path: Path) -> None:
    endless = "while :; do echo 1% > /dev/fd/$TIDINGS_PROGRESS_FD; done"
    for timeout in TIMEOUTS:
        outcome = await run(tmp_path, endless, timeout=timeout, max_timeout=2 * timeout, on_line=str)
        assert outcome.is_timeout
        if not outcome.is_idle:
            break
    else:
        raise AssertionError("progress never restarted the timeout")

    silent = "echo 1% > /dev/fd/$TIDINGS_PROGRESS_FD; sleep 1000"
    outcome = await run(tmp_path, silent, timeout=0.1, max_timeout=DEADLINE, on_line=str)
    assert outcome.is_timeout
    assert outcome.is_idle


async def test_timeout_stops_the_tool_and_keeps_its_output(tmp_path: Path, pipe: SharedPipe) -> None:
    text = f"exec 9>{pipe.path}; trap 'echo bye; exit 0' TERM; echo hello; sleep 1000 & wait"

    outcome = await run_until_timeout(tmp_path, text, grace=DEADLINE)  # it handles SIGTERM
    assert outcome.stdout == b"hello\nbye\n"
    assert pipe.has_ended


@pytest.mark.parametrize("is_child", [False, True])
async def test_process_that_ignores_sigterm_is_killed(tmp_path: Path, pipe: SharedPipe, is_child: bool) -> None:
    text = "trap '' TERM; echo started; while :; do sleep 1000; done"
    if is_child:
        text = f"{write_script(tmp_path, text, 'child.sh')} & wait"

    assert (await run_until_timeout(tmp_path, f"exec 9>{pipe.path}; {text}")).stdout == b"started\n"
    assert pipe.has_ended


@pytest.mark.parametrize("redirect", ["", ">/dev/null 2>&1"])
async def test_child_that_outlives_the_tool_is_killed(tmp_path: Path, pipe: SharedPipe, redirect: str) -> None:
    outcome = await run(tmp_path, f"exec 9>{pipe.path}; sleep 1000 {redirect} & echo answer; exit 0")

    assert outcome == Outcome(0, b"answer\n", b"", is_timeout=False, is_truncated=False)
    assert pipe.has_ended


async def test_output_of_a_child_after_the_exit_is_kept(tmp_path: Path) -> None:
    text = "(until [ -e go ]; do :; done; echo late) & touch go; echo early; exit 0"
    outcome = await run(tmp_path, text, linger=DEADLINE)  # the end of the pipe ends the wait

    assert sorted(outcome.stdout.split()) == [b"early", b"late"]


async def test_process_that_left_the_group_does_not_delay_the_call(tmp_path: Path) -> None:
    leave = "import os, signal; os.setsid(); print(os.getpid(), flush=True); open('left', 'w'); signal.pause()"
    text = f'"{sys.executable}" -c "{leave}" & until [ -e left ]; do sleep 0.01; done; exit 6'
    outcome = await run(tmp_path, text)
    os.kill(int(outcome.stdout), signal.SIGKILL)

    assert outcome.status == 6


# Cancellation

IGNORES_SIGTERM = (
    "exec 9>pipe; trap '' TERM; echo x >\"/dev/fd/$TIDINGS_PROGRESS_FD\"; sleep 1000 & while :; do sleep 1000; done"
)


async def start_ignoring_sigterm(folder: Path, **options: Any) -> asyncio.Task[Outcome]:
    """Return the task of a run whose tool ignores SIGTERM and has started."""
    has_started = asyncio.Event()
    task = asyncio.create_task(run(folder, IGNORES_SIGTERM, on_line=lambda line: has_started.set(), **options))
    async with asyncio.timeout(DEADLINE):
        await has_started.wait()
    return task


async def cancel_twice(task: asyncio.Task[Outcome]) -> None:
    task.cancel()
    asyncio.get_running_loop().call_later(GRACE / 4, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancellation_stops_the_group(tmp_path: Path, pipe: SharedPipe) -> None:
    stopped: list[bool] = []
    task = await start_ignoring_sigterm(tmp_path, on_stop=lambda: stopped.append(True))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert stopped == [True]
    assert pipe.has_ended


async def test_second_cancellation_kills_the_group_immediately(tmp_path: Path, pipe: SharedPipe) -> None:
    """The event loop may be about to close."""
    before = count_descriptors()
    task = await start_ignoring_sigterm(tmp_path, grace=2 * DEADLINE)
    await cancel_twice(task)

    assert count_descriptors() == before
    assert pipe.has_ended


async def test_cancel_scope_of_anyio_stops_the_group(tmp_path: Path, pipe: SharedPipe) -> None:
    with anyio.CancelScope() as scope:
        await run(tmp_path, IGNORES_SIGTERM, on_line=lambda line: scope.cancel())

    assert scope.cancelled_caught
    assert pipe.has_ended


# Many runs, and other systems


async def test_hundred_calls_at_once(tmp_path: Path, pipe: SharedPipe) -> None:
    text = f'exec 9>{pipe.path}; read -r line; echo "$line"; echo $line >&2; exit 4'
    path = write_script(tmp_path, text)
    before = count_descriptors()

    async def call(number: int) -> Outcome:
        return await run_process(
            [path],
            stdin=f"{number}\n".encode(),
            env={"PATH": os.environ["PATH"]},
            cwd=tmp_path,
            timeout=5 * DEADLINE,
            max_output=1000,
            on_line=print,
        )

    outcomes = await asyncio.gather(*map(call, range(100)))

    assert [int(outcome.stdout) for outcome in outcomes] == list(range(100))
    assert [int(outcome.stderr) for outcome in outcomes] == list(range(100))
    assert {outcome.status for outcome in outcomes} == {4}
    assert pipe.has_ended
    assert count_descriptors() == before


async def test_without_pidfd_a_thread_waits(tmp_path: Path, pipe: SharedPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(38, "not here")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)

    assert (await run(tmp_path, "sleep 1000 & echo hi; exit 5")).status == 5
    await run_until_timeout(tmp_path, f"exec 9>{pipe.path}; echo hi; sleep 1000")
    assert pipe.has_ended
    await cancel_twice(await start_ignoring_sigterm(tmp_path))
    assert pipe.has_ended


async def test_process_that_can_not_be_watched_is_killed(
    tmp_path: Path, pipe: SharedPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pid: int, flags: int = 0) -> int:
        with pipe.path.open("rb"):  # blocks until the tool has started
            raise RuntimeError("can't start new thread")

    before = count_descriptors()
    monkeypatch.setattr(os, "pidfd_open", fail, raising=False)
    with pytest.raises(RuntimeError, match="new thread"):
        await run(tmp_path, IGNORES_SIGTERM, on_line=print, stdin=b"x")

    assert pipe.has_ended
    assert count_descriptors() == before
