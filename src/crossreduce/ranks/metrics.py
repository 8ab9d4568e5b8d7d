"""Files with the counters of this process's groups, for the textfile collector of Prometheus's node_exporter.

Input: CROSSREDUCE_METRICS, a folder or a name that ends with ``.prom``, and counters. Output: one file per group and
rank, which one thread of the process replaces every ``EVERY_S`` seconds, and the end of the group a last time. A file
that cannot be written causes one warning. The thread reads counters; no call waits for it.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from .counters import Stats
from .watchdog import PeriodicChecks

_LOG: Final = logging.getLogger("crossreduce")
EVERY_S: Final = 5.0
VARIABLE: Final = "CROSSREDUCE_METRICS"
_SUFFIX: Final = ".prom"
writers: Final = PeriodicChecks("crossreduce metrics", EVERY_S, f"this process writes no files for {VARIABLE}")


class MetricsFile:
    """The file of one rank of one group."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False

    def write(self, stats: Stats) -> None:
        """Replace the file."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")  # the collector reads only *.prom
        try:
            temporary.write_text(stats.openmetrics(), "utf-8", errors="replace")
            temporary.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._warned:
                self._warned = True
                _LOG.warning("rank %d cannot write %s (%s): %s", stats.rank, self.path, VARIABLE, error)


def metrics_file(group: str, rank: int) -> MetricsFile | None:
    """Return the file of a rank, in a folder that exists now; ``None``: CROSSREDUCE_METRICS is not set, or unusable."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return None
    target = Path(chosen)
    one = target.suffix == _SUFFIX and not target.is_dir()
    folder, start = (target.parent, target.stem) if one else (target, "crossreduce")
    readable = re.sub(r"[^\w.-]+", "_", group)[:80]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _LOG.warning("rank %d cannot make the folder %s (%s): %s", rank, folder, VARIABLE, error)
        return None
    return MetricsFile(folder / f"{start}-{readable}-rank{rank}{_SUFFIX}")
