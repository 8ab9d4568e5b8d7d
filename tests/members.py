"""Groups on one host, for tests: a rank's communicator, arrays as buffers, random arrays, and what a process holds."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

import numpy as np
import oracle
from ranks import Meet

from crossreduce.ranks.communicator import Communicator
from crossreduce.transports.base import Buffer


def buffer(array):
    """Return an array's memory; the array must stay."""
    assert array.flags.c_contiguous
    return Buffer(array.ctypes.data, array.size, array.dtype.name, array.shape)


def buffers(arrays):
    return [buffer(array) for array in arrays]


def member(rendezvous, timeout_s=20.0, name="world"):
    """Join a group whose ranks are all on this host."""
    if name != "world":
        rendezvous = Meet(rendezvous.path, rendezvous.rank, rendezvous.size, name)
    return Communicator(rendezvous, None, name=name, timeout_s=timeout_s)


def random_array(draw, size, dtype):
    """Return random numbers that a few sums and products keep finite."""
    made = oracle.dtype_of(dtype)
    if made.kind == "b":
        return draw.integers(0, 2, size).astype(bool)
    if made.kind in "iu":
        return draw.integers(0, 256, size * made.itemsize).astype(np.uint8).view(made)
    if made.kind == "c":
        return (draw.standard_normal(size) + 1j * draw.standard_normal(size)).astype(made)
    return (draw.standard_normal(size) * 2.0 ** draw.integers(-3, 4, size)).astype(made)


def poisoned(size, dtype):
    """Return memory whose bytes no reduction gives by chance."""
    made = oracle.dtype_of(dtype)
    return np.full(size * made.itemsize, 0x5B, np.uint8).view(made)


def untouched(array):
    """Return whether ``poisoned`` memory is as it was."""
    return bool((array.reshape(-1).view(np.uint8) == 0x5B).all())


class Warnings(logging.Handler):
    """What the library warns of from now on, in this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("crossreduce").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


class Holds:
    """What this process holds: descriptors of shared memory, mappings of it, sockets, threads."""

    def __init__(self):
        self.files = sorted(_links())
        maps = Path("/proc/self/maps").read_text().splitlines()
        self.mappings = sum("memfd:" in line or "/dev/shm" in line for line in maps)
        self.threads = sorted(thread.name for thread in threading.enumerate())
        # Other programs come and go there, too.
        self.shm = sorted(Path("/dev/shm").glob("*crossreduce*"))

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None

    def __repr__(self):
        return repr(vars(self))


def _links():
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own
            link = str(entry.readlink())
            if not link.startswith("/proc/"):
                yield link.split(":[")[0]


def resident_bytes():
    """Return how much memory of its own this process has now (what is shared is counted with whoever has it)."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
