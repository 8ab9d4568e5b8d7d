"""Starts programs as ranks, for tests of ``crossreduce.torch``, and ends them at the end of the test."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def start(argv, n, environment=None):
    """Start n ranks of a Python program, and return their processes.

    If ``argv`` begins with a path, the ranks are forked from a process that has imported torch (``Forked``). If it
    begins with an option of the interpreter, each rank gets an interpreter of its own.
    """
    running = []
    for rank in range(n):
        # Variables that torchrun also sets, and PYTHONFAULTHANDLER, with which a rank that crashes prints its stack.
        own = {"RANK": str(rank), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        env = {**os.environ, **own, **(environment(rank) if environment else {})}
        if str(argv[0]).startswith("-"):
            outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            command = [sys.executable, *map(str, argv)]
            running.append(subprocess.Popen(command, env=env, cwd=HERE, start_new_session=True, **outputs))
        else:
            running.append(Forked([str(HERE / argv[0]), *map(str, argv[1:])], env))
    return running


@functools.cache
def server():
    """Start the process from which ranks are forked. It ends with this process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-u", str(HERE / "torch_server.py")]
    return subprocess.Popen(command, env=env, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asked(**request):
    """Return the answer of the server to a request."""
    print(json.dumps(request), file=server().stdin, flush=True)
    return json.loads(server().stdout.readline())


class Forked:
    """A rank that the server has forked, with the methods of ``Popen`` that tests use."""

    returncode = None

    def __init__(self, argv, env):
        opened, self._output = tempfile.mkstemp()
        os.close(opened)
        self._start(argv, env, os.devnull, self._output, self._output)

    def _start(self, argv, env, source, output, errors):
        self.pid = asked(argv=argv, env=env, cwd=str(HERE), files=[source, output, errors])

    def poll(self, seconds=0):
        self.returncode = asked(wait=self.pid, seconds=seconds) if self.returncode is None else self.returncode
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=600):
        """Wait until the rank has ended, return its output, and delete the file with the output."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        text = Path(self._output).read_text()
        Path(self._output).unlink()
        return text, None


class Piped(Forked):
    """A rank with pipes ``stdin`` and ``stdout``. Its stderr is the file ``errors``."""

    def __init__(self, argv, env, errors):
        with tempfile.TemporaryDirectory() as folder:
            source, output = Path(folder, "in"), Path(folder, "out")
            os.mkfifo(source)
            os.mkfifo(output)
            self._start(argv, env, str(source), str(output), str(errors))
            self.stdin, self.stdout = source.open("wb"), output.open("rb", buffering=0)

    def wait(self, timeout):
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.returncode


def finish(running, timeout_s):
    """Return the exit status and output of each rank. Kill late ranks after ``timeout_s``, and at the end children."""
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
