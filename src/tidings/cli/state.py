"""The state file of a workspace, for commands that read or edit it without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tidings.cli.folder import check_folder, default_state_file
from tidings.cli.output import fail

if TYPE_CHECKING:
    from tidings.store import Batch, State
    from tidings.store.durable_registry import DurableSubscriptions

__all__ = ["edit_state", "find_state", "read_state", "restore_durables"]


def find_state(target: Path) -> Path:
    """Return the state file: the target itself if it is a file, else the default file of a workspace."""
    if target.is_file():
        return target
    check_folder(target)
    path = default_state_file(target)
    if not path.exists():
        fail(f"{target} has no state yet: {path} does not exist; `tidings serve {target}` creates it")
    return path


def read_state(path: Path) -> State:
    """Return the stored state, whether or not a server uses the file."""
    from tidings.store.sqlite import peek

    return peek(path)


@contextmanager
def edit_state(path: Path) -> Iterator[tuple[State, Batch]]:
    """Yield the stored state and a batch, and write the batch at the end. Fail if a server uses the file."""
    from tidings.store import Batch, StoreBusy
    from tidings.store.sqlite import SQLiteStore

    store = SQLiteStore(path)
    batch = Batch()
    try:
        yield store.open(), batch
        if batch:
            store.write(batch)
    except StoreBusy:
        fail(f"a server is running with {path}; give its URL instead of the folder, or stop it first")
    finally:
        store.close()


def restore_durables(state: State) -> DurableSubscriptions:
    """Return the durable subscriptions that a server would have after it starts with this state."""
    from tidings.core.catalog import Catalog
    from tidings.core.hub import Hub
    from tidings.core.journal import Journal
    from tidings.server.uri_templates import read_template
    from tidings.store.durable_registry import DurableSubscriptions

    catalog, journal = Catalog(), Journal()
    catalog.restore(state.items, state.versions, state.contents, state.run << 32, state.forgotten)
    journal.restore(state.journal, state.floors)
    return DurableSubscriptions(Hub(catalog, journal=journal, templates=read_template), state.durables.values())
