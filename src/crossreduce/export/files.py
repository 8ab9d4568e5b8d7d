"""Files that are replaced atomically: a reader never sees a part of the new file, and a failure leaves the old one.

Other users may be able to write into the folder of a file: no link that they put there is followed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

_SHARED: Final = stat.S_ISVTX | stat.S_IWOTH  # a folder in which all users may write, but not delete files of others
_MOST_LINKS: Final = 40  # in one path, as in Linux


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with all symbolic links resolved.

    Raises:
      PermissionError: one is a link of another user in a folder such as /tmp. Linux does not follow such links, either.
      OSError: it cannot be read, for example because its name is too long.
    """
    whole, links = Path.cwd() / path, 0
    found, rest = Path(whole.anchor), [*reversed(whole.parts[1:])]
    while rest:
        part = rest.pop()
        name = found.parent if part == ".." else found / part
        if not name.is_symlink():
            found = name
            continue
        folder, owner, links = found.stat(), name.lstat().st_uid, links + 1
        if folder.st_mode & _SHARED == _SHARED and owner not in (os.geteuid(), folder.st_uid):
            raise PermissionError(errno.EACCES, "It is a symbolic link of another user", str(name))
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = name.readlink()
        rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        found = Path(target.anchor) if target.is_absolute() else found
    return found


def writable_target(path: str | os.PathLike[str]) -> Path:
    """Return a path as ``real_path`` does. Raise FileNotFoundError if its folder does not exist."""
    target = real_path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(target.parent))
    return target


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which replaces ``target`` at the end of the block.

    If the block fails, or writes nothing, ``target`` is not changed. The new file is written by its descriptor, so it
    does not matter if another user replaces its name by a link.
    """
    # The name is known before the file exists: an interruption during its creation leaves no file.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            yield file
            file.flush()
            is_written = os.fstat(file.fileno()).st_size > 0
            if is_written:
                mask = os.umask(0o022)  # the mask can only be read by setting it
                os.umask(mask)
                getattr(os, "fchmod", lambda *_: None)(file.fileno(), 0o666 & ~mask)  # Windows has no fchmod
                os.fsync(file.fileno())
        if is_written:
            temporary.replace(target)
    finally:
        if os.path.lexists(temporary):  # else unlink could fail: a name that is too long, a read-only file system
            temporary.unlink(missing_ok=True)


def replace_file(target: Path, content: bytes) -> None:
    """Replace a file atomically. If an error occurs, the old file is unchanged."""
    with replacing(target) as file:
        file.write(content)
