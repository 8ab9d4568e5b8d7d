"""Files that are replaced atomically: a reader never sees half of one, and a failure leaves the old one."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def writable_target(path: str | os.PathLike[str]) -> Path:
    """Return the file behind a path, which need not exist; raise ``FileNotFoundError`` if its folder does not."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(target.parent))
    return target


def replace_file(target: Path, content: bytes) -> None:
    """Replace a file atomically: an error leaves the old file unchanged."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        part = Path(folder) / target.name
        part.write_bytes(content)
        part.replace(target)
