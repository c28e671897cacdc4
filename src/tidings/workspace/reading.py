"""Reading a file inside a folder, while other programs may replace it.

After a path was checked, its file or a folder of it can be replaced by a link to the outside, or by a named pipe, whose
reader waits for a writer. So links are resolved first, and each part of the result is opened without following links.
The opened file must be a regular one, and not too large.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

__all__ = ["MAX_BYTES", "open_inside", "read_inside", "resolve_links"]

MAX_BYTES = 16 << 20
"""Bytes of a file that is read as a whole. Encoding and sending more would delay all other requests noticeably."""

_FILE_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


def resolve_links(path: Path) -> Path:
    """Resolve as `Path.resolve` does, except that it raises `RuntimeError` for a cycle of links before Python 3.13."""
    return Path(os.path.realpath(path))


def read_inside(root: Path, path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file inside `root`, which must have no links itself.

    Raises `OSError` as `open_inside` does, and with `EFBIG` if the file has more than `max_bytes`."""
    with open_inside(root, path) as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            size = max(os.fstat(file.fileno()).st_size, len(content))
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than the limit of {max_bytes}", str(path))
    return content


def open_inside(root: Path, path: Path) -> BufferedReader:
    """Open a file inside `root` for reading.

    Raises `FileNotFoundError` if there is no such file, if it is outside `root`, or if it is not a regular file."""
    resolved = resolve_links(path)
    if not resolved.is_relative_to(root):
        raise FileNotFoundError(errno.ENOENT, "it is outside the workspace", str(path))
    try:
        descriptor = _open_without_links(root, resolved)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # ENXIO: a socket
            raise FileNotFoundError(errno.ENOENT, "it is not a file, or was just replaced", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is not a file", str(path))
    return os.fdopen(descriptor, "rb")


def _open_without_links(root: Path, path: Path) -> int:
    if os.open not in os.supports_dir_fd:  # Windows
        return os.open(path, _FILE_FLAGS)
    *folders, name = path.relative_to(root).parts or (".",)
    folder = os.open(root, _FOLDER_FLAGS)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(name, _FILE_FLAGS, dir_fd=folder)
    finally:
        os.close(folder)
