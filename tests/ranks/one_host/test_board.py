"""Boards: ranks of one host exchange values in memory that they share."""

import itertools
import mmap
import threading

import pytest
from members import member
from ranks import ranks

from crossreduce.ranks.intra_host import board
from crossreduce.ranks.intra_host.board import Board


def boards(places, memory=None):
    """Return the boards of ranks at these places of a memory."""
    memory = memory or mmap.mmap(-1, 1 << 20)
    return [Board(memory, places, own, itertools.count()) for own in places]


def exchanged(made, keys, values):
    """Return what the ranks get, each in a thread. A rank whose value is ``None`` does not come."""
    found = [None] * len(made)

    def run(k):
        found[k] = made[k].exchange(keys[k], values[k])

    threads = [threading.Thread(target=run, args=(k,)) for k, value in enumerate(values) if value is not None]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def test_all_ranks_get_the_values_of_all_in_their_order(monkeypatch):
    """All get the values in the order of the places that they name, in each exchange, also beside older values."""
    monkeypatch.setattr(board, "_PATIENCE_S", 60)
    made = boards([3, 0, 15])
    for turn in range(5):
        values = [f"{turn} {k}".encode() * 30 for k in range(3)]
        assert exchanged(made, [f"group {turn}"] * 3, values) == [values] * 3


@pytest.mark.parametrize(
    ("keys", "values"),
    [("aaa", [b"x", b"y", None]), ("aab", [b"x", b"y", b"z"]), ("aaa", [b"x", b"y", bytes(1 << 12)])],
    ids=["late", "another exchange", "too long"],
)
def test_no_values_if_those_of_some_ranks_do_not_come(monkeypatch, keys, values):
    """If a rank does not come, is in another exchange, or its value is too long, the others soon stop to wait."""
    monkeypatch.setattr(board, "_PATIENCE_S", 0.05)
    assert exchanged(boards([0, 1, 2]), keys, values) == [None] * 3


def test_an_incomplete_value_is_not_read(monkeypatch):
    """A value of which a byte is missing, or that another rank has written at its place, is not read."""
    monkeypatch.setattr(board, "_PATIENCE_S", 0.05)
    memory = mmap.mmap(-1, 1 << 16)
    first, second = boards([0, 1], memory)
    assert first.exchange("key", b"the value") is None
    at = memory[:].index(b"the value")
    memory[at + 3 : at + 4] = b"?"
    assert second.exchange("key", b"other") is None
    memory[at + 3 : at + 4] = b" "
    assert second.exchange("key", b"other") == [b"the value", b"other"]


def on_a_board(rendezvous):
    """Exchange values in the memory of a group. Return them, and whether there is a board for a rank of another host,
    and after the group is closed."""
    group = member(rendezvous)
    board._PATIENCE_S = 60
    made, none = group.memory.board([1, 0]), group.memory.board([0, 1, 7])
    found = made.exchange("key", f"{rendezvous.rank}".encode())
    rendezvous.all_gather(b"")
    group.close()
    board._PATIENCE_S = 0.05
    return found, none, made.exchange("another", b"")


def test_ranks_of_a_group_have_a_board_in_its_memory():
    """The ranks of a host have a board, and other ranks have none. When the group is closed it gives no values."""
    assert ranks(2, on_a_board) == [([b"1", b"0"], None, None)] * 2
