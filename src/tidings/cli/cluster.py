"""`tidings cluster status`: the replicas of a cluster, and whether they agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidings.cli.options import NatsCredentials, flag, option
from tidings.cli.output import fail, print_json_lines, print_stderr, print_table

if TYPE_CHECKING:
    from tidings.cluster.status import ClusterStatus

__all__ = ["cluster"]

cluster = typer.Typer(help="Show the replicas of a cluster.", rich_markup_mode=None)

_TITLES = ("server", "replica", "host", "process", "since", "version", "items", "streams", "lag", "lists")


@cluster.callback()
def _group() -> None:
    pass


@cluster.command("status")
def status(
    nats: Annotated[
        str, option("The URL of NATS.", "URL", envvar="TIDINGS_NATS", show_envvar=True)
    ] = "nats://127.0.0.1:4222",
    nats_credentials: NatsCredentials = None,
    name: Annotated[str | None, option("The name of one server; otherwise all servers in this NATS.", "NAME")] = None,
    timeout: Annotated[float, option("Seconds to wait until the replicas agree.", "SECONDS", min=0.1)] = 5.0,
    as_json: Annotated[bool, flag("--json", "Print one JSON object per replica and line.")] = False,
) -> None:
    """Print the replicas of each server, and exit with status 1 if two of them have different lists."""
    found = _read(nats, nats_credentials, name, timeout)
    if as_json:
        import msgspec

        print_json_lines(
            {"server": each.name, **msgspec.to_builtins(replica), "consistent": each.is_consistent}
            for each in found
            for replica in each.replicas
        )
    else:
        rows = [
            (
                each.name,
                *(replica.id, replica.host, str(replica.pid), replica.started[:16], replica.version),
                *(str(replica.items), str(replica.streams), str(replica.lag)),
                " ".join(digest[:8] for digest in replica.digests.values()),
            )
            for each in found
            for replica in each.replicas
        ]
        if rows:
            print_table(_TITLES, rows, 0, {"": "bold"})
        else:
            print_stderr("There are no replicas.")
    different = [each.name for each in found if not each.is_consistent]
    if different:
        fail(f"the replicas of {', '.join(different)} have different lists", 1)


def _read(url: str, credentials: Path | None, name: str | None, timeout: float) -> list[ClusterStatus]:
    from tidings.cli.remote import run
    from tidings.cluster.nats import Nats
    from tidings.cluster.status import read_status

    async def read() -> list[ClusterStatus]:
        backend = Nats(url, credentials=credentials)
        if name is None:
            names = await backend.list_servers()
        else:
            names = [name] if await backend.has_server(name) else []  # reading a table would create it
        return [await read_status(Nats(url, credentials=credentials), each, timeout) for each in names]

    return run(read())
