"""A live low-level server on stdio: `python examples/lowlevel.py`."""

import mcp_types as types
from mcp.server import Server, ServerRequestContext

from tidings import Live

tools = [types.Tool(name="hello", input_schema={"type": "object"})]


async def list_tools(ctx: ServerRequestContext, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=tools)


async def call_tool(ctx: ServerRequestContext, params: types.CallToolRequestParams) -> types.CallToolResult:
    if params.name == "hello":
        tools.append(types.Tool(name="goodbye", input_schema={"type": "object"}))
        await live.refresh("tools")  # only this code knows when the list changes
    return types.CallToolResult(content=[types.TextContent(type="text", text=params.name)])


live = Live(Server("lowlevel", on_list_tools=list_tools, on_call_tool=call_tool))

if __name__ == "__main__":
    live.run("stdio")
