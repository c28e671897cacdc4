"""`tidings top URL`: show the overview of a running server's console in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urljoin

from tidings.cli.auth import TOKEN_VARIABLE, read_token
from tidings.cli.options import Token, TokenFile, argument, flag, is_url
from tidings.cli.output import fail, pluralize, print_json_lines, print_stderr, print_stdout, render_rows
from tidings.core.redact import one_line
from tidings.errors import TidingsError
from tidings.wire.sse import read_events

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["top"]

_RETRY_DELAY = 1.0
"""Seconds between two attempts to connect."""

_READ_TIMEOUT = 30.0
"""Seconds without an event after which the connection counts as lost. The server sends one every ten seconds."""

_BARS = "▁▂▃▄▅▆▇█"
_MAX_SAMPLES = 60
_MEMBERS = frozenset(
    {
        *("server", "clients", "pending", "slow", "delivered", "deliveriesPerSecond", "latency", "suppressed"),
        *("catalog", "revision", "failures", "problems", "webhooks", "replicas", "history"),
    }
)
"""The members of an overview that are shown."""
_MAX_ROWS = 6
"""Rows for problems, and as many for webhooks and for replicas."""

_Show = Callable[[dict[str, Any]], None]


def top(
    target: Annotated[str, argument("A running server, for example its endpoint.", "URL")],
    as_json: Annotated[bool, flag("--json", "Print each overview as one line of JSON.")] = False,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """Show how busy a server is: clients, deliveries, latency, errors, webhooks and replicas.

    The numbers are the same as in the console of the server, and are updated live. Stop with Ctrl-C.
    """
    if not is_url(target, "the URL of a served workspace"):
        fail(f"{target}: top needs the URL of a running server, for example http://127.0.0.1:8765/mcp")
    from tidings.cli.remote import check_url, run

    check_url(target)
    token = read_token(auth_token, auth_token_file)
    with ExitStack() as stack:
        show: _Show
        if as_json:
            show = _print_json
        elif sys.stdout.isatty():
            from rich.live import Live

            display = stack.enter_context(Live(auto_refresh=False, transient=False))

            def update(overview: dict[str, Any]) -> None:
                display.update(_render(overview), refresh=True)

            show = update
        else:
            show = _print_line
        run(_show_all(_console_url(target), token, show))


def _console_url(target: str) -> str:
    """Return the URL of the console. `target` is the URL of the endpoint or of the console."""
    base = target.partition("?")[0].rstrip("/")
    return base if base.endswith("/console") else urljoin(base, "console")


async def _show_all(url: str, token: str | None, show: _Show) -> None:
    """Show each overview until Ctrl-C. Connect again if the server restarts."""
    import asyncio

    from tidings.cli.remote import Unreachable

    was_reached = False
    while True:
        try:
            async for overview in _overviews(url, token):
                was_reached = True
                show(overview)
            print_stderr(f"{url} has stopped; waiting for it to restart.")
        except Unreachable as error:
            if not was_reached:
                raise
            print_stderr(f"{error}; trying again.")
        await asyncio.sleep(_RETRY_DELAY)


async def _overviews(url: str, token: str | None) -> AsyncIterator[dict[str, Any]]:
    """Yield the overview with its history, first the current one and then each new one, until the server stops."""
    import httpx2
    import msgspec

    from tidings.cli.remote import Unreachable, bearer_headers
    from tidings.wire.http import make_http_client

    try:
        async with make_http_client(url, headers=bearer_headers(token), timeout=_READ_TIMEOUT) as http:
            response = await http.get(f"{url}/api/overview")
            _check(url, response.status_code, response.text, has_token=bool(token))
            overview = msgspec.json.decode(response.content, type=dict[str, Any])
            if not overview.keys() >= _MEMBERS:
                raise TidingsError(f"{url} is not the console of a Tidings server, or of another version")
            yield overview
            async with http.stream("GET", f"{url}/api/events") as events:
                if events.status_code != 200:
                    _check(url, events.status_code, (await events.aread()).decode(), has_token=bool(token))
                async for event in read_events(events.aiter_bytes()):
                    if event.name == "overview":
                        overview = _add_history(msgspec.json.decode(event.data), overview["history"])
                        yield overview
    except httpx2.RemoteProtocolError:
        return  # the server was stopped
    except (httpx2.HTTPError, OSError) as error:
        raise Unreachable(f"{url} can't be reached: {str(error) or type(error).__name__}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise TidingsError(f"{url} is not the console of a Tidings server") from None


def _add_history(overview: dict[str, Any], history: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a new overview with the history of the previous one and its own sample."""
    sample = overview.pop("sample", None)
    if sample is not None and sample["time"] not in history["times"][-1:]:
        new = {"times": sample["time"], "deliveries": sample["deliveries"], "p95": sample["p95"]}
        history = {name: [*values, new[name]][-300:] for name, values in history.items()}
    return overview | {"history": history}


def _check(url: str, status: int, text: str, *, has_token: bool) -> None:
    from tidings.cli.remote import Unreachable

    if status == 200:
        return
    if status == 401:
        refusal = "does not accept this token" if has_token else "requires a token"
        raise TidingsError(f"{url} {refusal}; give one with --auth-token-file FILE, or {TOKEN_VARIABLE}")
    if status == 404:
        raise TidingsError(f"{url}: the server has no console; start it with --console=read")
    kind = Unreachable if status >= 500 else TidingsError  # for example a proxy whose server restarts
    raise kind(f"{url} answered {status}: {one_line(_error_in(text), 300)}")


def _error_in(text: str) -> str:
    import msgspec

    try:
        return str(msgspec.json.decode(text, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, KeyError):
        return "this is not the console of a Tidings server"


def _print_json(overview: dict[str, Any]) -> None:
    print_json_lines([overview])


def _print_line(overview: dict[str, Any]) -> None:
    cells = [
        time.strftime("%H:%M:%S"),
        pluralize(overview["clients"], "client"),
        f"{overview['deliveriesPerSecond']:g}/s",
        f"p95 {_seconds(overview['latency']['p95'])}",
        f"{overview['pending']} pending",
        f"revision {overview['revision']}",
        pluralize(len(overview["problems"]), "problem"),
    ]
    print_stdout("  ".join(cells))


def _render(overview: dict[str, Any]) -> RenderableType:
    server = overview["server"]
    return render_rows(one_line(f"{server['name']} {server['version']}".strip()), _list_rows(overview))


def _list_rows(overview: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Yield the label, the text and the style of each row."""
    latency = overview["latency"]
    waiting = f"{overview['pending']} topics pending, {overview['slow']} slow"
    yield "clients", f"{overview['clients']}, {waiting}", "yellow" if overview["slow"] else ""
    rates = overview["history"]["deliveries"][-_MAX_SAMPLES:]
    yield "deliveries", f"{overview['delivered']}, {overview['deliveriesPerSecond']:g}/s  {_bars(rates)}", ""
    yield "latency", "  ".join(f"{name} {_seconds(latency[name])}" for name in ("p50", "p95", "p99")), ""
    suppressed = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in overview["suppressed"].items())
    if suppressed:
        yield "suppressed", suppressed, ""
    for feature, found in overview["catalog"].items():
        yield "catalog", f"{found['items']} {feature}, revision {found['revision']}, {found['digest'][:8]}", ""
    for name, number in overview["failures"].items():
        yield "failures", f"{number} {name}", "red"
    for problem in overview["problems"][:_MAX_ROWS]:
        location = problem["file"] if problem["line"] is None else f"{problem['file']}:{problem['line']}"
        yield "problems", f"{location}: {problem['text']}", "red"
    for webhook in overview["webhooks"][:_MAX_ROWS]:
        reason = f": {webhook['lastError']}" if webhook["lastError"] and webhook["state"] != "active" else ""
        style = {"active": "", "retrying": "yellow"}.get(webhook["state"], "red")
        yield "webhooks", f"{webhook['name']} {webhook['state']}{reason}", style
    for replica in overview["replicas"][:_MAX_ROWS]:
        is_self = " (this one)" if replica["isSelf"] else ""
        digest = replica["digests"].get("tools", "")[:8]
        text = f"{replica['host']}:{replica['pid']}{is_self}, {pluralize(replica['streams'], 'stream')}, tools {digest}"
        yield "replicas", f"{text}, {replica['lag']} behind", ""


def _bars(values: list[float]) -> str:
    highest = max(values, default=0.0)
    if not highest:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(value / highest * len(_BARS)))] for value in values)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.2g} ms" if value < 1 else f"{value:.2g} s"
