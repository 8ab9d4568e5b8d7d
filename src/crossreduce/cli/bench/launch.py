"""Start the ranks of ``crossreduce bench --launch`` on this host, and terminate all of them if one fails.

Input: a command line and the number of ranks. Output: an exit code. The ranks read torchrun's variables.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from subprocess import DEVNULL
from typing import IO, Any, Final

from ..support.output import PROGRESS_FD

_GRACE_S: Final = 1.0  # after one rank failed, the others have this time to end by themselves
_TERMINATE_S: Final = 3.0  # the time between SIGTERM to a rank and SIGKILL
_PAUSE_S: Final = 0.02  # between two checks whether ranks have ended
_SHOWN_NBYTES: Final = 20_000  # of a rank's standard error, only the last bytes are shown


def launch(command: list[str], count: int) -> int:
    """Run a command in ``count`` processes, as the ranks of one group, wait for them, and return the exit code.

    The exit code is that of the first rank that failed, 1 if a signal terminated this rank, or 0 if none failed. Rank 0
    writes to the standard output of this process. At the end, the standard error of the first rank that failed, or
    else of rank 0, is shown. All ranks have ended when ``launch`` returns or raises, even after Ctrl-C.
    """
    with ExitStack() as stack:
        # This socket is bound but does not listen: no other process gets the port, and rank 0, which also sets
        # SO_REUSEADDR, can listen on it.
        reserved = stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(reserved.getsockname()[1])
        inherited = {"OMP_NUM_THREADS": "1", **os.environ, **common}  # torchrun's default: ranks share the cores
        outputs: list[IO[bytes]] = []
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(terminate, ranks)
        terminal_fds: list[int] = []  # rank 0 draws its progress bars on the terminal of this process
        if os.name == "posix" and sys.stderr.isatty():
            terminal_fds = [os.dup(sys.stderr.fileno())]
            stack.callback(os.close, terminal_fds[0])
        for rank in range(count):
            outputs.append(stack.enter_context(tempfile.TemporaryFile()))
            stdout = None if rank == 0 else outputs[rank]
            variables = {**inherited, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            fds = terminal_fds if rank == 0 else []
            if fds:
                variables[PROGRESS_FD] = str(fds[0])
            ranks.append(
                subprocess.Popen(
                    command, stdin=DEVNULL, stdout=stdout, stderr=outputs[rank], env=variables, pass_fds=fds
                )
            )
        failed = _first_failed(ranks)
        if failed is not None:
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
                time.sleep(_PAUSE_S)
        terminate(ranks)
        output = outputs[failed or 0]
        output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN_NBYTES))
        shown = output.read().decode("utf-8", "replace")
        if failed is None:
            sys.stderr.write(shown)
            return 0
        code = ranks[failed].returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code != 1 or shown:  # not for code 1 without output: an element is wrong, as the table shows
            sys.stderr.write(shown if not shown or shown.endswith("\n") else f"{shown}\n")
            others = "; the other ranks were terminated" if len(ranks) > 1 else ""
            sys.stderr.write(f"crossreduce: rank {failed} {how}{others}.\n")
        return max(1, code)


def terminate(processes: Sequence[subprocess.Popen[Any]], timeout_s: float = _TERMINATE_S) -> None:
    """Terminate the processes that still run, kill them after ``timeout_s``, and wait for all."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _first_failed(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait until a rank fails or all have succeeded. Return the rank that failed, or ``None``."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(_PAUSE_S)
