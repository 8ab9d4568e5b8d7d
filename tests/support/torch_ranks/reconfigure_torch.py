"""The program of test_reconfigure_torch.py: the five changes of a group that torchcomms tests, with our calls.

For its arguments and reports see ``forked_torch``. Ranks contribute powers of four: a sum names its contributors.
"""

import time

import torch
import torch.distributed as dist
from forked_torch import Cases, begin, die

from crossreduce.torch import grow, invitation, join, shrink

CASES = Cases()


def expect_group(c, numbers):
    """Check that the default group has these processes of the case, in this order."""
    assert dist.get_rank() == numbers.index(c.number)
    assert dist.get_world_size() == len(numbers)
    x = torch.full((1000,), 4.0**c.number, dtype=torch.float64)
    dist.all_reduce(x)
    assert x.tolist() == [sum(4.0**number for number in numbers)] * 1000
    y = torch.tensor([c.number])
    parts = [torch.empty_like(y) for _ in numbers]
    dist.all_gather(parts, y)
    assert [int(part) for part in parts] == numbers


def grow_to(size):
    """Let processes in until there are so many ranks; return the last group that was made."""
    made = None
    while dist.get_world_size() < size:
        made = grow() or made
        time.sleep(0.02)
    return made


@CASES.add(3)
def identity(c):
    """A shrink without a lost rank keeps all ranks, and their order; also again and again."""
    expect_group(c, [0, 1, 2])
    for _ in range(3):
        assert shrink().reformed == ((0, 1, 2), 2), "a check of the group has two ops"
        expect_group(c, [0, 1, 2])


@CASES.add(4)
def merge_after_a_split(c):
    """Half of the ranks leave, and both halves work; then one half joins the other, its ranks one by one."""
    expect_group(c, [0, 1, 2, 3])
    if c.number < 2:
        shrink()
        expect_group(c, [0, 1])
        if c.number == 0:
            c.publish("invitation", invitation())
    else:
        dist.destroy_process_group()
        begin(c.folder / "store of the second half", c.number - 2, 2)
        expect_group(c, [2, 3])
        dist.destroy_process_group()
        if c.number == 3:
            c.read("2 has joined")
        join(c.read("invitation"))
        c.publish(f"{c.number} has joined", "")
    grow_to(4)
    expect_group(c, [0, 1, 2, 3])


@CASES.add(3, joining=1)
def growth(c):
    """A process joins two ranks."""
    if c.number < 2:
        expect_group(c, [0, 1])
        if c.number == 1:
            c.publish("invitation", invitation())
        assert grow_to(3).reformed.members == (0, 1)
    else:
        assert join(c.read("invitation")).reformed == ((), 0)
    expect_group(c, [0, 1, 2])


@CASES.add(4, killed=(1,))
def shrinkage(c):
    """The ranks that are left are renumbered in their order."""
    expect_group(c, [0, 1, 2, 3])
    if c.number == 1:
        die()
    assert shrink().reformed.members == (0, 2, 3)
    expect_group(c, [0, 2, 3])


@CASES.add(4, killed=(0,), joining=1)
def both_at_once(c):
    """One call of grow leaves a dead rank out and lets a new process in; the dead one is rank 0, who has invited it."""
    if c.number == 3:
        join(c.read("invitation"))
    else:
        expect_group(c, [0, 1, 2])
        if c.number == 0:
            c.publish("invitation", invitation())
            die()
        made = None
        while made is None:
            made = grow()
        assert made.reformed.members == (1, 2)
    expect_group(c, [1, 2, 3])


if __name__ == "__main__":
    CASES.main()
