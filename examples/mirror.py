"""Follow the lists and one resource of a server, until Ctrl-C: `python examples/mirror.py TARGET [--uri URI]`.

TARGET is a URL or a stdio command. The server may be of either era, and may restart.
"""

import argparse
import asyncio
from typing import Any

from tidings import Mirror, NotSupported


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--uri", help="the resource whose content to watch")
    options = parser.parse_args()
    async with Mirror(options.target) as mirror:
        if options.uri:
            mirror.set_notification_handler("notifications/resources/updated", show_content)
            try:
                await mirror.subscribe(options.uri)
            except NotSupported as error:
                print(error, flush=True)
        print(len(mirror.tools), "tools,", mirror.status.state, flush=True)
        async for change in mirror.changes():
            print(change.operation, change.list, change.name, flush=True)


def show_content(notification: Any) -> None:
    print("content", notification.params.uri, flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
