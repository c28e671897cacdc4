"""Call a tool: `python examples/call.py URL TOOL [NAME=VALUE …]`."""

import argparse
import asyncio

from mcp.client.client import Client


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("tool")
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE")
    options = parser.parse_args()
    arguments = dict(argument.split("=", 1) for argument in options.arguments)
    async with Client(options.url) as client:
        result = await client.call_tool(options.tool, arguments)
        print(*(getattr(content, "text", content) for content in result.content))


if __name__ == "__main__":
    asyncio.run(main())
