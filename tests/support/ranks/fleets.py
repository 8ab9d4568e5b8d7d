"""Processes that run many cases of hypothesis, one after another.

A process reads cases from stdin and writes outcomes to stdout. Each is a line of JSON. The case ``null`` ends it.
"""

import contextlib
import json
import os
import signal
import threading


class Fleet:
    """Processes that run cases. They are started when they are needed, and again after they have failed.

    The method ``_start`` of a subclass must append to ``running`` a process for each of ``commands`` and
    ``environments``, in a process group of its own, with pipes ``stdin`` and ``stdout``. ``log``: their stderr.
    """

    def __init__(self, commands, environments, log):
        self.commands, self.environments, self.log = commands, environments, log
        self.running = []

    def run(self, case, timeout_s=60):
        """Return the outcome of a case from each process. If the case fails or takes too long, end all processes."""
        alarm = threading.Timer(timeout_s, self._kill)
        try:
            if not self.running:
                self._start()
            alarm.start()
            self._send(case)
            return [json.loads(process.stdout.readline()) for process in self.running]
        except BaseException as error:
            self.close()
            error.add_note(self.log.read_text()[-5000:])
            raise
        finally:
            alarm.cancel()

    def _send(self, case):
        for process in self.running:
            process.stdin.write(json.dumps(case).encode() + b"\n")
            process.stdin.flush()

    def _kill(self):
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def finish(self, timeout_s=60):
        """Let the processes end, and return their exit statuses."""
        try:
            self._send(None)
            return [process.wait(timeout_s) for process in self.running]
        finally:
            self.close()

    def close(self):
        """End all processes."""
        self._kill()
        for process in self.running:
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
        self.running = []
