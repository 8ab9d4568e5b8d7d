"""Helpers for tests of groups on one host: communicators, arrays as memory, warnings, and resources of a process."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracle
from ranks import SocketRendezvous

from crossreduce import mpi
from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import ArrayView, Communicator


def memory(array):
    """Return the memory of an array, which the caller must keep alive."""
    assert array.flags.c_contiguous
    return ArrayView(array.ctypes.data, array.size, array.dtype.name, array.shape)


def memories(arrays):
    return [memory(array) for array in arrays]


def member(rendezvous, timeout_s=60.0, name="world"):
    """Return this rank's communicator in a group whose ranks are all on this host."""
    if name != "world":
        rendezvous = SocketRendezvous(rendezvous.path, rendezvous.rank, rendezvous.size, name)
    return Communicator(rendezvous, None, name=name, timeout_s=timeout_s)


def array_group(comm):
    """Return a group for NumPy arrays that uses a communicator. On one host most of its calls run in native code."""
    return mpi.MpiGroup(comm, SimpleNamespace(close=lambda _: None))


def poisoned(size, dtype):
    """Return an array of bytes that no reduction produces by chance."""
    made = oracle.dtype_of(dtype)
    return np.full(size * made.itemsize, 0x5B, np.uint8).view(made)


def untouched(array):
    """Return whether ``poisoned`` memory is unchanged."""
    return bool((array.reshape(-1).view(np.uint8) == 0x5B).all())


class Warnings(logging.Handler):
    """A log handler that collects the texts of the library's later warnings in this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("crossreduce").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


class Resources:
    """The descriptors, mappings of shared memory and threads of this process, and the library's files in /dev/shm."""

    def __init__(self):
        self.files = sorted(_links())
        maps = Path("/proc/self/maps").read_text().splitlines()
        self.mappings = sum("memfd:" in line or "/dev/shm" in line for line in maps)
        self.threads = sorted(thread.name for thread in threading.enumerate())
        # Only this library's files, since other programs may create and delete files there.
        self.shm = sorted(Path("/dev/shm").glob("*crossreduce*"))

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None

    def __repr__(self):
        return repr(vars(self))


def _links():
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the directory itself
            link = str(entry.readlink())
            if not link.startswith("/proc/"):
                yield link.split(":[")[0]


def resident_bytes():
    """Return the bytes of this process's private memory."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


class Starter:
    """Lets the test's process wait until all ranks have joined, so that its signals arrive during their calls."""

    def __init__(self, n):
        self.n, self.joined = n, multiprocessing.get_context("fork").Semaphore(0)

    def ready(self):
        self.joined.release()

    def wait(self):
        for k in range(self.n):
            assert self.joined.acquire(timeout=100), f"only {k} of {self.n} ranks have joined"


@contextlib.contextmanager
def starter(n):
    yield Starter(n)


def summed(comm, size=1000):
    """Make one all-reduce, and check its result."""
    x = np.full(size, comm.rank + 1, np.int64)
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    assert (x == comm.size * (comm.size + 1) // 2).all()


def every_call(comm, size):
    """Return for each collective's name a function that calls it, on ``size`` float32 elements and with root 0."""
    x, rows, others, root = np.ones(size, np.float32), *np.ones((2, comm.size, size), np.float32), comm.rank == 0
    return {
        "all_reduce": lambda: comm.all_reduce(ReduceOp.SUM, memory(x), memory(others[0])),
        "reduce": lambda: comm.reduce(ReduceOp.SUM, memory(x), memory(others[0]) if root else None, 0),
        "broadcast": lambda: comm.broadcast(memory(x), 0),
        "all_gather": lambda: comm.all_gather(memory(x), memories(others)),
        "reduce_scatter": lambda: comm.reduce_scatter(ReduceOp.SUM, memories(rows), memory(x)),
        "gather": lambda: comm.gather(memory(x), memories(others) if root else None, 0),
        "scatter": lambda: comm.scatter(memories(rows) if root else None, memory(x), 0),
        "all_to_all": lambda: comm.all_to_all(memories(rows), memories(others)),
        "barrier": comm.barrier,
    }
