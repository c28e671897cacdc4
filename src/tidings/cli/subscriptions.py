"""`tidings subscriptions URL|DIR`: list and edit durable subscriptions, and show the state of webhooks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tidings.cli.auth import read_secret, read_token
from tidings.cli.control import Action, request_control
from tidings.cli.options import Lines, Target, Token, TokenFile, argument, is_url, option
from tidings.cli.output import fail, print_json_lines, print_stderr, print_stdout, print_table
from tidings.cli.state import edit_state, find_state, read_state, restore_hub
from tidings.core.model import Feature, topics_json
from tidings.core.redact import one_line
from tidings.server.granted_topics import RequestedTopics

if TYPE_CHECKING:
    from tidings.store import State
    from tidings.store.durable_registry import DurableSubscriptions

__all__ = ["subscriptions"]

_TITLES = ("name", "owner", "topics", "state", "delivered to", "until", "remarks")
_STYLES = {"dead": "red", "suspended": "red", "retrying": "yellow", "": "green"}


def subscriptions(
    target: Target = ".",
    action: Annotated[
        Action, argument("The action; revive resumes deliveries to a URL that the server had given up.")
    ] = Action.LIST,
    name: Annotated[str | None, argument("The name of the subscription.", "NAME", show_default=False)] = None,
    webhook: Annotated[str | None, option("add: the URL to deliver changes to.", "URL")] = None,
    feature: Annotated[
        list[Feature] | None,
        option(
            "add: a list to watch. May be repeated; the default is all lists, or none with --uri.",
            "tools|prompts|resources",
        ),
    ] = None,
    uri: Annotated[
        list[str] | None, option("add: a resource whose content to watch, or a pattern. May be repeated.", "URI")
    ] = None,
    secret_file: Annotated[
        Path | None,
        option(
            "add: the file with the secret that signs deliveries; several while you replace one by another. Without "
            "it, a new secret is created and shown once.",
            "FILE",
        ),
    ] = None,
    owner: Annotated[
        str | None, option("For a folder: the owner, if several callers use the same name.", "CLIENT[/SUBJECT]")
    ] = None,
    as_json: Lines = False,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """List and edit durable subscriptions.

    For a URL, the caller's own subscriptions. For a folder, all subscriptions of its server, whether or not it runs.
    """
    if (name is None) != (action is Action.LIST):
        fail(f"{action} requires the NAME of a subscription" if name is None else "list takes no name")
    for_add = {"--webhook": webhook, "--feature": feature, "--uri": uri, "--secret-file": secret_file}
    for given in (name for name, value in for_add.items() if value and action is not Action.ADD):
        fail(f"{given} is for add, not for {action}")
    if owner is not None and is_url(target):
        fail("--owner is for a folder; a server shows only the caller's own subscriptions")
    params: dict[str, Any] = {} if name is None else {"name": name}
    if action is Action.ADD:
        if webhook is None:
            fail("add requires --webhook URL; clients create other durable subscriptions themselves")
        features = feature or ([] if uri else list(Feature))
        params |= _make_put_params(webhook, features, uri or [], secret_file)
    if is_url(target):
        from tidings.cli.remote import run

        answer = run(_run_on_server(target, read_token(auth_token, auth_token_file), action, params))
    else:
        answer = _run_on_folder(Path(target), action, params, owner)
    if action is Action.REMOVE:
        if not answer["removed"]:
            fail(f"this caller has no subscription {name!r}" if is_url(target) else f"there is no {name!r}", 1)
        print_stderr(f"Removed {name}.")
        return
    if action is Action.REVIVE and answer["subscription"] is None:
        fail(f"there is no webhook {name!r}", 1)
    show = print_json_lines if as_json else _print
    show(answer["subscriptions"] if action is Action.LIST else [answer["subscription"]])
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


async def _run_on_server(url: str, token: str | None, action: Action, params: dict[str, Any]) -> dict[str, Any]:
    from tidings.cli.remote import connect
    from tidings.server.extension import SUBSCRIPTIONS

    method = {Action.LIST: "list", Action.REMOVE: "remove"}.get(action, "put")
    async with connect(url, token) as remote:
        if action is Action.REVIVE:
            known = (await remote.request(f"{SUBSCRIPTIONS}/list"))["subscriptions"]
            if params["name"] not in {each["name"] for each in known if "webhook" in each}:
                fail(f"this caller has no webhook {params['name']!r}", 1)
        return await remote.request(f"{SUBSCRIPTIONS}/{method}", **params)


# In a folder


def _run_on_folder(folder: Path, action: Action, params: dict[str, Any], owner: str | None) -> dict[str, Any]:
    path = find_state(folder)
    request = {"action": action, "params": params, "owner": owner}
    if (answer := request_control(path, request)) is not None:
        return answer
    from tidings.cli.manage import manage_subscriptions

    if action is Action.LIST:
        return manage_subscriptions(_restore(read_state(path)), request, is_running=False)
    with edit_state(path) as (state, batch):
        durables = _restore(state)
        answer = manage_subscriptions(durables, request, is_running=False)
        after = {durable.key: durable for durable in durables.all()}
        for key in state.durables.keys() | after.keys():
            # Not the others: restoring them marks those that were connected as interrupted.
            if key[1] == params["name"] and after.get(key) != state.durables.get(key):
                batch.durables[key] = after.get(key)
        return answer


def _restore(state: State) -> DurableSubscriptions:
    from tidings.store.durable_registry import DurableSubscriptions

    return DurableSubscriptions(restore_hub(state), state.durables.values())


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
    event: dict[str, Any] = described.get("event", {})
    requested, webhook = _read_topics(described), described.get("webhook", event)
    topics = (
        [_format_event(event)]
        if event
        else [*(feature.value for feature in requested.features), *(requested.resource_subscriptions or ())]
    )
    state = webhook.get("state") or ("connected" if described["connected"] else "disconnected")
    until = f"next attempt {webhook['nextAttempt']}" if "nextAttempt" in webhook else ""
    if described["expires"] is not None and not until:
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


def _format_event(event: dict[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in event.get("arguments", {}).items())
    return f"{event['name']}({arguments})"
