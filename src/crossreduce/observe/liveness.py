"""Finds out from a rank's lock on the group's memory whether its process runs, was stopped, or has ended.

Input: the memory's file descriptor, and a rank's position among the ranks of its host. Output: a process, or its state.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

with suppress(ImportError):  # Windows has no fcntl; there, ranks raise a BackendError before they need it
    import fcntl

LEFT: Final = "left the group"  # the text of the last op of a rank that has left
_LOCK: Final = "hhqqi4x"  # struct flock: type, whence, start, length, pid


def lock_holder(fd: int, place: int) -> int | None:
    """Return the id of the other process that holds a rank's lock, or ``None`` if no other process holds it.

    The system releases the lock when the process ends. ``fd``: a descriptor of the memory, which may be read-only.
    ``place``: the rank's position among the ranks of its host.
    """
    query = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    kind, *_, pid = struct.unpack(_LOCK, fcntl.fcntl(fd, fcntl.F_GETLK, query))
    return None if kind == fcntl.F_UNLCK else pid


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal. The result is ``False`` if its state cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"  # its name may be no text
    except (OSError, IndexError):
        return False
