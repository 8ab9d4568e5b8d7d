"""Starting threads while signals may arrive."""

from __future__ import annotations

import sys
import threading


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. If a signal handler raises during the start, for example ``KeyboardInterrupt``, raise that.

    ``Thread.start`` waits for a condition. If a handler raises while the condition has released its lock, Python raises
    "RuntimeError: release unlocked lock" in its place, with the handler's exception as context. In both cases the
    thread may or may not have started.

    Raises:
      RuntimeError: the system cannot start the thread.
    """
    handled = sys.exception()  # of the caller; it would also be the context of an error that is raised here
    interrupt: BaseException | None = None
    try:
        thread.start()
    except RuntimeError as error:
        interrupt = error.__context__
        if interrupt is None or interrupt is handled:
            raise
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            interrupt = None  # its traceback refers to this frame
