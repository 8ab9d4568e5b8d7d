"""Runs ranks of ``crossreduce.torch`` that are killed or join: forked processes, of a program that imports torch once.

A program registers cases with ``Cases.add`` and calls ``Cases.main``: ``python program.py FOLDER [CASE ...]``. Each
process of a case writes a report, ``{"failed": traceback or None}``, to FOLDER/<case> <number>.json; those that the
case kills write none. The tests that start the program read the reports with ``expect_passed``.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

SECONDS = 150.0  # for one case
MARK = re.compile(r"^@CASES\.add\((\d)(?:, killed=\(([\d, ]*)\))?(?:, joining=(\d))?\)\ndef (\w+)", re.M)


class Process(NamedTuple):
    """``number``: of a process in its case; the first ones are the ranks of a group. ``folder``: of the case."""

    number: int
    folder: Path

    def publish(self, name, text):
        """Write a file that other processes read."""
        self.folder.joinpath(f"{name}.new").write_text(text)
        self.folder.joinpath(f"{name}.new").rename(self.folder / name)

    def read(self, name):
        """Wait for a file that another process publishes, and return its text."""
        while not self.folder.joinpath(name).exists():
            time.sleep(0.02)
        return self.folder.joinpath(name).read_text()


def begin(store, rank, ranks):
    """Make the default group."""
    import torch.distributed as dist

    seconds = timedelta(seconds=30)
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=ranks, timeout=seconds)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Cases:
    """The cases of a program."""

    def __init__(self):
        self.found = {}

    def add(self, processes, killed=(), joining=0):
        """Register a case of some processes, of which the last ones have no group at the beginning."""

        def register(function):
            self.found[function.__name__] = processes, processes - joining, function
            return function

        return register

    def main(self):
        folder, *names = sys.argv[1:]
        for name in names or self.found:
            self.run(name, Path(folder))

    def run(self, name, folder):
        """Run a case; kill processes that take too long."""
        processes, ranks, function = self.found[name]
        own = folder / f"{name} files"
        own.mkdir()
        pids = []
        for number in range(processes):
            pid = os.fork()
            if not pid:
                self.child(Process(number, own), ranks, function, folder / f"{name} {number}.json")
            pids.append(pid)
        deadline = time.monotonic() + SECONDS
        while pids:
            if time.monotonic() > deadline:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.02)

    @staticmethod
    def child(process, ranks, function, report):
        """Run a case in one process, write its report, and end without the exit handlers of the parent."""
        failed = None
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            if process.number < ranks:
                begin(process.folder / "store", process.number, ranks)
            function(process)
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:
            failed = traceback.format_exc()
        finally:
            report.write_text(json.dumps({"failed": failed}))
            os._exit(0)


def cases_of(program):
    """Return the cases of a program, without importing it: the number of processes, those that are killed, the name."""
    found = []
    for processes, killed, _, name in MARK.findall(program.read_text()):
        found.append((int(processes), {int(number) for number in re.findall(r"\d", killed)}, name))
    return found


def ran(program, folder, names):
    """Run cases of a program; return the folder of reports."""
    command, limit = [sys.executable, program, folder, *names], SECONDS * (1 + len(names))
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def expect_passed(folder, processes, killed, name):
    """Check that a case has passed in all processes that it does not kill, and that those have written no report."""
    for number in range(processes):
        report = folder / f"{name} {number}.json"
        assert report.exists() == (number not in killed), f"process {number}"
        if report.exists():
            failed = json.loads(report.read_text())["failed"]
            assert failed is None, f"process {number}:\n{failed}"
