"""The state file of a workspace, for commands that read or edit it without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tidings.cli.folder import check_folder, state_file
from tidings.cli.output import fail

if TYPE_CHECKING:
    from tidings.store import Batch, State
    from tidings.store.durable import Durables

__all__ = ["durables_of", "edited", "find_state", "look"]


def find_state(target: Path) -> Path:
    """The file itself if it is named, else the one of a workspace."""
    if target.is_file():
        return target
    check_folder(target)
    path = state_file(target)
    if not path.exists():
        fail(f"{target} remembers nothing yet: {path} is not there; `tidings serve {target}` begins it")
    return path


def look(path: Path) -> State:
    """What is in it, whether or not a server has it."""
    from tidings.store.sqlite import peek

    return peek(path)


@contextmanager
def edited(path: Path) -> Iterator[tuple[State, Batch]]:
    """What is in it, and a batch that is written at the end. Not while a server has it."""
    from tidings.store import Batch, StoreBusy
    from tidings.store.sqlite import SQLiteStore

    store = SQLiteStore(path)
    batch = Batch()
    try:
        yield store.open(), batch
        if batch:
            store.write(batch)
    except StoreBusy:
        fail(f"a server is running with {path}; give its URL in place of the folder, or stop it first")
    finally:
        store.close()


def durables_of(state: State) -> Durables:
    """The durable subscriptions in it, as a server that has just been started with it knows them."""
    from tidings.core.catalog import Catalog
    from tidings.core.hub import Hub
    from tidings.core.journal import Journal
    from tidings.server.uri_templates import read_template
    from tidings.store.durable import Durables

    catalog, journal = Catalog(), Journal()
    catalog.restore(state.items, state.versions, state.contents, state.life << 32, state.forgotten)
    journal.restore(state.journal, state.floors)
    return Durables(Hub(catalog, journal=journal, templates=read_template), state.durables.values())
