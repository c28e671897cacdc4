"""The board of examples/board.py as a folder. It has no code for notifications: Tidings watches the file."""

from pathlib import Path

SPRINT = Path(__file__).parent.parent / "resources" / "sprint.md"


def add_task(title: str) -> str:
    """Put a task on the board."""
    SPRINT.write_text(f"{SPRINT.read_text()}- {title}\n")
    return f"{len(SPRINT.read_text().splitlines())} tasks"


def close_sprint() -> str:
    """Take all tasks off the board."""
    SPRINT.write_text("")
    return "closed"
