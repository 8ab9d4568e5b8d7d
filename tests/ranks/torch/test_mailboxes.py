"""The compiled mailboxes: messages that wait, are withdrawn, or come to closed mailboxes."""

import ctypes
import os
import time
import weakref

import pytest

from crossreduce import kernels


class Memory:
    """Memory of so many bytes, all of one value."""

    def __init__(self, nbytes, fill):
        self.buffer = (ctypes.c_char * nbytes).from_buffer(bytearray([fill]) * nbytes)
        self.nbytes = nbytes

    @property
    def arguments(self):
        return ctypes.addressof(self.buffer), self.nbytes, self


def test_a_withdrawn_receive_is_not_written():
    """The compiled mailboxes: a receive that is withdrawn, at any time, is not written any more, and its message, if it
    was not matched yet, is for the next receive; memory is referenced until then; many messages wait for a receive."""
    native, slice_s = kernels.native(), 0.05
    fd = os.memfd_create("test")
    os.ftruncate(fd, native.Mailboxes.nbytes(2))
    for wrong in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match="arguments are"):
            native.Mailboxes(fd, 0, *wrong, 0.0, True)
    with pytest.raises(OSError, match="space"):
        native.Mailboxes(fd, 1 << 16, 0, 2, 0.0, True)
    for reads in (True, False):
        os.ftruncate(fd, 0)
        os.ftruncate(fd, native.Mailboxes.nbytes(2))
        first, second = (native.Mailboxes(fd, 0, rank, 2, 0.0, reads) for rank in (0, 1))
        large, small = 300_000, 1000
        for nbytes in (large, small):
            old, new, data = Memory(nbytes, 1), Memory(nbytes, 2), Memory(nbytes, 3)
            alive, number = weakref.ref(old), second.receive(0, 5, *old.arguments)
            assert second.wait(number, 0.0) == -1
            assert second.withdraw(number) is True
            assert second.wait(number, 0.0) is None
            sent = first.send(1, 5, *data.arguments)
            receive = second.receive(-1, 5, *new.arguments)
            deadline = time.monotonic() + 10
            while second.wait(receive, 0.01) == -1 or (sent and first.wait(sent, 0.01) == -1):
                assert time.monotonic() < deadline
            assert new.buffer.raw == bytes([3]) * nbytes
            assert old.buffer.raw == bytes([1]) * nbytes
            del old
            assert alive() is None
        # Withdrawn after its message was matched; with parts, after some of them were written.
        old, data = Memory(large, 1), Memory(large, 3)
        number = second.receive(0, 6, *old.arguments)
        sent = first.send(1, 6, *data.arguments)
        if not reads:
            while second.wait(number, 0.0) == -1 and old.buffer[0] == b"\1":
                first.wait(sent, 0.0)
        second.withdraw(number)
        seen = old.buffer.raw
        new, receive = Memory(small, 2), second.receive(0, 6, *Memory(small, 2).arguments)
        if reads:  # the offer was not read yet, so the next receive gets it
            while (outcome := second.wait(receive, slice_s)) == -1:
                pass
            assert outcome == (0, large)
        deadline = time.monotonic() + 10
        while first.wait(sent, 0.01) == -1:
            second.wait(receive, 0.01)
            assert time.monotonic() < deadline
        assert old.buffer.raw == seen
        # A withdrawn send is not written to the other rank any more, if that one cannot read it.
        if not reads:
            data, got = Memory(large, 3), Memory(large, 1)
            sent = first.send(1, 8, *data.arguments)
            assert first.withdraw(sent) is False
            receive = second.receive(0, 8, *got.arguments)
            for _ in range(3):
                assert second.wait(receive, 0.01) == first.wait(sent, 0.01) == -1
            assert got.buffer.raw == bytes([1]) * large
            assert second.withdraw(receive) is True
        # Messages without a receive: at first they are copied, later they stay with their sender.
        data, waiting = [Memory(8000, k % 251) for k in range(1500)], []
        for one in data:
            waiting.append(first.send(1, 7, *one.arguments))
            second.wait(second.receive(0, 99, *new.arguments), 0.0)
        assert 100 < sum(number > 0 and first.wait(number, 0.0) == -1 for number in waiting) < 1400
        for k in range(1500):
            got = Memory(8000, 255)
            receive = second.receive(0, 7, *got.arguments)
            while second.wait(receive, slice_s) == -1:
                pass
            assert got.buffer.raw == bytes([k % 251]) * 8000, k
        # Closed mailboxes refuse everything, and tell the other rank.
        number = first.receive(1, 3, *new.arguments)
        assert (first.mood(1), second.mood(0)) == (0, 0)
        second.give_up()
        assert first.mood(1) == 2
        second.close()
        second.close()
        assert first.mood(1) == 1
        with pytest.raises(ValueError, match="closed"):
            second.wait(number, 0.0)
        with pytest.raises(ValueError, match="closed"):
            second.send(0, 3, *new.arguments)
        with pytest.raises(ValueError, match="range"):
            first.send(2, 3, *new.arguments)
        del first, second
    os.close(fd)
