"""The names that the items of several servers have side by side.

A tool or prompt is `SERVER__NAME`. A URI or URI template stays as it is, unless a server before this one has it, too:
then it is `SERVER+URI`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from tidings.errors import TidingsError

__all__ = ["Owner", "check_server_names", "name_items", "split_name"]

_SERVER_NAME = re.compile(r"[A-Za-z](?:_?[A-Za-z0-9-])*")


class Owner(NamedTuple):
    """The server that has an item, and the name, URI or URI template that the item has there."""

    server: str
    own: str


def check_server_names(names: Iterable[str]) -> None:
    """Raise `TidingsError` if an item's name could belong to two servers."""
    for name in names:
        if not _SERVER_NAME.fullmatch(name):
            raise TidingsError(
                f"{name!r} is no name of a server: it must be a letter, then letters, digits, - and single _, "
                "without _ at the end"
            )


def name_items(items: Mapping[str, Iterable[str]], *, are_uris: bool) -> dict[str, Owner]:
    """Return the items of all servers by name. The order of the servers decides which one keeps a URI."""
    owners: dict[str, Owner] = {}
    for server, keys in items.items():
        for own in keys:
            name = own if are_uris else f"{server}__{own}"
            while name in owners:
                name = f"{server}+{name}"
            owners[name] = Owner(server, own)
    return owners


def split_name(name: str, servers: Collection[str], *, is_uri: bool) -> Owner | None:
    """Return the server with which a name begins, if there is one."""
    server, separator, own = name.partition("+" if is_uri else "__")
    return Owner(server, own) if separator and server in servers else None
