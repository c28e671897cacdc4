"""The toolset for google-adk, with the real package and a model that makes fixed calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types

from tests.support.unlocking import CALLS, TOOLS_OF_EACH_STEP, opened
from tidings.client.adapters.google_adk import MirrorToolset

pytestmark = pytest.mark.anyio


class FixedModel(BaseLlm):
    steps: list[dict[str, Any]] = []  # noqa: RUF012  # pydantic copies it for each instance

    async def generate_content_async(self, llm_request: Any, stream: bool = False) -> AsyncGenerator[LlmResponse, None]:
        declared = [each for tool in llm_request.config.tools for each in tool.function_declarations]
        self.steps.append({each.name: each for each in declared})
        part = types.Part(text="done")
        for name, arguments in CALLS[len(self.steps) - 1 :][:1]:
            for declared_name in self.steps[-1]:
                if declared_name.endswith(name):  # it may have a prefix
                    part = types.Part(function_call=types.FunctionCall(name=declared_name, args=arguments))
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


async def run(toolset: MirrorToolset) -> tuple[FixedModel, list[Any]]:
    """Run an agent; return its model, and the responses of the tools."""
    model = FixedModel(model="fixed")
    runner = InMemoryRunner(agent=LlmAgent(name="agent", model=model, tools=[toolset]), app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text="go")])
    responses: list[Any] = []
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
        responses += [each.response for each in event.get_function_responses()]
    return model, responses


@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_tool_that_a_call_adds_is_available_at_the_next_step(era: str) -> None:
    async with opened(era) as mirror:
        model, (unlocked, secret, failed) = await run(MirrorToolset(mirror))

    assert [set(tools) for tools in model.steps] == TOOLS_OF_EACH_STEP
    assert model.steps[1]["secret"].description == "Say a word."
    assert model.steps[1]["secret"].parameters_json_schema["required"] == ["word"]
    assert unlocked["content"][0]["text"] == "unlocked"
    assert secret["structuredContent"] == {"result": "the word is tidings"}
    assert failed["isError"] is True
    assert "the disk is full" in failed["content"][0]["text"]


async def test_filter_and_prefix_of_the_framework_apply_to_tools_that_are_added_later() -> None:
    async with opened("modern") as mirror:
        model, _ = await run(MirrorToolset(mirror, tool_filter=["unlock", "secret"], tool_name_prefix="board"))

    assert [set(tools) for tools in model.steps[:2]] == [{"board_unlock"}, {"board_unlock", "board_secret"}]
