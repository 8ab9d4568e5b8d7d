"""Where results go: JSON files that appear whole or not at all, and the terminal.

Out: a file in one ``rename``, so that a reader, or an interruption, never sees half of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import ArgumentError


@contextmanager
def json_file(option: str, path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Check now that a file can be written, and yield the function that writes it later.

    The function writes a temporary file beside the target and renames it. Leaving the block without a
    call leaves the target as it was. With ``path`` ``None`` the function does nothing.

    Raises:
      ArgumentError: the path cannot be written, or is no regular file.
    """
    if path is None:
        yield lambda _: None
        return
    target = Path(os.path.realpath(path))
    # A rename over /dev/null or a pipe would replace it.
    if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        raise ArgumentError(f"{option} {path} cannot be written: it is no regular file, or write-protected.")
    try:
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed below, and renamed before that
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", suffix=".tmp", delete=False
        )
        temporary = Path(file.name)
        temporary.chmod(0o666 & ~_umask())
    except OSError as error:
        raise ArgumentError(f"{option} {path} cannot be written: {error.strerror}.") from error

    def write(report: dict[str, Any]) -> None:
        json.dump(report, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(target)

    try:
        with file:
            yield write
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal, and nothing elsewhere; yield the function that moves it on by one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=text)
