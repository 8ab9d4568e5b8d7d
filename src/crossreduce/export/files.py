"""Files that are replaced atomically: a reader never sees a part of the new file, and a failure leaves the old one."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def writable_target(path: str | os.PathLike[str]) -> Path:
    """Return a path with all symbolic links resolved. Raise FileNotFoundError if its folder does not exist."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(target.parent))
    return target


def replace_file(target: Path, content: bytes) -> None:
    """Replace a file atomically. If an error occurs, the old file is unchanged."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        part = Path(folder) / target.name
        part.write_bytes(content)
        part.replace(target)
