"""The tools and the middleware for LangChain, with the real packages and a model that makes fixed calls."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from tests.support.unlocking import CALLS, TOOLS_OF_EACH_STEP, opened
from tidings.client.adapters.langchain import MirrorMiddleware, mirror_tools

pytestmark = pytest.mark.anyio


class FixedModel(BaseChatModel):
    steps: list[dict[str, Any]] = []  # noqa: RUF012  # pydantic copies it for each instance
    bound: dict[str, Any] = {}  # noqa: RUF012

    @property
    def _llm_type(self) -> str:
        return "fixed"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        self.bound = {tool.name: tool for tool in tools}
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        self.steps.append(self.bound)
        number = len(self.steps)
        message = AIMessage("done")
        if number <= len(CALLS):
            name, arguments = CALLS[number - 1]
            message = AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": str(number)}])
        return ChatResult(generations=[ChatGeneration(message=message)])


@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_tool_that_a_call_adds_is_available_at_the_next_call_of_the_model(era: str) -> None:
    model = FixedModel()
    async with opened(era) as mirror:
        agent: Any = create_agent(model, middleware=[MirrorMiddleware(mirror)])
        state = await agent.ainvoke({"messages": [{"role": "user", "content": "go"}]})

    assert [set(tools) for tools in model.steps] == TOOLS_OF_EACH_STEP
    assert model.steps[1]["secret"].description == "Say a word."
    assert model.steps[1]["secret"].args_schema["required"] == ["word"]
    unlocked, secret, failed = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    assert (unlocked.content, unlocked.status) == ("unlocked", "success")
    assert (secret.content, secret.artifact) == ("the word is tidings", {"result": "the word is tidings"})
    assert failed.status == "error"
    assert "the disk is full" in str(failed.content)


async def test_tools_work_without_an_agent() -> None:
    async with opened("modern") as mirror:
        unlock = next(tool for tool in mirror_tools(mirror) if tool.name == "unlock")
        assert await unlock.ainvoke({}) == "unlocked"
        assert {tool.name for tool in mirror_tools(mirror)} == TOOLS_OF_EACH_STEP[1]
