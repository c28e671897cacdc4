"""`tidings subscriptions URL|DIR`: list and edit durable subscriptions, and show the state of webhooks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tidings.cli.auth import read_secret, read_token
from tidings.cli.options import Target, Token, TokenFile, is_url
from tidings.cli.output import fail, print_json_lines, print_stderr, print_stdout, print_table
from tidings.cli.state import edit_state, find_state, read_state, restore_hub
from tidings.core.model import Feature, topics_json
from tidings.core.redact import one_line
from tidings.server.granted_topics import RequestedTopics

if TYPE_CHECKING:
    from tidings.store import State
    from tidings.store.durable import DurableSubscription, Key, Owner

__all__ = ["subscriptions"]

_TITLES = ("name", "owner", "topics", "state", "delivered to", "until", "remarks")
_STYLES = {"dead": "red", "retrying": "yellow", "": "green"}


class _Action(StrEnum):
    LIST = "list"
    ADD = "add"
    REMOVE = "remove"
    REVIVE = "revive"


def subscriptions(
    target: Target = ".",
    action: Annotated[
        _Action, typer.Argument(help="The action; revive resumes deliveries to a webhook that is dead.")
    ] = _Action.LIST,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The name of the subscription.", show_default=False)
    ] = None,
    webhook: Annotated[str | None, typer.Option(help="add: the URL to deliver changes to.", metavar="URL")] = None,
    feature: Annotated[
        list[Feature] | None,
        typer.Option(
            help="add: a list to watch. May be repeated; the default is all lists, or none with --uri.",
            metavar="tools|prompts|resources",
        ),
    ] = None,
    uri: Annotated[
        list[str] | None,
        typer.Option(help="add: a resource whose content to watch, or a pattern. May be repeated.", metavar="URI"),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help="add: the file with the secret that signs deliveries; several while you replace one by another. "
            "Without it, a new secret is created and shown once.",
            metavar="FILE",
            readable=False,
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(help="For a folder: the owner, if several callers use the same name.", metavar="CLIENT[/SUBJECT]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """List and edit durable subscriptions.

    For a URL, the caller's own subscriptions. For a folder, all subscriptions in its state file, which can be edited
    while no server uses it.
    """
    if (name is None) != (action is _Action.LIST):
        fail(f"{action} requires the NAME of a subscription" if name is None else "list takes no name")
    params: dict[str, Any] = {} if name is None else {"name": name}
    if action is _Action.ADD:
        if webhook is None:
            fail("add requires --webhook URL; clients create other durable subscriptions themselves")
        features = feature or ([] if uri else list(Feature))
        params |= _make_put_params(webhook, features, uri or [], secret_file)
    if is_url(target):
        from tidings.cli.remote import run

        answer = run(_run_on_server(target, read_token(auth_token, auth_token_file), action, params))
    else:
        answer = _run_on_file(Path(target), action, params, owner)
    if action is _Action.REMOVE:
        if not answer["removed"]:
            fail(f"this caller has no subscription {name!r}" if is_url(target) else f"there is no {name!r}", 1)
        print_stderr(f"Removed {name}.")
        return
    show = print_json_lines if as_json else _print
    show(answer["subscriptions"] if action is _Action.LIST else [answer["subscription"]])
    if "secret" in answer:
        if as_json:
            print_json_lines([{"name": name, "secret": answer["secret"]}])
        else:
            print_stdout(f"The secret that signs its deliveries, shown only now: {answer['secret']}")


def _make_put_params(url: str, features: list[Feature], uris: list[str], secret_file: Path | None) -> dict[str, Any]:
    """Return the params of `dev.tidings/subscriptions/put`, without the name."""
    if "" in uris:
        fail("--uri is empty; give the URI of a resource, or a pattern like board://*")
    webhook = {"url": url}
    if secret_file is not None:
        webhook["secret"] = secret = " ".join(read_secret("secret", secret_file).split())
        if not secret:
            fail(f"{secret_file} contains no secret; without --secret-file, a new one is created")
    return {"notifications": topics_json(features, uris), "webhook": webhook}


def _read_topics(described: dict[str, Any]) -> RequestedTopics:
    return msgspec.convert(described["notifications"], RequestedTopics)


# On a server


async def _run_on_server(url: str, token: str | None, action: _Action, params: dict[str, Any]) -> dict[str, Any]:
    from tidings.cli.remote import connect
    from tidings.server.extension import SUBSCRIPTIONS

    method = {_Action.LIST: "list", _Action.REMOVE: "remove"}.get(action, "put")
    async with connect(url, token) as remote:
        if action is _Action.REVIVE:
            known = (await remote.request(f"{SUBSCRIPTIONS}/list"))["subscriptions"]
            if params["name"] not in {each["name"] for each in known if "webhook" in each}:
                fail(f"this caller has no webhook {params['name']!r}", 1)
        return await remote.request(f"{SUBSCRIPTIONS}/{method}", **params)


# In a folder


def _run_on_file(folder: Path, action: _Action, params: dict[str, Any], owner: str | None) -> dict[str, Any]:
    path = find_state(folder)
    if action is _Action.LIST:
        durables = read_state(path).durables.values()
        return {"subscriptions": [_describe(durable) for durable in durables if _has_owner(durable, owner)]}
    with edit_state(path) as (state, batch):
        if action is _Action.ADD:
            durable, new_secret = _put_webhook(state, params)
            batch.durables[durable.key] = durable
            return {"subscription": _describe(durable)} | new_secret
        key = _find_key(state, params["name"], owner)
        if action is _Action.REMOVE:
            if key is not None:
                batch.durables[key] = None
            return {"removed": key is not None}
        known = state.durables[key] if key is not None else None
        if known is None or known.webhook is None:
            fail(f"there is no webhook {params['name']!r}", 1)
        revived = batch.durables[known.key] = known.revived()
        return {"subscription": _describe(revived)}


def _find_key(state: State, name: str, owner: str | None) -> Key | None:
    keys = [key for key, each in state.durables.items() if each.name == name and _has_owner(each, owner)]
    if len(keys) > 1:
        owners = ", ".join(_format_owner(key[0]) or "no owner" for key in keys)
        fail(f"several subscriptions have the name {name!r} ({owners}); choose one with --owner")
    return keys[0] if keys else None


def _put_webhook(state: State, params: dict[str, Any]) -> tuple[DurableSubscription, dict[str, str]]:
    """Create or replace a webhook. A new one starts with the current versions as told. Return it, and a new secret."""
    from tidings.store.durable import SERVER
    from tidings.store.durable_registry import DurableSubscriptions
    from tidings.webhooks.create import put_server_webhook

    name, requested, secret = params["name"], _read_topics(params), params["webhook"].get("secret")
    durables = DurableSubscriptions(restore_hub(state), state.durables.values())
    known = durables.get((SERVER, name))
    durable = put_server_webhook(
        durables,
        name,
        params["webhook"]["url"],
        requested.features,
        requested.resource_subscriptions or (),
        secret=secret,
    )
    is_new_secret = secret is None and (known is None or known.webhook is None)
    return durable, {"secret": durable.webhook.secret} if is_new_secret and durable.webhook is not None else {}


def _describe(durable: DurableSubscription) -> dict[str, Any]:
    from tidings.store.durable import as_json

    described = as_json(durable, is_connected=durable.expires is None)
    return {"name": described.pop("name"), "owner": _format_owner(durable.owner), **described}


def _format_owner(owner: Owner) -> str | None:
    return None if owner is None else "/".join(part for part in owner if part is not None)


def _has_owner(durable: DurableSubscription, owner: str | None) -> bool:
    return owner is None or _format_owner(durable.owner) == owner


# Printing


def _print(found: Sequence[dict[str, Any]]) -> None:
    if not found:
        print_stderr("There are no durable subscriptions.")
    elif sys.stdout.isatty():
        print_table(_TITLES, map(_format_cells, found), _TITLES.index("state"), _STYLES)
    else:
        for each in found:
            print_stdout("  ".join(cell for cell in _format_cells(each) if cell))


def _format_cells(described: dict[str, Any]) -> tuple[str, ...]:
    requested, webhook = _read_topics(described), described.get("webhook", {})
    topics = [*(feature.value for feature in requested.features), *(requested.resource_subscriptions or ())]
    state = webhook.get("state") or ("connected" if described["connected"] else "disconnected")
    until = f"next attempt {webhook['nextAttempt']}" if "nextAttempt" in webhook else ""
    if described["expires"] is not None:
        until = f"kept until {described['expires']}"
    remarks = [f"{webhook['lastError']} ({webhook['attempts']} attempts)"] if webhook.get("attempts") else []
    if "refetch" in webhook:
        remarks.append(f"missed too many changes; will be told to refetch {', '.join(webhook['refetch'])}")
    elif "lastRefetch" in webhook:
        remarks.append(f"missed too many changes; was told to refetch at {webhook['lastRefetch']}")
    cells = (
        described["name"],
        described.get("owner") or "",
        ", ".join(topics),
        state,
        webhook.get("url", "a stream"),
        until,
        "; ".join(remarks),
    )
    return tuple(map(one_line, cells))  # a client's text must not control the terminal
