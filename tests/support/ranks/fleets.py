"""Processes that stay and run one case after another, for hypothesis.

A process reads cases from stdin and writes outcomes to stdout, each a line of JSON. ``null`` ends it.
"""

import contextlib
import json
import os
import subprocess
import threading


class Fleet:
    """Processes that run cases. They are started when they are needed, and again after they have failed."""

    def __init__(self, commands, environments, log):
        """``commands``, ``environments``: of each process; ``log``: the file for what they write to stderr."""
        self.commands, self.environments, self.log = commands, environments, log
        self.running = []

    def run(self, case, timeout_s=60):
        """Return the outcome of a case from each process; if it fails or takes too long, end all processes."""
        try:
            if not self.running:
                self._start()
            alarm = threading.Timer(timeout_s, lambda: [process.kill() for process in self.running])
            alarm.start()
            try:
                self._send(case)
                return [json.loads(process.stdout.readline()) for process in self.running]
            finally:
                alarm.cancel()
        except BaseException as error:
            self.close()
            error.add_note(self.log.read_text()[-5000:])
            raise

    def _send(self, case):
        for process in self.running:
            process.stdin.write(json.dumps(case).encode() + b"\n")
            process.stdin.flush()

    def _start(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self.log.open("ab") as log:
            for command, environment in zip(self.commands, self.environments, strict=True):
                around = {**os.environ, **environment}
                self.running.append(subprocess.Popen(command, env=around, stderr=log, **pipes))

    def finish(self, timeout_s=60):
        """Let the processes end, and return their exit statuses."""
        try:
            self._send(None)
            return [process.wait(timeout_s) for process in self.running]
        finally:
            self.close()

    def close(self):
        """End all processes."""
        processes, self.running = self.running, []
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
