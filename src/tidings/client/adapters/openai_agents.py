"""openai-agents: an MCP server whose tools are current at each turn of a run."""

from __future__ import annotations

from typing import Any

import mcp_types as types

from tidings.client import Mirror
from tidings.client.adapters.calls import call_tool, current_tools
from tidings.dependencies import missing_extra

try:
    from agents.mcp import MCPServer
except ImportError as error:
    raise missing_extra(__name__, "openai-agents") from error

__all__ = ["MirrorServer"]


class MirrorServer(MCPServer):
    """The tools, prompts and resources of a mirror. `options` are those of `MCPServer`."""

    def __init__(self, mirror: Mirror, *, name: str = "mirror", **options: Any) -> None:
        super().__init__(**options)
        self.mirror = mirror
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def connect(self) -> None:
        """Do nothing: the mirror is opened by its owner."""

    async def cleanup(self) -> None:
        """Do nothing: the mirror is closed by its owner."""

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[types.Tool]:
        # Copies, because the framework may change a schema in place, and those of the mirror are shared.
        return [tool.model_copy(deep=True) for tool in current_tools(self.mirror).values()]

    async def call_tool(
        self, tool_name: str, arguments: dict[str, Any] | None, meta: dict[str, Any] | None = None
    ) -> types.CallToolResult:
        return await call_tool(self.mirror, tool_name, arguments, meta=meta)

    async def list_prompts(self) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[*self.mirror.prompts.values()])

    async def get_prompt(self, name: str, arguments: dict[str, Any] | None = None) -> types.GetPromptResult:
        return await self.mirror.client.get_prompt(name, arguments)

    async def list_resources(self, cursor: str | None = None) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[*self.mirror.resources.values()])

    async def list_resource_templates(self, cursor: str | None = None) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[*self.mirror.templates.values()])

    async def read_resource(self, uri: str) -> types.ReadResourceResult:
        return await self.mirror.client.read_resource(uri)
