"""Does a step of MirroredStrategy become faster with more replicas, with and without the interpreter's lock?

The step is Python and NumPy: each replica parses its share of 1024 lines of text, computes the gradient of a small
network, and all-reduces it. The work is the same for any number of replicas. A second row is the time of waiting:
20 all-reduces of 1 KiB per replica. Each interpreter needs the dependencies, and its own build of the modules.
They run in turn. Run: python benchmarks/free_threading.py INTERPRETER=CHECKOUT ... [--json FILE]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
from common import RESULTS, keep, samples, summary

import crossreduce as cr

REPLICAS = (1, 2, 8)
LINES, FEATURES, HIDDEN, STEPS = 1024, 16, 32, 3
ROUNDS, REPEATS = 8, 20


def gradient(lines, first, second):
    """Return the gradient of the squared error of a network with one hidden layer, for samples in a text."""
    rows = np.array([[float(field) for field in line.split(",")] for line in lines])
    x, y = rows[:, :-1], rows[:, -1:]
    hidden = np.tanh(x @ first)
    error = hidden @ second - y
    return {"first": x.T @ (error @ second.T * (1 - hidden**2)), "second": hidden.T @ error}


def training(n):
    """Return a function that trains for some steps on n replicas, and returns the last weights."""
    rng = np.random.default_rng(0)
    lines = [",".join(map(str, row)) for row in rng.standard_normal((LINES, FEATURES + 1)).round(6)]
    strategy = cr.MirroredStrategy(n)
    shares = [lines[k * LINES // n : (k + 1) * LINES // n] for k in range(n)]

    def train():
        context = cr.get_replica_context()
        share = shares[context.replica_id_in_sync_group]
        first, second = np.full((FEATURES, HIDDEN), 0.01), np.full((HIDDEN, 1), 0.01)
        for _ in range(STEPS):
            grads = context.all_reduce("sum", gradient(share, first, second))
            first, second = first - 1e-5 * grads["first"], second - 1e-5 * grads["second"]
        return first

    return lambda: strategy.run(train)


def waiting(n):
    """Return a function that all-reduces 1 KiB per replica 20 times, on n replicas."""
    strategy = cr.MirroredStrategy(n)
    xs = cr.PerReplica([np.full(256, k, np.float32) for k in range(n)])

    def reduce(x):
        for _ in range(20):
            x = cr.get_replica_context().all_reduce("mean", x)
        return x

    return lambda: strategy.run(reduce, args=(xs,))


def measure():
    """Print the times and the version of this interpreter."""
    runs = {f"{name}, {n}": make(n) for name, make in (("step", training), ("waiting", waiting)) for n in REPLICAS}
    print(json.dumps({"name": name_of_interpreter(), "times": samples(runs, REPEATS)}))


def name_of_interpreter():
    """Return the version of Python, whether it is free-threaded, whether its lock is on, and NumPy's version."""
    kind = "free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else "with the lock"
    if kind == "free-threaded":
        assert not sys._is_gil_enabled(), "a module has enabled the lock"
    return f"CPython {platform.python_version()}, {kind}, NumPy {np.__version__}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("interpreters", nargs="*", help="INTERPRETER=CHECKOUT: a path, and a folder with its build")
    parser.add_argument("--json", type=Path, default=RESULTS / "free_threading.json")
    arguments = parser.parse_args()
    if not arguments.interpreters:
        return measure()
    times = {}
    for _ in range(ROUNDS):
        for pair in arguments.interpreters:
            python, _, checkout = pair.partition("=")
            environment = {**os.environ, "PYTHONPATH": f"{checkout}/src"}
            ran = subprocess.run([python, __file__], env=environment, stdout=subprocess.PIPE, check=True)
            found = json.loads(ran.stdout)
            for row, seconds in found["times"].items():
                times.setdefault(found["name"], {}).setdefault(row, []).extend(seconds)
    kept = {name: {row: summary(seconds) for row, seconds in rows.items()} for name, rows in times.items()}
    for name, rows in kept.items():
        print(name)
        for row, result in rows.items():
            ratio = rows[f"{row.partition(',')[0]}, 1"]["min_s"] / result["min_s"]
            median, least = result["median_s"] * 1e3, result["min_s"] * 1e3
            print(f"  {row:12} least {least:8.2f} ms, median {median:8.2f}  x{ratio:.2f} of one replica's rate (least)")
    return keep("free_threading", {"lines": LINES, "steps": STEPS, "interpreters": kept}, arguments.json)


if __name__ == "__main__":
    main()
