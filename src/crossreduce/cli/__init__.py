"""The command line: ``crossreduce topology``, ``plan``, ``verify``, ``train``, ``bench``, ``doctor`` and ``info``.

Input: the arguments of a command line. Output: text, the requested files, and an exit code:

    0    success
    1    the command ran and found a fault: a wrong sum, replicas that differ, a file that ``verify`` rejects
    2    the command did not run: a wrong argument, devices without a path between them, a file that cannot be
         read, a framework or extra that is not installed
    130  interrupted by Ctrl-C, 143: terminated; no file is half-written

The commands use the public API only. Importing this module needs neither typer nor a framework.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import ReductionError
from .signals import ending_signals

_EXTRA = ("typer", "rich", "sklearn")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
      args: the arguments after ``crossreduce``; ``None``: those of this process.
    """
    with ending_signals():
        try:
            from .app import app

            app(args=None if args is None else list(args), prog_name="crossreduce")
        except ReductionError as error:
            _stop(str(error))
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _EXTRA:
                raise
            _stop(f"the command line needs {missing}, which is not installed.  try: pip install 'crossreduce[cli]'")
        except OSError as error:
            _stop(f"{error.strerror or error}.  try: another file, or make room")
        except MemoryError:
            _stop("there is not enough memory for this.  try: smaller sizes or fewer devices")
        except KeyboardInterrupt:
            sys.exit(130)
    sys.exit(0)


def _stop(text: str) -> NoReturn:
    print(f"crossreduce: {text}", file=sys.stderr)
    sys.exit(2)
