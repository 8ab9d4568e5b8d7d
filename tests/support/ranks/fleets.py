"""Processes that stay and run one case after another, for hypothesis.

A process reads cases from stdin and writes outcomes to stdout, each a line of JSON. ``null`` ends it.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time


class Fleet:
    """Processes that run cases. They are started when they are needed, and again after they have failed."""

    def __init__(self, commands, environments, log):
        """Args:
        commands, environments: of each process.
        log: the file for what the processes write to stderr.
        """
        self.commands, self.environments, self.log = commands, environments, log
        self.running = []

    def run(self, case, timeout_s=60):
        """Return the outcome of a case from each process; if it fails, end all processes."""
        if not self.running:
            self._start()
        try:
            self._send(case)
            deadline = time.monotonic() + timeout_s
            return [json.loads(_line(process, deadline)) for process in self.running]
        except BaseException as error:
            self.close()
            error.add_note(self.log.read_text()[-5000:])
            raise

    def _send(self, case):
        for process in self.running:
            process.stdin.write(json.dumps(case).encode() + b"\n")
            process.stdin.flush()

    def _start(self):
        with self.log.open("ab") as log:
            for command, environment in zip(self.commands, self.environments, strict=True):
                self.running.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **environment},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def finish(self, timeout_s=60):
        """Let the processes end, and return their exit statuses."""
        try:
            self._send(None)
            return [process.wait(timeout_s) for process in self.running]
        finally:
            self.close()

    def close(self):
        """End all processes."""
        for process in self.running:
            for how in (signal.SIGTERM, signal.SIGKILL):  # mpiexec ends its ranks only if it is not killed
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, how)
                    process.wait(10)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
        self.running = []


def _line(process, deadline):
    """Return the next line of a process's output."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))[0], "no answer in time"
        part = os.read(process.stdout.fileno(), 1 << 16)
        assert part, "the process has ended"
        line += part
    return line
