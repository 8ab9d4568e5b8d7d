"""Resources of the ranks of one host after many calls and groups."""

import gc
import random
import threading

from members import Resources, member, resident_bytes, summed
from ranks import ranks

from crossreduce.ranks.inter_host import one_host
from crossreduce.ranks.intra_host.programs import PIECE_BYTES


def soak(rendezvous):
    one_host.CACHED_STAGES = 500  # small, so that the cache also removes executables
    comm = member(rendezvous)
    draw, stages = random.Random(3), []
    sizes = [draw.randrange(1, 5000) for _ in range(500)]
    sizes[::50] = range(PIECE_BYTES, PIECE_BYTES + 10)  # these run programs of more stages than short ones

    def reductions(count):
        for k in range(count):
            summed(comm, sizes[k % 500])
            stages.append(comm.calls.executables.stages)
        gc.collect()
        return resident_bytes(), Resources()

    before, resources = reductions(800)
    after, later = reductions(1500)
    comm.close()
    return before, after, resources == later, max(stages)


def test_many_reductions_leak_nothing():
    """1,500 reductions of 500 shapes change the memory of a rank by less than 1 %, and no other resource. The cache of
    executables is limited by the number of their stages."""
    for before, after, same, highest in ranks(2, soak, timeout_s=120):
        assert same
        assert abs(after - before) < before / 100, (before, after)
        assert 400 < highest <= 500


def many_groups(rendezvous):
    def make(count, base):
        for k in range(count):
            comm = member(rendezvous, 20, f"group {base + k}")
            assert threading.active_count() == 1
            summed(comm, 10)
            if k % 2 == 0:
                comm.barrier()  # so that no rank leaves before the others have finished
            comm.close()
        gc.collect()
        return resident_bytes(), Resources()

    before, resources = make(10, 0)
    after, later = make(30, 10)
    return resources == later, before, after


def test_many_groups_leave_nothing():
    """30 groups, made and closed, leave no descriptor, mapping or thread; memory grows by less than 2 % or 1 MiB. A
    group on one host has no thread of its own."""
    for same, before, after in ranks(2, many_groups, timeout_s=120):
        assert same
        assert after - before < max(before / 50, 1 << 20), (before, after)
