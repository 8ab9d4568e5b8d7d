"""Starts the ranks of the tests of ``crossreduce.torch`` as programs, and ends them with the test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def start(argv, n, environment=None):
    """Start n ranks of a Python program; return their processes."""
    running = []
    for rank in range(n):
        # Variables that torchrun also sets, and PYTHONFAULTHANDLER, with which a rank that crashes prints its stack.
        own = {"RANK": str(rank), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        own |= environment(rank) if environment else {}
        running.append(
            subprocess.Popen(
                [sys.executable, *map(str, argv)],
                env={**os.environ, **own},
                cwd=HERE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return running


def finish(running, timeout_s):
    """Return the exit status and output of each rank; kill ranks after ``timeout_s``, and their children at the end."""
    deadline, outputs = time.monotonic() + timeout_s, []
    try:
        for process in running:
            try:
                text, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
                text = f"late: killed after {timeout_s} s\n{process.communicate()[0]}"
            outputs.append((process.returncode, text))
    finally:
        for process in running:
            _kill(process)
    return outputs


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def checked(program, n, folder, timeout_s=120, environment=None):
    """Run a program of checks on n ranks; return the content of each rank's file."""
    outputs = finish(start([program, folder], n, environment), timeout_s)
    found = []
    for rank, (status, text) in enumerate(outputs):
        path = Path(folder, f"rank{rank}.json")
        assert status == 0, f"rank {rank} ended with {status}:\n{text}"
        assert path.exists(), f"rank {rank} wrote nothing:\n{text}"
        found.append(json.loads(path.read_text()))
    return found
