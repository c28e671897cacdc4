"""The board of examples/board.py as a folder. It has no code for notifications: Tidings watches the file."""

from pathlib import Path

SPRINT = Path(__file__).parent.parent / "resources" / "sprint.md"


def add_task(title: str) -> str:
    """Add a task to the board."""
    SPRINT.write_text(f"{SPRINT.read_text()}- {title}\n")
    return f"{len(SPRINT.read_text().splitlines())} tasks"


def close_sprint() -> str:
    """Remove all tasks from the board."""
    SPRINT.write_text("")
    return "closed"
