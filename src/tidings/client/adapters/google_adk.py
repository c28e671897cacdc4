"""google-adk: a toolset whose tools are those of the server at each step of an invocation."""

from __future__ import annotations

from typing import Any

import mcp_types as types

from tidings.client import Mirror
from tidings.client.adapters.calls import call_tool, current_tools
from tidings.dependencies import missing_extra

try:
    from google.adk.tools.base_tool import BaseTool
    from google.adk.tools.base_toolset import BaseToolset
    from google.genai.types import FunctionDeclaration
except ImportError as error:
    raise missing_extra(__name__, "google-adk") from error

__all__ = ["MirrorToolset"]


class MirrorToolset(BaseToolset):
    """The tools of a mirror. `options` are those of `BaseToolset`: `tool_filter` and `tool_name_prefix`."""

    def __init__(self, mirror: Mirror, **options: Any) -> None:
        super().__init__(**options)
        self.mirror = mirror
        self._use_invocation_cache = False  # it would keep the tools of the first step until the end of the invocation

    async def get_tools(self, readonly_context: Any = None) -> list[BaseTool]:
        tools = [_MirrorTool(self.mirror, tool) for tool in current_tools(self.mirror).values()]
        return [tool for tool in tools if self._is_tool_selected(tool, readonly_context)]


class _MirrorTool(BaseTool):
    def __init__(self, mirror: Mirror, tool: types.Tool) -> None:
        super().__init__(name=tool.name, description=tool.description or "")
        self._mirror = mirror
        self._tool = tool

    def _get_declaration(self) -> FunctionDeclaration:
        return FunctionDeclaration(
            name=self.name, description=self.description, parameters_json_schema=self._tool.input_schema
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> dict[str, Any]:
        """Return the result as the server sent it. Of an error, `isError` is true."""
        result = await call_tool(self._mirror, self._tool.name, args)
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)
