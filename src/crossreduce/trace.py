"""Record the collectives of this process's ranks in files, which ``crossreduce trace DIR`` reads.

Input: a directory. Output: a file for each group of this process. ``CROSSREDUCE_TRACE=DIR`` in the environment does the
same from the start of the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .observe.traces.format import DEFAULT_NBYTES
from .observe.traces.recording import start, stop

__all__ = ["recording", "start", "stop"]


@contextmanager
def recording(directory: str | os.PathLike[str], nbytes: int | str = DEFAULT_NBYTES) -> Iterator[None]:
    """Record the collectives of the enclosed code. For the arguments and errors see ``start``."""
    start(directory, nbytes)
    try:
        yield
    finally:
        stop()
