"""The command line: ``crossreduce topology``, ``plan``, ``verify``, ``train``, ``bench``, ``doctor`` and ``info``.

Input: arguments. Output: text, files, and an exit code: 0: success; 1: the command found a fault (a wrong sum, replicas
that differ, a wrong schedule); 2: it did not run (a wrong argument, an unreadable file, a missing module); 130, 143:
interrupted or terminated, without half-written files. Importing this needs neither typer nor a framework.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import ReductionError
from .signals import ending_signals

_EXTRA = ("typer", "rich", "sklearn")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. ``args``: arguments after ``crossreduce``, by default those of the process."""
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
