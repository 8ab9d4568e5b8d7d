"""Starting threads while signals may arrive; the interpreters in which this library works.

Importing this module, the first thing that ``import crossreduce`` does, raises a BackendError in a subinterpreter.
"""

from __future__ import annotations

import _thread
import importlib
import mmap
import sys
import threading
from typing import Any, Final

from .errors import BackendError

try:
    import resource
except ImportError:  # Windows
    resource: Any = None  # type: ignore[no-redef]

_STACK_NBYTES: Final = 8 << 20  # the least stack of a thread that is counted on
_OBJECTS_NBYTES: Final = 4 << 20  # for Python's objects, for which it takes 1 MiB at a time


def memory_is_limited() -> bool:
    """Return whether the system limits the memory of this process, so that there may be too little for a thread."""
    return resource is not None and (
        resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        or resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    )


def start_thread(thread: threading.Thread, is_limited: bool | None = None) -> None:
    """Start a thread. If a signal handler raises during the start, for example ``KeyboardInterrupt``, raise that.

    ``Thread.start`` waits for a condition. If a handler raises while the condition has released its lock, Python raises
    "RuntimeError: release unlocked lock" in its place, with the handler's exception as context. In both cases the
    thread may or may not have started. ``is_limited``: the result of ``memory_is_limited``, if the caller has it.

    Raises:
      RuntimeError: the system cannot start the thread.
      MemoryError: there is too little memory for a thread. One that cannot even say that it has started would make
        ``Thread.start`` wait for ever.
    """
    if memory_is_limited() if is_limited is None else is_limited:
        stack = max(threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0], _STACK_NBYTES)
        try:  # private memory, as that of a thread: RLIMIT_DATA does not count shared memory
            mmap.mmap(-1, stack + _OBJECTS_NBYTES, mmap.MAP_PRIVATE).close()
        except OSError as error:
            raise MemoryError(f"there is too little memory for the thread {thread.name!r}: {error}") from error
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


def _is_main_interpreter() -> bool:
    """Return whether this code runs in the main interpreter of the process, not in a subinterpreter."""
    is_main = getattr(_thread, "_is_main_interpreter", None)  # since Python 3.12
    if is_main is not None:
        return bool(is_main())
    try:
        interpreters = importlib.import_module("_xxsubinterpreters")
    except ImportError:  # a Python that has no subinterpreters
        return True
    return bool(interpreters.get_current() == interpreters.get_main())


if not _is_main_interpreter():  # there NumPy raises an error of its own, and other libraries wait for ever for a lock
    _PROBLEM = "crossreduce cannot be imported in a subinterpreter: NumPy and its kernels work in the main one only."
    _REMEDY = "a process, or the main interpreter (for mod_wsgi: WSGIApplicationGroup %{GLOBAL})"
    raise BackendError.of(_PROBLEM, remedy=_REMEDY)
