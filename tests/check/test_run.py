from __future__ import annotations

import pytest

from tests.support.defective_server import DefectiveServer
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE
from tidings.check.run import CheckOptions, Run
from tidings.core.model import Feature

pytestmark = pytest.mark.anyio


async def test_a_list_counts_as_known_from_its_first_answer_on_although_a_later_list_is_refused() -> None:
    server = DefectiveServer()
    server.errors.add("resources/list")
    async with run_uvicorn(server, http="h11") as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        async with Run(CheckOptions(target=url, name="refusing", timeout=DEADLINE), lambda text: None) as run:
            await run.connect()
            await run.read_first_lists()
            for session in run.sessions:
                answers = [
                    frame for frame in run.transcript.frames if frame.channel == session.channel and frame.result
                ]
                first = next(frame for frame in answers if "tools" in (frame.result or {}))
                assert run.fetched[session, Feature.TOOLS] == first.time
