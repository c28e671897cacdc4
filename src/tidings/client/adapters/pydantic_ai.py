"""pydantic-ai: a toolset whose tools are those of the server at each step of a run."""

from __future__ import annotations

import base64
from typing import Any

import mcp_types as types

from tidings.client import Mirror
from tidings.client.adapters.calls import call_tool, current_tools, result_text
from tidings.dependencies import missing_extra

try:
    from pydantic_ai import BinaryContent, ModelRetry, RunContext, ToolDefinition
    from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
except ImportError as error:
    raise missing_extra(__name__, "pydantic-ai") from error
from pydantic import TypeAdapter

__all__ = ["MirrorToolset"]

_ARGUMENTS: Any = TypeAdapter(dict[str, Any]).validator  # the server checks the arguments against the schema


class MirrorToolset(AbstractToolset[Any]):
    """The tools of a mirror. An error of a tool asks the model to try again, as pydantic-ai's own MCP toolset does."""

    def __init__(self, mirror: Mirror, *, id: str | None = None, max_retries: int | None = None) -> None:
        self.mirror = mirror
        self.max_retries = max_retries
        self._id = id

    @property
    def id(self) -> str | None:
        return self._id

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        retries = ctx.max_retries if self.max_retries is None else self.max_retries
        return {
            name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=name,
                    description=tool.description,
                    parameters_json_schema=tool.input_schema,
                    return_schema=tool.output_schema,
                    metadata={"meta": tool.meta},
                ),
                max_retries=retries,
                args_validator=_ARGUMENTS,
            )
            for name, tool in current_tools(self.mirror).items()
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        result = await call_tool(self.mirror, name, tool_args)
        if result.is_error:
            raise ModelRetry(result_text(result) or f"the tool {name} failed without a message")
        is_text = all(isinstance(block, types.TextContent) for block in result.content)
        if is_text and result.structured_content is not None:  # the text is only its JSON
            structured = result.structured_content
            return structured["result"] if isinstance(structured, dict) and [*structured] == ["result"] else structured
        parts = [_part(block) for block in result.content]
        return parts[0] if len(parts) == 1 else parts


def _part(block: types.ContentBlock) -> Any:
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.ImageContent | types.AudioContent):
        return BinaryContent(data=base64.b64decode(block.data), media_type=block.mime_type)
    return block.model_dump(mode="json", by_alias=True, exclude_none=True)
