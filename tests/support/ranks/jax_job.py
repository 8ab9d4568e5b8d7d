"""Jobs of several JAX processes: each runs a function of ``jax_cases``, which checks its own results.

Input: the name of a function, and the numbers of processes and of CPU devices of each. Output: how they ended.
"""

import subprocess
import sys
import time

from free_port import free_port


def run(case, processes=2, devices=1, limit_s=120, host="127.0.0.1", start=subprocess.Popen, arguments=()):
    """Run a case, or several that commas separate, one after another. Return for each process its code and its output.

    After ``limit_s`` seconds, kill them.
    ``start``: called as ``Popen``, and for each process with its number as ``rank`` if it is another function.
    """
    port, workers = free_port(), []
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        for number in range(processes):
            about = (case, number, processes, devices, f"{host}:{port}", *arguments)
            command = [sys.executable, "-m", "jax_cases", *map(str, about)]
            where = {} if start is subprocess.Popen else {"rank": number}
            workers.append(start(command, **where, **options))
        late, results = time.monotonic() + limit_s, []
        for worker in workers:
            try:
                output, _ = worker.communicate(timeout=max(0.1, late - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                output = worker.communicate()[0] + f"\nkilled after {limit_s} s"
            results.append((worker.returncode, output))
        return results
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()


def passed(results):
    """Assert that all processes have ended well. Return the last line of each."""
    assert [code for code, _ in results] == [0] * len(results), "\n---\n".join(text[-6000:] for _, text in results)
    return [(text.strip().splitlines() or [""])[-1] for _, text in results]
