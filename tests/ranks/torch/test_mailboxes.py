"""The native mailboxes: messages that wait, are withdrawn, or are sent to closed mailboxes."""

import ctypes
import os
import struct
import subprocess
import time
import weakref

import pytest
from compiled import compiled
from paths import ROOT

from crossreduce import kernels


class Memory:
    """Memory of ``nbytes`` bytes with the value ``fill``."""

    def __init__(self, nbytes, fill):
        self.buffer = (ctypes.c_char * nbytes).from_buffer(bytearray([fill]) * nbytes)
        self.nbytes = nbytes

    @property
    def arguments(self):
        return ctypes.addressof(self.buffer), self.nbytes, self


def finished(*ends):
    """Call ``wait`` for each (mailboxes, message number) until all have ended. Return the outcome of the first one."""
    deadline, outcomes = time.monotonic() + 100, [-1] * len(ends)
    while -1 in outcomes:
        assert time.monotonic() < deadline
        for k, (boxes, number) in enumerate(ends):
            if outcomes[k] == -1:
                outcomes[k] = boxes.wait(number, 0.01) if number else None
    return outcomes[0]


@pytest.mark.parametrize("reads", [True, False])
def test_a_withdrawn_message_is_not_written(reads):
    """The memory of a withdrawn receive is not written any more, and is released. If its message was not matched yet,
    the next receive gets it. A withdrawn send is not written to a rank that cannot read the sender's memory. Closed
    mailboxes refuse all calls, and the other rank can see that they are closed."""
    native, large, small = kernels.native(), 300_000, 1000
    fd = os.memfd_create("test")
    os.ftruncate(fd, native.Mailboxes.nbytes(2))
    first, second = (native.Mailboxes(fd, 0, rank, 2, 0.0, reads) for rank in (0, 1))
    for nbytes in (large, small):
        old, new, data = Memory(nbytes, 1), Memory(nbytes, 2), Memory(nbytes, 3)
        alive, number = weakref.ref(old), second.receive(0, 5, *old.arguments)
        assert second.wait(number, 0.0) == -1
        assert second.withdraw(number) is True
        assert second.wait(number, 0.0) is None
        sent = first.send(1, 5, *data.arguments)
        finished((second, second.receive(-1, 5, *new.arguments)), (first, sent))
        assert new.buffer.raw == bytes([3]) * nbytes
        assert old.buffer.raw == bytes([1]) * nbytes
        del old
        assert alive() is None
    # A receive that is withdrawn after its message was matched, or, without reads, partly written.
    old, data, new = Memory(large, 1), Memory(large, 3), Memory(small, 2)
    number, sent = second.receive(0, 6, *old.arguments), first.send(1, 6, *data.arguments)
    if not reads:
        while second.wait(number, 0.0) == -1 and old.buffer[0] == b"\1":
            first.wait(sent, 0.0)
    second.withdraw(number)
    seen, receive = old.buffer.raw, second.receive(0, 6, *new.arguments)
    if reads:  # the message was not read yet, so the next receive gets it
        assert finished((second, receive), (first, sent)) == (0, large)
    else:
        deadline = time.monotonic() + 100
        while first.wait(sent, 0.01) == -1:
            second.wait(receive, 0.01)
            assert time.monotonic() < deadline
        # A withdrawn send is not written to a rank that cannot read the sender's memory.
        got = Memory(large, 1)
        sent = first.send(1, 8, *data.arguments)
        assert first.withdraw(sent) is False
        receive = second.receive(0, 8, *got.arguments)
        for _ in range(3):
            assert second.wait(receive, 0.01) == first.wait(sent, 0.01) == -1
        assert got.buffer.raw == bytes([1]) * large
        assert second.withdraw(receive) is True
    assert old.buffer.raw == seen
    number = first.receive(1, 3, *new.arguments)
    assert (first.mood(1), second.mood(0)) == (0, 0)
    second.give_up()
    assert first.mood(1) == 2
    second.close()
    assert first.mood(1) == 1
    for call in (lambda: second.wait(number, 0.0), lambda: second.send(0, 3, *new.arguments)):
        with pytest.raises(ValueError, match="closed"):
            call()
    os.close(fd)


def test_a_rank_allocates_the_rings_that_it_writes():
    """Before its first message, a rank lets the system allocate its rings: an access to memory that the system cannot
    allocate would end its process."""
    native, data = kernels.native(), Memory(8, 3)
    rings = native.Mailboxes.nbytes(2) - native.Mailboxes.head_nbytes(2)
    with os.fdopen(os.memfd_create("test"), "wb") as file:
        file.truncate(native.Mailboxes.nbytes(2))
        boxes = native.Mailboxes(file.fileno(), 0, 0, 2, 0.0, True)
        assert os.fstat(file.fileno()).st_blocks * 512 < rings // 2
        assert boxes.send(1, 5, *data.arguments) == 0
        assert rings // 2 <= os.fstat(file.fileno()).st_blocks * 512 < rings
        boxes.close()


@pytest.mark.parametrize("length", [100, 1 << 20, 2**32 - 1])
def test_a_length_that_no_rank_has_written_is_not_used(length):
    """If a record is longer than what was written, nothing beyond it is read, and no message arrives."""
    native, data, got = kernels.native(), Memory(8, 3), Memory(8, 1)
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes := native.Mailboxes.nbytes(2))
    first, second = (native.Mailboxes(fd, 0, rank, 2, 0.0, True) for rank in (0, 1))
    assert first.send(1, 5, *data.arguments) == 0
    at = os.pread(fd, nbytes, 0).find(struct.pack("<IIqQ", 0, 8, 5, 0))
    os.pwrite(fd, length.to_bytes(4, "little"), at + 4)
    number = second.receive(0, 5, *got.arguments)
    assert second.wait(number, 0.01) == -1
    assert second.withdraw(number) is True
    assert got.buffer.raw == bytes([1]) * 8
    first.close()
    second.close()
    os.close(fd)


def test_each_sleeping_thread_is_woken():
    """A bell wakes all threads that have one: also those that notice it only after another thread has reset its own."""
    folder, source = ROOT / "src/crossreduce/native/mailboxes", ROOT / "tests/support/native/bell_cases.cpp"
    command = ["g++", "-std=c++17", "-pthread", f"-I{folder}"]
    program = compiled("bell_cases", command, [source], [folder / "bells.hpp"])
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "all were woken\n"
