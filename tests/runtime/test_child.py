"""A child without limits: as a command of the shell, without an event loop, and when its parent is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import DEADLINE
from tests.support.shared_pipe import SharedPipe
from tests.support.stress import sized
from tidings.runtime.child import CannotStart, Child

SAMPLE = sized(5, 200)
SIZE = 2 << 20
"""Bytes: more than any pipe holds."""


@pytest.mark.anyio
async def test_conversation_with_a_child(pipe: SharedPipe) -> None:
    """The shared pipe says when the child has written, whether that is read or not."""
    chunks: list[bytes] = []
    read = asyncio.Event()

    def add(chunk: bytes) -> None:
        chunks.append(chunk)
        read.set()

    command = f"exec 9>{pipe.path}; while read -r line; do echo got $line; printf x >&9; done; echo end >&2; exit 3"
    async with asyncio.timeout(DEADLINE):
        child = await Child.start(command, on_output=add)
        child.write(b"one\n")
        await read.wait()
        assert await asyncio.to_thread(pipe.read) == b"x"
        assert b"".join(chunks) == b"got one\n"
        child.set_reading(False)
        child.write(b"two\n")
        assert await asyncio.to_thread(pipe.read) == b"x"
        await two_turns()
        assert b"".join(chunks) == b"got one\n"
        read.clear()
        child.set_reading(True)
        await read.wait()
        child.write(b"", closes=True)
        assert await child.wait() == 3

    assert (b"".join(chunks), chunks[-1], child.stderr) == (b"got one\ngot two\n", b"", b"end\n")


@pytest.mark.anyio
async def test_writer_waits_until_the_child_reads(tmp_path: Path) -> None:
    async with asyncio.timeout(DEADLINE):
        child = await Child.start(f"until [ -e {tmp_path}/go ]; do sleep 0.01; done; cat >{tmp_path}/read")
        child.write(bytes(SIZE))
        writing = asyncio.create_task(child.until_written())
        await two_turns()
        assert not writing.done()
        (tmp_path / "go").touch()
        await writing
        child.write(b"", closes=True)
        assert await child.wait() == 0
    assert (tmp_path / "read").stat().st_size == SIZE


async def two_turns() -> None:
    """Let the event loop find what can be read, and read it."""
    for _ in range(2):
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_what_a_child_leaves_behind_may_go_on(tmp_path: Path, pipe: SharedPipe) -> None:
    command = f"exec 9>{pipe.path}; (until [ -e {tmp_path}/go ]; do sleep 0.01; done; printf x >&9) & exit 0"
    async with asyncio.timeout(DEADLINE):
        child = await Child.start(command, kills_rest=False, stdout=None, stderr=None)
        assert await child.wait() == 0
    (tmp_path / "go").touch()
    assert pipe.read() == b"x"


@pytest.mark.parametrize(("trap", "status"), [("trap 'exit 4' TERM", 4), ("trap '' TERM", -signal.SIGKILL)])
def test_child_without_an_event_loop_is_ended(pipe: SharedPipe, trap: str, status: int) -> None:
    command = f"exec 9>{pipe.path}; {trap}; printf x >&9; while :; do sleep 0.01; done"
    child = Child(command, stdin=subprocess.DEVNULL, stdout=None, stderr=None)
    assert pipe.read() == b"x"
    assert not child.poll()
    child.stop_blocking(DEADLINE if status == 4 else 0.1)

    assert child.status == status


LEAVES_A_PROCESS = "exec 9>{}; {}; (trap '' TERM; printf x >&9; while :; do sleep 1000; done) & {}"


@pytest.mark.anyio
async def test_what_a_stopped_child_leaves_behind_is_killed(pipe: SharedPipe) -> None:
    command = LEAVES_A_PROCESS.format(pipe.path, "trap 'exit 0' TERM", "while :; do sleep 0.01; done")
    async with asyncio.timeout(DEADLINE):
        child = await Child.start(command, kills_rest=False, stdout=None, stderr=None, grace=DEADLINE)
        assert await asyncio.to_thread(pipe.read) == b"x"
        child.stop()
        assert await child.wait() == 0
    assert pipe.has_ended


@pytest.mark.parametrize("is_stopped", [True, False])
def test_what_a_child_without_an_event_loop_leaves_behind_is_killed(pipe: SharedPipe, is_stopped: bool) -> None:
    end = "while :; do sleep 0.01; done" if is_stopped else "exit 0"
    command = LEAVES_A_PROCESS.format(pipe.path, "trap 'exit 0' TERM", end)
    child = Child(command, stdin=subprocess.DEVNULL, stdout=None, stderr=None)
    assert pipe.read() == b"x"
    if is_stopped:
        child.stop_blocking(DEADLINE)
    else:
        assert child.poll(DEADLINE)
    assert child.status == 0
    assert pipe.has_ended


def test_error_of_the_start_names_the_command() -> None:
    with pytest.raises(CannotStart, match="no-such-program could not be started"):
        Child(["no-such-program"])


PARENT = """
import asyncio, sys
from tidings.runtime.child import Child

async def main():
    command = f"exec 9>{sys.argv[1]}; trap '' TERM HUP INT; sleep 1000 & while :; do sleep 1000; done"
    print(flush=True)
    while True:
        children = [await Child.start(command) for _ in range(3)]
        children[0].stop()
        children[1].kill_now()
        await asyncio.sleep(0)
        children[2].kill_now()
        await asyncio.gather(*(child.wait() for child in children))

asyncio.run(main())
"""


@pytest.mark.stress
def test_no_process_survives_a_parent_that_is_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    """While it starts, stops and reaps children, and while its watchdog starts."""
    moments = random.Random(seed)
    for number in range(SAMPLE):
        pipe = SharedPipe(tmp_path / f"pipe-{number}")
        os.close(os.open(pipe.path, os.O_WRONLY))  # a pipe that nobody has opened for writing has no end
        with subprocess.Popen([sys.executable, "-c", PARENT, pipe.path], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline()
            try:
                parent.wait(moments.expovariate(20))
            except subprocess.TimeoutExpired:
                parent.kill()
        assert parent.returncode == -signal.SIGKILL
        assert pipe.has_ended
        os.close(pipe.descriptor)


HELD = """
import signal, subprocess, sys
from tidings.runtime.child import Child

class Held(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "pass_fds" in options:  # not the watchdog
            signal.pause()

subprocess.Popen = Held
Child(f"exec 9>{sys.argv[1]}; printf x >&9; while :; do sleep 1000; done")
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the watchdog finds such a child in /proc only")
def test_child_that_is_not_registered_yet_ends_with_its_parent(pipe: SharedPipe) -> None:
    with subprocess.Popen([sys.executable, "-c", HELD, pipe.path]) as parent:
        assert pipe.read() == b"x"
        parent.kill()
    assert pipe.has_ended
