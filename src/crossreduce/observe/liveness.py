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


def program(pid: int) -> str:
    """Return the name of the script or module that a process runs, or "" if its command line cannot be read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    name, rest = Path(words[0]).name, words[1:]
    if name.startswith("python"):
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[2 if rest[0] in ("-W", "-X") else 1 :]
        name = f"{name} -c" if rest[:1] == ["-c"] else Path([*rest[rest[:1] == ["-m"] :], name][0]).name
    return name


def is_started_by(pid: int, ancestor: int) -> bool:
    """Return whether a process is ``ancestor``, or was started by it or by a process that it has started."""
    while pid not in (0, ancestor):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return False
    return pid == ancestor


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal. The result is ``False`` if its state cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"  # its name may be no text
    except (OSError, IndexError):
        return False
