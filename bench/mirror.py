"""Measure a mirror of many tools: its memory, and what one change costs: `python bench/mirror.py [--tools 10000]`.

The server is another process. Memory is what tracemalloc counts in the process of the mirror, CPU that of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tracemalloc
from time import process_time
from typing import Any

import mcp_types as types
from mcp.server.mcpserver import MCPServer

from tidings import Live, Mirror

EDITS = 20


def serve(count: int) -> None:
    server: MCPServer[Any] = MCPServer("many", log_level="CRITICAL")
    live = Live(server)

    def work(path: str, limit: int = 10, deep: bool = False) -> str:
        """Search the files below a path for a pattern, and return the first matches."""
        return path

    for number in range(count):
        server.add_tool(work, name=f"search_{number:05}")

    @server.tool()
    def edit(number: int) -> str:
        live.tools.update("search_00007", description=f"Edit {number}.")
        return "edited"

    live.run("stdio")


def held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def decoded(text: str) -> tuple[int, int]:
    """Return the memory of a list of tools: as JSON values, and as the objects of the SDK."""
    start = held()
    values = json.loads(text)
    as_values = held() - start
    del values
    tools = types.ListToolsResult.model_validate_json(text)
    as_objects = held() - start
    del tools
    return as_values, as_objects


async def measure(count: int) -> None:
    command = [sys.executable, __file__, "--serve", "--tools", str(count)]
    tracemalloc.start()
    start = held()
    async with Mirror(command) as mirror:
        assert len(mirror.tools) == count + 1
        text = types.ListToolsResult(tools=[*mirror.tools.values()]).model_dump_json(by_alias=True, exclude_unset=True)
        first = held() - start - len(text)
        as_values, as_objects = decoded(text)
        await mirror.client.list_tools()  # the client of the SDK keeps the output schemas of the last list
        await mirror.client.list_prompts()  # and the last message, until the next one
        later = held() - start - len(text)
        tracemalloc.stop()
        used = process_time()
        await mirror.client.list_tools()
        fetch = process_time() - used
        changes, edits = mirror.changes(), []
        for number in range(EDITS):
            used = process_time()
            await mirror.call("edit", {"number": number})
            change = await anext(changes)
            edits.append(process_time() - used)
            assert change.item.description == f"Edit {number}."
    print(f"{count:,} tools: {as_values / 1e6:.1f} MB as JSON values, {as_objects / 1e6:.1f} MB as objects of the SDK")
    for what, size in (("the mirror", first), ("the mirror after another list", later)):
        print(
            f"{what}: {size / 1e6:.1f} MB, {size / as_objects:.2f}x of the objects, {size / as_values:.2f}x of the JSON"
        )
    delta = statistics.median(edits)
    print(f"CPU of the client: {1000 * delta:.1f} ms for the call that edits a tool, and its delta;")
    print(f"{1000 * fetch:.1f} ms for the list, {fetch / delta:.0f}x of that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=int, default=10_000)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.tools)
    else:
        asyncio.run(measure(options.tools))


if __name__ == "__main__":
    main()
