"""The names that the items of several servers have side by side.

A tool or prompt is `SERVER__NAME`. A URI or URI template stays as it is, unless a server before this one has it, too:
then it is `SERVER+URI`. So a name says, or the lists say, which server has the item.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from tidings.errors import TidingsError

__all__ = ["Owner", "check_server_names", "name_items", "name_uris", "split_name", "split_uri"]

_SERVER_NAME = re.compile(r"[A-Za-z](?:_?[A-Za-z0-9-])*")


class Owner(NamedTuple):
    """The server that has an item, and the name, URI or URI template that the item has there."""

    server: str
    own: str


def check_server_names(names: Iterable[str]) -> None:
    """Raise `TidingsError` for a name after which the name of an item could not be told apart."""
    for name in names:
        if not _SERVER_NAME.fullmatch(name):
            raise TidingsError(
                f"{name!r} is no name of a server: it must be a letter, then letters, digits, - or single _, without _ "
                "at the end"
            )


def name_items(items: Mapping[str, Iterable[str]]) -> dict[str, Owner]:
    """Return the tools or prompts of all servers by name."""
    return {f"{server}__{own}": Owner(server, own) for server, names in items.items() for own in names}


def name_uris(items: Mapping[str, Iterable[str]]) -> dict[str, Owner]:
    """Return the resources or templates of all servers by name. The order of the servers decides who keeps a URI."""
    owners: dict[str, Owner] = {}
    for server, uris in items.items():
        for own in uris:
            name = own
            while name in owners:
                name = f"{server}+{name}"
            owners[name] = Owner(server, own)
    return owners


def split_name(name: str, servers: Collection[str]) -> Owner | None:
    """Return the server that the name of a tool or prompt names, if there is one."""
    return _split(name, "__", servers)


def split_uri(uri: str, servers: Collection[str]) -> Owner | None:
    """Return the server that `SERVER+URI` names, if there is one."""
    return _split(uri, "+", servers)


def _split(name: str, separator: str, servers: Collection[str]) -> Owner | None:
    server, found, own = name.partition(separator)
    return Owner(server, own) if found and server in servers else None
