"""Files with the counters of this process's groups, for the textfile collector of Prometheus's node_exporter.

Input: CROSSREDUCE_METRICS, a folder or a file name that ends with ``.prom``, and counters. Output: one file per group
and rank. One thread of the process replaces the files every ``EVERY_S`` seconds. When a group ends, its file is
replaced a last time. A file that cannot be written causes one warning. No call waits for the thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from .counters import Stats
from .periodic_checks import PeriodicChecks

_LOG: Final = logging.getLogger("crossreduce")
EVERY_S: Final = 5.0
VARIABLE: Final = "CROSSREDUCE_METRICS"
_SUFFIX: Final = ".prom"
_NAME_BYTES: Final = 80  # the maximum bytes of a group's name in the name of its file
_OLD_S: Final = 60.0  # an older temporary file belongs to a rank that was killed
_CLOSE_S: Final = 1.0  # how long ``close`` waits for the thread, if the file system hangs
writers: Final = PeriodicChecks("crossreduce metrics", EVERY_S, f"this process writes no files for {VARIABLE}")


class MetricsFile:
    """The file of one rank of one group. ``run`` becomes a label of its counters if it is not empty."""

    def __init__(self, path: Path, run: str = "") -> None:
        self.path = path
        self._run = run
        self._lock = threading.Lock()  # held while counters are read and the file is replaced
        self._ending = self._closed = False
        self._warned = False

    def write(self, read_stats: Callable[[], Stats]) -> None:
        """Replace the file if it is not closed."""
        with self._lock:
            if self._closed:
                return
            self._replace(read_stats())
            if self._ending:  # another thread has called ``close``, which may have given up waiting for the lock
                self._replace(read_stats())
                self._closed = True

    def close(self, read_stats: Callable[[], Stats]) -> None:
        """Replace the file a last time. If another thread hangs in ``write``, that thread does so later."""
        self._ending = True
        if self._lock.acquire(timeout=_CLOSE_S):
            try:
                if not self._closed:
                    self._replace(read_stats())
                    self._closed = True
            finally:
                self._lock.release()

    def _replace(self, stats: Stats) -> None:
        # The collector ignores this name, which does not end with .prom. Mode "x" does not follow a link of this name.
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("x", encoding="utf-8", errors="replace") as file:
                file.write(stats.openmetrics(self._run))
            temporary.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._warned:
                self._warned = True
                _LOG.warning("rank %d cannot write %s (%s): %s", stats.rank, self.path, VARIABLE, error)

    def remove_old(self) -> None:
        """Remove the temporary files that killed ranks have left."""
        with suppress(OSError):
            for path in self.path.parent.iterdir():
                if path.name.startswith(f".{self.path.name}.") and time.time() - path.lstat().st_mtime > _OLD_S:
                    path.unlink()


def metrics_file(group: str, rank: int) -> MetricsFile | None:
    """Return the file of a rank, and create its folder. Return ``None`` if CROSSREDUCE_METRICS is empty or unusable."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return None
    target = Path(chosen)
    is_file = target.suffix == _SUFFIX and not target.is_dir()
    folder, run = (target.parent, target.stem) if is_file else (target, "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _LOG.warning("rank %d cannot make the folder %s (%s): %s", rank, folder, VARIABLE, error)
        return None
    file = MetricsFile(folder / f"{run or 'crossreduce'}-{name_in_files(group)}-rank{rank}{_SUFFIX}", run)
    file.remove_old()
    return file


def name_in_files(group: str) -> str:
    """Return the part of a file's name that stands for a group; it is different for groups with different names.

    >>> name_in_files("world"), name_in_files("a/b"), name_in_files("a b")
    ('world', 'a_b-c14cddc0', 'a_b-c8687a08')
    """
    readable = re.sub(r"[^\w.-]+", "_", group).encode()[:_NAME_BYTES].decode(errors="ignore")
    if readable == group:
        return group
    return f"{readable}-{hashlib.sha256(group.encode(errors='surrogatepass')).hexdigest()[:8]}"
