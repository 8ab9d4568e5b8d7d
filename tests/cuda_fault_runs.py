"""Runs checks of cuda_runs.py with changed copies of the engine, each in a process of its own that starts quickly.

It imports most of what a check needs, apart from the engine, and then forks for each check. Run as a program:
python cuda_fault_runs.py LIBRARY. Each line of the input is a list in JSON: a folder with a copy of the folder
``engines/cuda`` of the package, and the peers, check and count. Each line of the output is one, too: the exit code
(negative: a signal) and what was written to stderr.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

TIMEOUT = 250  # seconds of a check
OTHERS = ["asyncio", "unittest.mock", "scipy.linalg", "scipy.optimize", "scipy.sparse.csgraph", "cuda_launches"]
OTHERS += [f"crossreduce.{name}" for name in ("frameworks.numpy", "topology.machines", "planning.trees.mixing")]
OTHERS += [
    f"crossreduce.planning.{name}" for name in ("exchanges", "forest", "hierarchies", "rings", "shallow.forests")
]


def import_others():
    """Import most modules that checks use, but not the engine."""
    for name in OTHERS:
        importlib.import_module(name)
    assert "crossreduce.engines.cuda" not in sys.modules


def check(library, folder, peers, what, count):
    """Run a check with the copy of the engine in a folder."""
    sys.modules["crossreduce.engines"].__path__.insert(0, str(Path(folder).parent))
    runs = importlib.import_module("cuda_runs")
    assert Path(sys.modules["crossreduce.engines.cuda"].__file__).parent == Path(folder)
    runs.main(library, peers, what, count, 1)


def outcome(library, arguments):
    """Run a check in a forked process; return its exit code and what it wrote to stderr."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            code = 1
            try:
                os.dup2(errors.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                signal.alarm(TIMEOUT)
                check(library, *arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read().decode(errors="replace")


if __name__ == "__main__":
    import_others()
    for line in sys.stdin:
        print(json.dumps(outcome(sys.argv[1], json.loads(line))), flush=True)
