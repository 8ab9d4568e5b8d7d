"""The machine of the stand-in: memory of 8 devices, and the order of work on their streams. CuPy has no such module.

A test may replace ``allocate``, ``free`` and ``synchronize``. Functions of the stand-in run at once, in the order of
the calls, but on a GPU their work runs in any order that the streams allow. So each access of memory is checked: what
it needs must be earlier on the same stream, or ordered by events or the host. ``faults`` lists accesses that are not.
"""

import ctypes
import threading
import weakref

DEVICES = 8
NULL = 0
faults = []
checks_order = True  # False if a driver orders work by means that the stand-in does not know
_lock = threading.RLock()
_blocks = {}
# A clock counts the work of each stream. A stream's own clock has the work that is certainly done before its next work.
_clocks = {}
_host = {}
_waits = []  # the host's; for each stream, how many of them its clock has
_seen = {}


def allocate(nbytes, device):
    """Return the address of new memory on a device."""
    block = ctypes.create_string_buffer(nbytes + 256)
    address = -(-ctypes.addressof(block) // 256) * 256
    ctypes.memset(address, 0xA5, nbytes)  # memory that was not written must not be 0 by chance
    _blocks[address] = block
    return address


def free(address, nbytes, device):
    """Free memory from ``allocate``."""
    ctypes.memset(address, 0x5A, nbytes)
    del _blocks[address]


def synchronize():
    """Return when all work is done; called before each access of memory by the host."""


def merge(clock, other):
    """Let a clock also have what another clock has."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


def clock_of(stream):
    """Return a stream's clock; what the host waited for so far is done before new work. A stream: (device, address)."""
    clock = _clocks.setdefault(stream, {})
    if _seen.get(stream) != len(_waits):
        merge(clock, _host)
        _seen[stream] = len(_waits)
    return clock


def snapshot(stream):
    """Return the clock of an event that is recorded on a stream."""
    with _lock:
        return dict(clock_of(stream))


def wait(stream, clock):
    """Let a stream (``None``: the host) wait for an event's clock."""
    with _lock:
        if stream is None:
            _waits.append(None)
        merge(_host if stream is None else clock_of(stream), clock)


class Block:
    """Memory on one device, and the last accesses of it."""

    def __init__(self, nbytes, device, stream):
        self.nbytes, self.device = nbytes, device
        self.address = allocate(nbytes, device) if nbytes else 0
        self.stream = stream  # CuPy's memory pool gives freed memory to new arrays that are made on this stream
        self.accesses = {}  # for each stream the count of its last access, and of its last write
        if nbytes:
            weakref.finalize(self, _release, self.address, nbytes, device, stream, self.accesses)

    def access(self, stream, writes):
        """Record work on a stream that reads or writes this memory."""
        with _lock:
            clock = clock_of(stream)
            for other, (access, write) in self.accesses.items():
                if checks_order and clock.get(other, 0) < (access if writes else write):
                    doing = "written" if writes else "read"
                    faults.append(f"memory of device {self.device} is {doing} on {stream} before {other} is done")
            clock[stream] = count = clock.get(stream, 0) + 1
            _, write = self.accesses.get(stream, (0, 0))
            self.accesses[stream] = (count, count if writes else write)


def _release(address, nbytes, device, stream, accesses):
    with _lock:
        clock = snapshot(stream)
        for other, (access, _) in accesses.items():
            if checks_order and clock.get(other, 0) < access:
                faults.append(f"memory of device {device} is freed on {stream} before {other} is done")
    free(address, nbytes, device)
