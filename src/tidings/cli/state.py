"""The state file of a workspace: as the store of a server, and for commands that read or edit it without a server."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tidings.cli.folder import check_folder
from tidings.cli.output import fail
from tidings.core.catalog import Catalog
from tidings.core.hub import Hub
from tidings.core.journal import Journal
from tidings.policy import Policy

if TYPE_CHECKING:
    from tidings.store import Batch, State
    from tidings.store.opened import OpenedStore

__all__ = ["choose_state_file", "edit_state", "find_state", "open_store", "read_state", "restore_hub"]


def open_store(root: Path, state: str | None) -> OpenedStore | None:
    """Return the store of a server. `state` is the path of the file, "none", or None for the default file."""
    path = choose_state_file(root, state)
    if path is None:
        return None
    if state is not None and not path.parent.is_dir():
        fail(f"--state {state}: the folder {path.parent} does not exist; create it, or choose another file")
    from tidings.store.opened import OpenedStore
    from tidings.store.sqlite import SQLiteStore

    # Each stdio client starts a process of its own, so a default file that another process uses needs no warning.
    return OpenedStore(SQLiteStore(path), is_explicit=state is not None)


def choose_state_file(root: Path, state: str | None) -> Path | None:
    """Return the path of the state file of a server, with `state` as in `open_store`; None for no file."""
    if state == "none":
        return None
    return _default_file(root) if state is None else Path(state)


def find_state(target: Path) -> Path:
    """Return the state file: the target itself if it is a file, else the default file of a workspace."""
    if target.is_file():
        return target
    check_folder(target)
    path = _default_file(target)
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
        fail(f"a server is running with {path}, and does not answer here; give its URL instead, or stop it first")
    finally:
        store.close()


def restore_hub(state: State) -> Hub:
    """Return the hub that a server would have after it starts with this state, with all changes in its journal."""
    from tidings.sdk.uri_templates import read_template

    # The policy of the server has limited the journal, and that policy is not known here.
    unlimited = Policy(journal_changes=sys.maxsize, journal_age=math.inf, journal_bytes=sys.maxsize)
    catalog, journal = Catalog(), Journal(unlimited)
    state.restore(catalog, journal)
    return Hub(catalog, journal=journal, templates=read_template)


def _default_file(folder: Path) -> Path:
    return folder / ".tidings" / "state.db"
