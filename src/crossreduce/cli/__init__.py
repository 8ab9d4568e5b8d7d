"""The command line of ``crossreduce``; ``app`` lists its commands.

Input: arguments. Output: text, files, and an exit code. The code is 0 for success. It is 1 if a fault was found (a
wrong sum, replicas that differ, a wrong schedule, a GPU that reads another one wrongly), if ``doctor`` can read no
dump, or if ``top --once`` finds no group. It is 2 if the command could not finish (a wrong argument, a missing module),
and 129, 130 or 143 after SIGHUP, Ctrl-C or SIGTERM, which leave no half-written files. Importing this module needs no
typer and no framework.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn
from weakref import ref

from ..errors import ReductionError, printable

_EXTRA = ("typer", "rich", "sklearn")  # the modules that the extra "cli" installs


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit. ``args`` are the arguments after ``crossreduce``, by default those of this process."""
    with ending_signals():
        try:
            from .app import run

            sys.exit(run(sys.argv[1:] if args is None else list(args)))
        except ReductionError as error:
            _stop(str(error))
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _EXTRA:
                raise
            _stop(
                f"the command line needs {missing}, which is not installed.  try: pip install typer rich scikit-learn"
            )
        except OSError as error:
            _stop(f"{error.strerror or error}.  try: another file, or free space on the disk")
        except MemoryError:
            _stop("there is not enough memory for this.  try: smaller sizes or fewer devices")
        except (KeyboardInterrupt, SystemExit) as ended:
            code = getattr(ended, "code", 130)  # KeyboardInterrupt has no code; after Ctrl-C typer exits with 130
            if code == 130:
                print("crossreduce: interrupted", file=sys.stderr)
            sys.exit(code)


def _stop(text: str) -> NoReturn:
    """Print an error and exit with code 2."""
    print("crossreduce:", printable(text, "\n"), file=sys.stderr)
    sys.exit(2)


# A signal that ends a command raises an exception in the main thread. The exception may be dropped: by Python in
# ``__del__`` and in callbacks of weak references, which every import has, and by Cython while it initialises a module.
# Without a remedy, 1 in 70 commands continued that got SIGTERM during their imports. So a weak reference to the
# exception has a callback, which runs when the exception is freed. If the block of ``ending_signals`` has not ended by
# then, the exception was dropped, and a new one is raised after this time.
_AGAIN_S: Final = 0.01


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C. Unlike instances of its base class, instances can have weak references."""


class _Terminated(SystemExit):
    """The exit after SIGTERM or SIGHUP. Unlike instances of its base class, instances can have weak references."""


@contextmanager
def ending_signals() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in the block, and SIGTERM and SIGHUP SystemExit(128 + the signal's number).

    So ``finally`` blocks still remove temporary files. Outside the main thread, and on Windows, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    raised: list[ref[BaseException]] = []
    former_handlers: dict[int, Any] = {}

    def set_handler(number: int, handler: Any) -> None:
        former_handlers.setdefault(number, signal.signal(number, handler))

    def raise_error(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of handlers
        error = _Interrupted() if number == signal.SIGINT else _Terminated(128 + number)
        raised[:] = [ref(error, lambda _: signal.setitimer(signal.ITIMER_REAL, _AGAIN_S))]
        set_handler(signal.SIGALRM, lambda _, frame: raise_error(number, frame))
        try:
            raise error
        finally:
            del error  # the traceback refers to this frame, which must not refer to the exception

    def report_dropped(dropped: sys.UnraisableHookArgs) -> None:  # silent about ours, which are raised again
        if not isinstance(dropped.exc_value, (_Interrupted, _Terminated)):
            hook(dropped)

    hook, sys.unraisablehook = sys.unraisablehook, report_dropped
    set_handler(signal.SIGTERM, raise_error)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not under nohup, which disables the signal
        set_handler(signal.SIGHUP, raise_error)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        set_handler(signal.SIGINT, raise_error)
    try:
        yield
    finally:
        raised.clear()  # from now on, no callback starts the timer
        sys.unraisablehook = hook
        if signal.SIGALRM in former_handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in former_handlers.items():
            signal.signal(number, handler)
