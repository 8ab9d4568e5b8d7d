"""What this process lacks: open files, memory or threads. Its requests and answers then fail as if others had ended.

Input: errors, also those after which the process tries again. Output: the latest error of these kinds.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from _thread import start_new_thread
from typing import Final

REMEDY: Final = "more open files (ulimit -n), memory (ulimit -v) or threads (ulimit -u)"
_NUMBERS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_NBYTES: Final = 1 << 20  # a process that cannot get these bytes has reached its limit
_START_S: Final = 1.0  # how long a thread may take to start
_THREADS: Final = "can't start new thread"  # the text of Python's RuntimeError
_TEXTS: Final = (_THREADS, MemoryError.__name__, *map(os.strerror, (errno.EAGAIN, *_NUMBERS)))  # EAGAIN: of threads
_latest: Final[list[tuple[float, str]]] = []


def note(error: BaseException) -> bool:
    """Record an error if its reason is that this process lacks something. Return whether this is so."""
    is_short = isinstance(error, MemoryError) or getattr(error, "errno", None) in _NUMBERS or _THREADS in str(error)
    if is_short:
        _latest[:] = [(time.monotonic(), str(error) or "not enough memory")]
    return is_short


def is_named(text: str) -> bool:
    """Return whether the text of an error, such as that of another process, names something that a process lacks."""
    return any(each in text for each in _TEXTS)


def check() -> None:
    """Record what this process lacks now. Call this before it releases something after an error."""
    ran = threading.Event()
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
        mmap.mmap(-1, _NBYTES, mmap.MAP_PRIVATE).close()
        start_new_thread(ran.set, ())
        if not ran.wait(_START_S):  # Python has no memory for the thread
            note(RuntimeError(_THREADS))
    except (OSError, MemoryError, RuntimeError) as error:
        note(error)


def since(began: float) -> str:
    """Return what this process has lacked since ``began`` (``time.monotonic``), or lacks now, or "" for nothing."""
    if not _latest or _latest[0][0] < began:
        check()
    return _latest[0][1] if _latest and _latest[0][0] >= began else ""
