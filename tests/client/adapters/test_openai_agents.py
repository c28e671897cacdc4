"""The MCP server for openai-agents, with the real package and a model that makes fixed calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import Agent, Model, ModelResponse, Runner, Usage, set_tracing_disabled
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from tests.support.unlocking import CALLS, TOOLS_OF_EACH_STEP, opened
from tidings.client.adapters.openai_agents import MirrorServer

pytestmark = pytest.mark.anyio
set_tracing_disabled(True)  # it would send each run to a service


class FixedModel(Model):
    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        self.tools.append({tool.name: tool for tool in options["tools"]})
        number = len(self.tools)
        output: Any
        if number > len(CALLS):
            text = ResponseOutputText(type="output_text", text="done", annotations=[])
            output = ResponseOutputMessage(id="1", type="message", role="assistant", status="completed", content=[text])
        else:
            name, arguments = CALLS[number - 1]
            output = ResponseFunctionToolCall(
                type="function_call", call_id=str(number), name=name, arguments=json.dumps(arguments)
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_tool_that_a_call_adds_is_available_at_the_next_turn(era: str) -> None:
    model = FixedModel()
    async with opened(era) as mirror:
        agent = Agent(name="agent", model=model, mcp_servers=[MirrorServer(mirror)])
        result = await Runner.run(agent, "go")

    assert [set(tools) for tools in model.tools] == TOOLS_OF_EACH_STEP
    assert model.tools[1]["secret"].description == "Say a word."
    assert model.tools[1]["secret"].params_json_schema["required"] == ["word"]
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert [output["text"] for output in outputs[:2]] == ["unlocked", "the word is tidings"]
    assert "the disk is full" in outputs[2]["text"]
    assert result.final_output == "done"
