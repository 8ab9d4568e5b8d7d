"""Start ranks on this host, and end them all when one fails: no more than ``crossreduce bench --launch`` needs.

In: a command line, and how many.  Out: an exit code. Ranks hear who they are through torchrun's variables.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import IO, Final

_GRACE_S: Final = 1.0  # the others of a group that one has left say so themselves, if they are given the time
_END_S: Final = 3.0
_PAUSE_S: Final = 0.02
_SHOWN: Final = 20_000  # bytes of what a failed rank said last


def launch(command: list[str], count: int) -> int:
    """Run a command ``count`` times at once, as ranks of one group, and wait for them.

    Rank 0's standard output is this process's; what ranks write to standard error is shown once they are done: that of
    the first that failed, else rank 0's. None is left when this returns or raises, Ctrl-C included.

    Returns:
      0, or the first failed rank's exit code, 1 where a signal ended it.
    """
    with ExitStack() as stack:
        # Bound but not listening: nobody else is given the port, and rank 0, which also says SO_REUSEADDR, gets it.
        held = stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(held.getsockname()[1])
        inherited = {"OMP_NUM_THREADS": "1", **os.environ, **common}  # torchrun's default: ranks share the cores
        said: list[IO[bytes]] = []
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        for rank in range(count):
            said.append(stack.enter_context(tempfile.TemporaryFile()))
            ranks.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else said[rank],
                    stderr=said[rank],
                    env={**inherited, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
        failed = _first_failed(ranks)
        if failed is not None:
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
                time.sleep(_PAUSE_S)
        _end(ranks)
        shown = _read(said[failed or 0])
        if failed is None:
            sys.stderr.write(shown)
            return 0
        code = ranks[failed].returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code != 1 or shown:  # 1 without a word: a checked element is wrong, and the table says so
            sys.stderr.write(f"{shown}{'' if not shown or shown.endswith(chr(10)) else chr(10)}")
            sys.stderr.write(f"crossreduce: rank {failed} {how}, and the others were ended.\n")
        return max(1, code)


def _first_failed(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Return the first rank that fails, once it has; ``None`` once all are done."""
    while True:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(_PAUSE_S)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End those that run, first in good order, and wait for all."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _END_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _read(file: IO[bytes]) -> str:
    """Return the end of what a rank has said."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _SHOWN))
    return file.read().decode("utf-8", "replace")
