from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import StoredServer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path for a state file."""
    return tmp_path / "state.db"


@pytest.fixture
def server() -> StoredServer:
    """A server with a store in memory."""
    return StoredServer()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Record the connections that are opened. They do not wait for locks."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def record(*args: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **{**options, "timeout": 0.01}))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", record)
    return opened
