"""The NATS server of `tidings serve`: the one that `--nats` names, or one that this process starts.

A started server keeps its data in the workspace, so that cursors and durable subscriptions survive a restart, as they
do in a state file. `serve --stdio` imports this module, so it must import little.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tidings.cluster.nats import Nats

__all__ = ["EMBEDDED", "NATS_VARIABLE", "NatsOptions", "open_nats"]

logger = logging.getLogger(__name__)

NATS_VARIABLE = "TIDINGS_NATS"

EMBEDDED = "embedded"


class NatsOptions(NamedTuple):
    url: str
    credentials: Path | None = None

    def connect(self) -> Nats:
        from tidings.cluster.nats import Nats

        return Nats(self.url, credentials=self.credentials)


@contextmanager
def open_nats(
    nats: str, credentials: Path | None, folder: Path, *, keeps_data: bool
) -> Iterator[tuple[NatsOptions, Callable[[], float | None]]]:
    """Yield the options to connect to NATS, and `EmbeddedNats.keep_running`.

    `nats` is a URL or "embedded". `folder` is the workspace, in which the embedded server keeps its data."""
    from tidings.cluster.embedded import EmbeddedNats
    from tidings.cluster.nats import Nats

    if nats != EMBEDDED:
        Nats(nats, credentials=credentials)  # raises for an invalid URL, once and not in each worker
        yield NatsOptions(nats, credentials), lambda: None
        return
    with _data_folder(folder if keeps_data else None) as data, EmbeddedNats(data) as server:
        yield NatsOptions(server.url), server.keep_running


@contextmanager
def _data_folder(workspace: Path | None) -> Iterator[Path | None]:
    """Yield the folder for the data, or None if it can't be kept: another server uses it, or it can't be written."""
    if workspace is None:
        yield None
        return
    from tidings.store.file_lock import FileLock
    from tidings.store.sqlite import create_folder

    lock = FileLock(workspace / ".tidings" / "nats.lock")
    try:
        create_folder(workspace / ".tidings")
        lock.acquire()
    except OSError as error:
        reason = "another server uses this folder" if isinstance(error, BlockingIOError) else error
        logger.info("the data of NATS is deleted at the end: %s", reason)
        yield None
        return
    try:
        yield workspace / ".tidings" / "nats"
    finally:
        lock.release()
