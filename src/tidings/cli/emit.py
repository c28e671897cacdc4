"""`tidings emit DIR NAME JSON`: publish an event of a served workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tidings.cli.control import EMIT, request_control
from tidings.cli.options import Folder, argument, flag, option, read_object
from tidings.cli.output import fail, print_json_lines, print_stdout
from tidings.cli.state import find_state

__all__ = ["emit"]


def emit(
    folder: Folder,
    name: Annotated[str, argument("The name of the event, as in events/NAME.meta.json.", "NAME")],
    data: Annotated[str, argument("The data of the event, an object; - reads it from standard input.", "JSON")],
    matching: Annotated[
        str | None,
        option("The values that the arguments of a subscription must equal. The default is the data.", "JSON"),
    ] = None,
    event_id: Annotated[
        str | None, option("The id, if another service gave the event one. The default is a new id.", None, "--id")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the id as one line of JSON.")] = False,
) -> None:
    """Publish an event to the clients that subscribed to it, through the server that runs with this folder.

    The server stores the event before this command ends, and delivers it afterwards. The command prints the id.
    """
    params: dict[str, Any] = {
        "name": name,
        "data": read_object("JSON", data),
        "matching": None if matching is None else read_object("--matching", matching),
        "event_id": event_id,
    }
    path = find_state(Path(folder))
    answer = request_control(path, {"action": EMIT, "params": params, "owner": None})
    if answer is None:
        fail(f"no server runs with {path}; start it with `tidings serve {folder}`", 1)
    if as_json:
        print_json_lines([answer])
    else:
        print_stdout(answer["eventId"])
