"""The command line: ``crossreduce topology``, ``plan``, ``verify``, ``train``, ``bench`` and ``info``.

In: the words of a command line.  Out: text, the files that are asked for, and an exit code:

    0    done
    1    it ran, and something is wrong (a checked sum, replicas that drifted apart, a file that verify refutes)
    2    it did not run: a wrong argument, no way for the data, a file that cannot be read, a framework or
         extra that is not installed
    130  interrupted with Ctrl-C, 143: terminated; no file is left half-written

A user of the public face like any other. Importing it needs neither typer nor a framework.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from ..errors import ReductionError

_EXTRA = ("typer", "rich", "sklearn")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
      args: the words after ``crossreduce``; ``None``: those of this process.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an orderly exit, which removes temporary files
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
        if hasattr(signal, "setitimer"):
            sys.unraisablehook = _raise_again
    try:
        from .app import app

        app(args=None if args is None else list(args), prog_name="crossreduce")
    except ReductionError as error:
        _stop(str(error), 2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        _stop(f"the command line needs {error.name}, which is not installed.  try: pip install 'crossreduce[cli]'", 2)
    except OSError as error:
        _stop(f"{error.strerror or error}.  try: another file, or make room", 2)
    except MemoryError:
        _stop("there is not enough memory for this.  try: smaller sizes or fewer devices", 2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Raise an interruption again, a moment later, that Python could not let out of where it was raised.

    Such places are callbacks of weak references, of which every import has one, and ``__del__``: 1 in 100 runs
    that were terminated while they imported went on.
    """
    error = lost.exc_value
    if not isinstance(error, (SystemExit, KeyboardInterrupt)):
        sys.__unraisablehook__(lost)
        return

    def leave(*_: object) -> NoReturn:
        raise error

    signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def _stop(text: str, code: int) -> NoReturn:
    print(f"crossreduce: {text}", file=sys.stderr)
    sys.exit(code)
