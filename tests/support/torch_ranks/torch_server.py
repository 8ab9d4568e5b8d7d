"""Forks programs of ranks that need torch, so that torch is imported only once for many ranks; see ``torch_running``.

Each line of the input is a request, a JSON object. ``{"argv", "env", "cwd", "files"}`` starts a program; the answer is
its process number. ``{"wait", "seconds"}`` waits for a started program; the answer is its exit status, or ``null`` if
it is still running. A program runs as ``__main__`` and ends like any interpreter.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import numpy as np  # noqa: F401 - so that programs need not import it
import torch
import torch.distributed
import torch.nn.parallel

STATUSES = {}


def start(argv, env, cwd, files):
    """Fork a process for a program. Return the process number, or ``None`` in the new process."""
    pid = os.fork()
    os.setpgid(pid, 0)
    if pid:
        return pid
    for descriptor, path in enumerate(files):
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY
        os.dup2(os.open(path, how, 0o600), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the tests ignore it
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv
    sys.path[:0] = [str(Path(argv[0]).parent), *env.get("PYTHONPATH", "").split(os.pathsep)]
    torch.set_num_threads(1)
    return None


def wait(pid, seconds):
    """Return the exit status of a process like ``subprocess``, or ``None`` if it does not end in time."""
    deadline = time.monotonic() + seconds
    while pid not in STATUSES:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            STATUSES[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= deadline:
            return None
        else:
            time.sleep(0.005)
    return STATUSES[pid]


def serve():
    """Answer requests until the input ends. In a forked process, return the path of its program."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"], request["seconds"])
        elif (answer := start(**request)) is None:
            return request["argv"][0]
        print(json.dumps(answer), flush=True)
    return None


gc.collect()
gc.freeze()  # so that programs do not visit the objects of torch when they end
if program := serve():
    runpy.run_path(program, run_name="__main__")
