"""Forks programs of ranks that import torch, so that many ranks need one import of torch only; see ``torch_running``.

Each line of the input is a JSON object: ``{"argv", "env", "cwd", "files"}`` starts a program, and the answer is its
process number; ``{"wait", "seconds"}`` waits for one that was started, and the answer is its exit status or ``null``. A
program runs as ``__main__`` and ends as any interpreter does.
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
    """Fork a process that runs a program, and return its number, or ``None`` in that process."""
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
    """Return the status of a process that ends within a time, as ``subprocess`` returns it, or ``None``."""
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
    """Answer requests until the input ends; return the program of a forked process."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"], request["seconds"])
        elif (answer := start(**request)) is None:
            return request["argv"][0]
        print(json.dumps(answer), flush=True)
    return None


gc.collect()
gc.freeze()  # else each program would visit the objects of torch at its end
if program := serve():
    runpy.run_path(program, run_name="__main__")
