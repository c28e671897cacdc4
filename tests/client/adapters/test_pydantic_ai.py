"""The toolset for pydantic-ai, with the real package and a model that makes fixed calls."""

from __future__ import annotations

import pytest
from pydantic_ai import Agent, ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from tests.support.unlocking import CALLS, TOOLS_OF_EACH_STEP, opened
from tidings import Disconnected, Mirror
from tidings.client.adapters.pydantic_ai import MirrorToolset

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_tool_that_a_call_adds_is_available_at_the_next_step(era: str) -> None:
    steps: list[AgentInfo] = []

    def respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        steps.append(info)
        if len(steps) > len(CALLS):
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart(*CALLS[len(steps) - 1])])

    async with opened(era) as mirror:
        agent = Agent(FunctionModel(respond), toolsets=[MirrorToolset(mirror)])
        result = await agent.run("go")

    assert [{tool.name for tool in info.function_tools} for info in steps] == TOOLS_OF_EACH_STEP
    [secret] = [tool for tool in steps[1].function_tools if tool.name == "secret"]
    assert secret.description == "Say a word."
    assert secret.parameters_json_schema["required"] == ["word"]
    returns = [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolReturnPart)]
    assert [(part.tool_name, part.outcome) for part in returns] == [
        ("unlock", "success"),
        ("secret", "success"),
        ("fail", "retried"),
    ]
    assert [part.content for part in returns[:2]] == ["unlocked", "the word is tidings"]
    assert "the disk is full" in str(returns[2].content)


async def test_mirror_that_is_not_open_is_an_error_and_not_an_agent_without_tools() -> None:
    agent = Agent(FunctionModel(lambda messages, info: pytest.fail("called")), toolsets=[MirrorToolset(Mirror("x"))])
    with pytest.raises(Disconnected, match="not connected"):
        await agent.run("go")
