"""Files in directories in which other users may write, too: they may put links and FIFOs there, and guess names."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

# Names are tried in order up to this number, then at random: others may have taken the next million.
_IN_ORDER: Final = 100


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
      ValueError: it is not a regular file. For example it is a link, or a FIFO, whose writer is not waited for.
      OSError: it cannot be opened.
    """
    names = "O_NONBLOCK", "O_NOFOLLOW", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"
    try:
        fd = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in names))
    except OSError as error:
        if path.is_symlink():
            raise ValueError("it is a symbolic link") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it is not a regular file")
    return os.fdopen(fd, "rb")


def statuses(paths: Iterable[Path]) -> dict[Path, os.stat_result]:
    """Return the status of each file, or of the link itself. Files that were deleted meanwhile are left out."""
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            found[path] = path.lstat()
    return found


def owners_note(found: Iterable[os.stat_result]) -> list[str]:
    """Return a note if files belong to several users: one of them may have forged what another one seems to report."""
    owners = sorted({status.st_uid for status in found})
    users = ", ".join(map(str, owners[:8])) + ", ..." * (len(owners) > 8)
    return [f"the files belong to several users ({users}), so some may be forged."] if len(owners) > 1 else []


@contextmanager
def temporary_file(directory: Path, prefix: str, content: str) -> Iterator[Path]:
    """Yield a new file with this content that only this user can read. Delete it afterwards, unless it was renamed."""
    number, name = tempfile.mkstemp(dir=directory, prefix=prefix)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(content)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def numbers() -> Iterator[int]:
    """Yield numbers for a file name until one is free: from 1 on, and later at random, with at most 9 digits."""
    yield from range(1, _IN_ORDER)
    while True:
        yield secrets.randbelow(10**9)
