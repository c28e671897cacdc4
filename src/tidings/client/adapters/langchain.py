"""LangChain: tools, and a middleware that gives an agent the present ones at each call of the model.

The tools are asynchronous, as the mirror is: use `ainvoke()` and `astream()`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types

from tidings.client import Mirror
from tidings.client.adapters.calls import call_tool, current_tools, result_text
from tidings.dependencies import missing_extra

try:
    from langchain.agents.middleware import AgentMiddleware
    from langchain_core.tools import StructuredTool, ToolException
except ImportError as error:
    raise missing_extra(__name__, "langchain") from error

__all__ = ["MirrorMiddleware", "mirror_tools"]


def mirror_tools(mirror: Mirror) -> list[StructuredTool]:
    """Return the present tools. The structured content of a result is the artifact of its message."""
    return [_tool(mirror, tool) for tool in current_tools(mirror).values()]


def _tool(mirror: Mirror, tool: types.Tool) -> StructuredTool:
    async def call(**arguments: Any) -> tuple[Any, Any]:
        result = await call_tool(mirror, tool.name, arguments)
        if result.is_error:
            raise ToolException(result_text(result) or f"the tool {tool.name} failed without a message")
        return _content(result), result.structured_content

    return StructuredTool(
        name=tool.name,
        description=tool.description or "",
        args_schema=tool.input_schema,
        coroutine=call,
        response_format="content_and_artifact",
        handle_tool_error=True,  # the model sees the error of a tool, and may try again
        metadata={"meta": tool.meta} if tool.meta else None,
    )


def _content(result: types.CallToolResult) -> str | list[dict[str, Any]]:
    if all(isinstance(block, types.TextContent) for block in result.content):
        return result_text(result)
    return [_block(block) for block in result.content]


def _block(block: types.ContentBlock) -> dict[str, Any]:
    if isinstance(block, types.TextContent):
        return {"type": "text", "text": block.text}
    if isinstance(block, types.ImageContent | types.AudioContent):
        return {"type": block.type, "base64": block.data, "mime_type": block.mime_type}
    return {"type": "text", "text": block.model_dump_json(by_alias=True, exclude_none=True)}


class MirrorMiddleware(AgentMiddleware):
    """Add the present tools of a mirror to those of the agent at each call of the model, and run them."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__()
        self.mirror = mirror
        self.tools: list[Any] = []

    @property
    def name(self) -> str:
        # One agent may have several mirrors, and LangChain wants a name of its own for each middleware.
        return f"{type(self).__name__}-{id(self.mirror)}"

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await handler(request.override(tools=[*request.tools, *mirror_tools(self.mirror)]))

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        if request.tool is None and (tool := self.mirror.tools.get(request.tool_call["name"])):
            request = request.override(tool=_tool(self.mirror, tool))
        return await handler(request)
