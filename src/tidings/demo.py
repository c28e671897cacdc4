"""The core at work, in one process: `python -m tidings.demo`."""

from __future__ import annotations

from tidings import BUSY, Catalog, Hub, Notification
from tidings.frames import Shape, write


def main() -> None:
    catalog = Catalog()
    hub = Hub(catalog)

    def prompt_reader(notification: Notification) -> None:
        print("  a reader of prompts is told:", write(notification, Shape(detail="summary")).decode().strip())

    def slow_reader(notification: Notification) -> object:
        told = ", ".join(f"{change.operation} {change.key}" for change in notification.changes)
        print("  a slow reader is told:", told)
        return BUSY

    hub.subscribe(prompt_reader, "prompts")
    slow = hub.subscribe(slow_reader, "tools", uris=["board://sprint/**"])

    print("A prompt is added, then added again with the same content (nobody needs to hear that):")
    review = {"name": "review", "description": "Review a change", "arguments": [{"name": "diff", "required": True}]}
    catalog.prompts.add(review)
    catalog.prompts.add(review, replace=True)

    print("Three tools come while the slow reader takes one notification at a time, and one of them goes again:")
    for name in ("plan", "scratch", "close_sprint"):
        catalog.tools.add({"name": name, "inputSchema": {"type": "object"}})
    catalog.tools.remove("scratch")
    print("It is ready again:")
    hub.wake(slow)

    print("A resource below the pattern it watches changes; the same etag twice is one change:")
    hub.wake(slow)
    catalog.resources.updated("board://sprint/42", etag="a", author="ada")
    hub.wake(slow)
    catalog.resources.updated("board://sprint/42", etag="a", author="ada")

    print("What changed since revision 2, from the journal:")
    for change in hub.journal.since(2) or ():
        print(f"  r{change.revision} {change.operation} {change.key}")
    print("\nTry next: make test, make bench, and docs/core.md for what the parts promise.")


if __name__ == "__main__":
    main()
