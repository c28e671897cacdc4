"""`tidings subscriptions URL|DIR`: who is to be told of changes also when not there, and how webhooks fare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.cli.output import fail, print_line, say
from tidings.cli.remote import Target, Token, TokenFile, connected, is_url, run, token_of
from tidings.core.model import Feature
from tidings.core.redact import plain

if TYPE_CHECKING:
    from tidings.store import State
    from tidings.store.durable import Durable, Key, Owner

__all__ = ["subscriptions"]

_METHOD = "dev.tidings/subscriptions"


class _Action(StrEnum):
    LIST = "list"
    ADD = "add"
    REMOVE = "remove"
    REVIVE = "revive"


def subscriptions(
    target: Target = ".",
    action: Annotated[
        _Action, typer.Argument(help="What to do; revive tries a webhook again that was given up.")
    ] = _Action.LIST,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which subscription.", show_default=False)] = None,
    webhook: Annotated[str | None, typer.Option(help="add: where changes are delivered to.", metavar="URL")] = None,
    feature: Annotated[
        list[Feature] | None, typer.Option(help="add: a list to watch. May be repeated; all of them without any.")
    ] = None,
    uri: Annotated[
        list[str] | None,
        typer.Option(help="add: a resource whose content to watch, or a pattern. May be repeated.", metavar="URI"),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help="add: the secret that signs deliveries, read from a file; several while one replaces another. "
            "Without it, one is made, and shown once.",
            metavar="FILE",
            readable=False,
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(help="In a folder: whose, where several callers use a name.", metavar="CLIENT[/SUBJECT]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """List durable subscriptions; add a webhook, remove a subscription, revive a webhook.

    Of a URL, the caller's own. Of a folder, all that its state file holds; they can be changed there while no server
    has it.
    """
    if (name is None) != (action is _Action.LIST):
        fail(f"{action} needs the NAME of a subscription" if name is None else "list takes no name")
    show = _print_json if as_json else _print
    if action is _Action.ADD:
        if webhook is None:
            fail("add needs --webhook URL; other subscriptions are made by their clients, who come to be told")
        chosen = [each.value for each in feature or ([] if uri else Feature)]
        params = _wanted(str(name), webhook, chosen, uri or [], secret_file)
    else:
        params = {"name": name} if name is not None else {}
    if is_url(target):
        answer = run(_ask(target, token_of(auth_token, auth_token_file), action, params))
    else:
        answer = _edit(Path(target), action, params, owner)
    if action is _Action.REMOVE:
        if not answer["removed"]:
            fail(f"there is no {name!r} of this caller's" if is_url(target) else f"there is no {name!r}", 1)
        say(f"Removed {name}.")
        return
    show(answer["subscriptions"] if action is _Action.LIST else [answer["subscription"]])
    if "secret" in answer:
        if as_json:
            print_line({"name": name, "secret": answer["secret"]})
        else:
            typer.echo(f"The secret that signs its deliveries, shown this once: {answer['secret']}")


def _wanted(name: str, url: str, features: list[str], uris: list[str], secret_file: Path | None) -> dict[str, Any]:
    """What `put` is given."""
    notifications: dict[str, Any] = {f"{feature}ListChanged": True for feature in features}
    if "" in uris:
        fail("a --uri is empty; give the URI of a resource, or a pattern as board://*")
    if uris:
        notifications["resourceSubscriptions"] = uris
    hook = {"url": url}
    if secret_file is not None:
        try:
            hook["secret"] = secret = " ".join(secret_file.read_text("utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            fail(f"the secret in {secret_file} can't be read: {getattr(error, 'strerror', None) or 'not UTF-8'}")
        if not secret:
            fail(f"there is no secret in {secret_file}; leave --secret-file out to be given one")
    return {"name": name, "notifications": notifications, "webhook": hook}


# Of a server


async def _ask(url: str, token: str | None, action: _Action, params: dict[str, Any]) -> dict[str, Any]:
    method = {_Action.LIST: "list", _Action.REMOVE: "remove"}.get(action, "put")
    async with connected(url, token) as remote:
        if action is _Action.REVIVE:
            there = (await remote.ask(f"{_METHOD}/list"))["subscriptions"]
            if params["name"] not in {each["name"] for each in there if "webhook" in each}:
                fail(f"there is no webhook {params['name']!r} of this caller's", 1)
        return await remote.ask(f"{_METHOD}/{method}", **params)


# Of a folder


def _edit(folder: Path, action: _Action, params: dict[str, Any], owner: str | None) -> dict[str, Any]:
    from msgspec import structs

    from tidings.cli.state import edited, find_state, look

    path = find_state(folder)
    if action is _Action.LIST:
        return {"subscriptions": [_described(each) for each in look(path).durables.values() if _is(each, owner)]}
    with edited(path) as (state, batch):
        if action is _Action.ADD:
            durable, secret = _made(state, params)
            batch.durables[durable.key] = durable
            return {"subscription": _described(durable)} | secret
        found = _found(state, params["name"], owner)
        if action is _Action.REMOVE:
            for key in found:
                batch.durables[key] = None
            return {"removed": bool(found)}
        known = state.durables[found[0]] if found else None
        if known is None or known.webhook is None:
            fail(f"there is no webhook {params['name']!r}", 1)
        revived = structs.replace(known, expires=None, webhook=known.webhook.revived())
        batch.durables[revived.key] = revived
        return {"subscription": _described(revived)}


def _found(state: State, name: str, owner: str | None) -> list[Key]:
    found = [key for key, each in state.durables.items() if each.name == name and _is(each, owner)]
    if len(found) > 1:
        owners = ", ".join(_owner(key[0]) or "nobody" for key in found)
        fail(f"{name!r} is the name of several subscriptions, of {owners}; say whose with --owner")
    return found


def _made(state: State, params: dict[str, Any]) -> tuple[Durable, dict[str, str]]:
    """A webhook that knows everything as of now, or what the one that has its name was told."""
    from tidings.cli.state import durables_of
    from tidings.store.durable import SERVER, Durable, Webhook
    from tidings.webhooks.http_client import check_url
    from tidings.webhooks.signature import check_secret, new_secret

    hook, wanted = params["webhook"], params["notifications"]
    check_url(hook["url"], allow_loopback=True)
    durables = durables_of(state)
    known = durables.get((SERVER, params["name"]))
    secret = hook.get("secret") or (known.webhook.secret if known and known.webhook else None)
    shown = {} if secret else {"secret": new_secret()}
    durable = Durable(
        name=params["name"],
        owner=SERVER,
        features=tuple(feature for feature in Feature if f"{feature.value}ListChanged" in wanted),
        uris=tuple(wanted.get("resourceSubscriptions", ())),
        ttl=durables.hub.policy.durable_ttl,
        webhook=Webhook(url=hook["url"], secret=check_secret(secret or shown["secret"])),
    )
    return durables.put(durable), shown


def _described(durable: Durable) -> dict[str, Any]:
    from tidings.store.durable_json import as_json

    described = as_json(durable, is_connected=durable.expires is None)
    return {"name": described.pop("name"), "owner": _owner(durable.owner), **described}


def _owner(owner: Owner) -> str | None:
    return None if owner is None else "/".join(each for each in owner if each is not None)


def _is(durable: Durable, owner: str | None) -> bool:
    return owner is None or _owner(durable.owner) == owner


# What is printed


def _print_json(found: Sequence[dict[str, Any]]) -> None:
    for each in found:
        print_line(each)


def _print(found: Sequence[dict[str, Any]]) -> None:
    if not found:
        say("There are no durable subscriptions.")
    elif sys.stdout.isatty():
        _print_table(found)
    else:
        for each in found:
            typer.echo("  ".join(cell for cell in _cells(each) if cell))


def _print_table(found: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("name", "owner", "watches", "state", "told by", "until", "remarks"):
        table.add_column(title, overflow="fold")
    for each in found:
        cells = list(map(Text, _cells(each)))
        cells[3].stylize({"dead": "red", "retrying": "yellow"}.get(str(cells[3]), "green"))
        table.add_row(*cells)
    Console().print(table)


def _cells(each: dict[str, Any]) -> tuple[str, ...]:
    watched = [name.removesuffix("ListChanged") for name in each["notifications"] if name.endswith("ListChanged")]
    watched += each["notifications"].get("resourceSubscriptions", [])
    hook = each.get("webhook", {})
    state = hook.get("state") or ("connected" if each["connected"] else "away")
    until = f"tried again {hook['nextAttempt']}" if "nextAttempt" in hook else ""
    if each["expires"] is not None:
        until = f"kept until {each['expires']}"
    remarks = [f"{hook['lastError']} ({hook['attempts']} attempts)"] if hook.get("attempts") else []
    if "refetch" in hook:
        remarks.append(f"missed too much, and has yet to be told to refetch {', '.join(hook['refetch'])}")
    elif "lastRefetch" in hook:
        remarks.append(f"missed too much, and was told to refetch at {hook['lastRefetch']}")
    by = hook.get("url", "a stream")
    cells = (each["name"], each.get("owner") or "", ", ".join(watched), state, by, until, "; ".join(remarks))
    return tuple(map(plain, cells))  # names are their clients': nothing in them may command a terminal
