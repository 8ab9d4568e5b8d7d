"""Files that are replaced atomically: a reader never sees a part of the new file, and a failure leaves the old one."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

_SHARED: Final = stat.S_ISVTX | stat.S_IWOTH  # a folder in which all users may write, but not delete files of others


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with all symbolic links resolved.

    Raises:
      PermissionError: it is a link of another user in a folder such as /tmp. Linux does not follow such links, either.
      OSError: it cannot be read, for example because its name is too long.
    """
    name = Path(path)
    if name.is_symlink():
        folder, owner = name.parent.stat(), name.lstat().st_uid
        if folder.st_mode & _SHARED == _SHARED and owner not in (os.geteuid(), folder.st_uid):
            raise PermissionError(errno.EACCES, "It is a symbolic link of another user", str(path))
    return Path(os.path.realpath(path))


def writable_target(path: str | os.PathLike[str]) -> Path:
    """Return a path as ``real_path`` does. Raise FileNotFoundError if its folder does not exist."""
    target = real_path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(target.parent))
    return target


def replace_file(target: Path, content: bytes) -> None:
    """Replace a file atomically. If an error occurs, the old file is unchanged."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        part = Path(folder) / target.name
        part.write_bytes(content)
        part.replace(target)
