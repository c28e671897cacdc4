"""Print the notifications of a server, until Ctrl-C: `python examples/watch.py URL [--legacy] [--uri URI]`."""

import argparse
import asyncio
import json

from mcp.client.client import Client


async def show(message: object) -> None:
    method = getattr(message, "method", None)
    params = getattr(message, "params", None)
    if method is not None:
        change = (getattr(params, "meta", None) or {}).get("dev.tidings/change", {})
        print(method, json.dumps(change), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--legacy", action="store_true", help="use a protocol version before 2026-07-28")
    parser.add_argument("--uri", default="board://**", help="the resources to watch (default: %(default)s)")
    options = parser.parse_args()
    async with Client(options.url, mode="legacy" if options.legacy else "auto", message_handler=show) as client:
        if options.legacy:
            await client.session.subscribe_resource(options.uri)
            print("watching, protocol", client.protocol_version, flush=True)
            await asyncio.Event().wait()
        async with client.listen(
            tools_list_changed=True,
            prompts_list_changed=True,
            resources_list_changed=True,
            resource_subscriptions=[options.uri],
        ) as events:
            print("watching, protocol", client.protocol_version, flush=True)
            async for _ in events:
                pass  # the message handler prints them, with their `_meta`


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
