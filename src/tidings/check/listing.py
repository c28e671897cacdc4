"""The lists of a server as a check reads and compares them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from tidings.core.redact import one_line
from tidings.wire.methods import LIST_METHODS, METHOD_NOT_FOUND, READ_RESOURCE
from tidings.wire.paging import EndlessPages, read_pages
from tidings.wire.session import Frame, Session, Unanswered, as_dict

__all__ = ["Refused", "ServerList", "read_content", "read_list", "read_lists"]


class Refused(Unanswered):
    """The server does not give a list: it answers with an error, or its pages never end."""

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(reason)
        self.method = method


@dataclass
class ServerList:
    """All pages of one list of the server."""

    items: dict[str, Any]
    """The items by key, in the order of the server."""
    pages: list[Frame] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return list(self.items)


async def read_list(
    session: Session, method: str, on_page: Callable[[str, Frame], object] = lambda method, page: None
) -> ServerList:
    """Read all pages of a list. It is empty if the server does not have the method."""
    listed = LIST_METHODS[method]
    items: dict[str, Any] = {}
    pages: list[Frame] = []

    async def request(cursor: str | None) -> dict[str, Any]:
        frame = await session.request(method, **({} if cursor is None else {"cursor": cursor}))
        result, error = frame.result, frame.message.get("error")
        if isinstance(error, dict) and error.get("code") == METHOD_NOT_FOUND and not pages:
            return {}
        if isinstance(error, dict):
            raise Refused(method, f"{method} was answered with {one_line(json.dumps(error), 200)}")
        if result is None or not isinstance(result.get(listed.member), list):
            raise Unanswered(f"{method} was answered with {one_line(json.dumps(frame.content), 200)}")
        pages.append(frame)
        on_page(method, frame)
        return result

    try:
        async for page in read_pages(method, request):
            found = page.get(listed.member, ())
            items |= {str(as_dict(item).get(listed.key)): _without_volatile(item) for item in found}
    except EndlessPages as error:
        raise Refused(method, str(error)) from None
    return ServerList(items, pages)


async def read_lists(
    session: Session, refused: Collection[str], on_page: Callable[[str, Frame], object]
) -> dict[str, ServerList]:
    """Read the lists of all features that the server declares, except for those that it refused.

    Call `on_page` with the method and each page, also if a later list is refused."""
    return {
        method: await read_list(session, method, on_page)
        for method, listed in LIST_METHODS.items()
        if session.capability(listed.feature) is not None and method not in refused
    }


async def read_content(session: Session, uri: str) -> Any:
    """Return the contents of a resource, or None if it can't be read."""
    frame = await session.request(READ_RESOURCE, uri=uri)
    return (frame.result or {}).get("contents")


def _without_volatile(item: Any) -> Any:
    """Return an item without `size` and `lastModified`. They change with its content, of which `resources/updated`
    notifies, and not with the list."""
    if not isinstance(item, dict):
        return item
    annotations = {name: value for name, value in as_dict(item.get("annotations")).items() if name != "lastModified"}
    return {**item, "size": None, "annotations": annotations}
